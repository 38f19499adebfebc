//! Memory by name, from `egmem serve` and other servers of the exchange.

use std::ffi::c_char;
use std::time::Duration;

use egmem::exchange::blocking::Client;
use egmem::exchange::{Address, Client as Connection, Owner, Security, Tls, TlsFiles};
use egmem::share::Peers;

use crate::buffer::Kind;
use crate::call::call;
use crate::call_site::call_that_allocates;
use crate::failure::{Failure, Outcome};
use crate::options::{check_flags, read};
use crate::{
    EGM_PLAIN_ANYWHERE, EGM_READ_ONLY, args, egm_buffer, egm_client_options, egm_driver, egm_status,
};

/// A connection to a server, from which memory is fetched by name, and which creates memory. Any thread may use it, several
/// at a time. It has a thread of its own.
pub struct egm_client {
    pub(crate) client: Client,
    read_only: bool,
}

/// Connects to a server at "unix:/path" or "tcp://host:port". `options` may be null: no TLS, servers of this user and
/// root.
///
/// Fails with ::EGM_UNREACHABLE, ::EGM_NOT_TRUSTED, ::EGM_INSECURE for another machine without TLS, ::EGM_TLS,
/// ::EGM_TIMED_OUT.
///
/// # Safety
/// `driver` is null or a driver; `address` is null or a string; `options` is null or points to as many bytes as its
/// first field says; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_connect(
    driver: *const egm_driver,
    address: *const c_char,
    options: *const egm_client_options,
    out: *mut *mut egm_client,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let driver = unsafe { args::object(driver, "driver")? };
        let out = args::out(out, "out")?;
        // SAFETY: the caller's promise.
        let address: Address = unsafe { args::text(address, "address")? }.parse()?;
        let options = match options.is_null() {
            true => None,
            // SAFETY: the caller's promise.
            false => Some(unsafe { read(options)? }),
        };
        // SAFETY: the caller's promise.
        let client = unsafe { connect(driver, address, options.as_ref())? };
        // SAFETY: the caller's promise.
        unsafe { args::give(out, client) };
        Ok(())
    })
}

/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn connect(
    driver: &egm_driver,
    address: Address,
    options: Option<&egm_client_options>,
) -> Outcome<egm_client> {
    let mut peers = Peers::same_user().and_user(0);
    let mut build = Connection::options(address);
    let mut read_only = false;
    if let Some(options) = options {
        check_flags(options.flags, EGM_PLAIN_ANYWHERE | EGM_READ_ONLY)?;
        read_only = options.flags & EGM_READ_ONLY != 0;
        peers = peers.and_user(options.server_user);
        if options.timeout_ms != 0 {
            build = build.timeout(Duration::from_millis(options.timeout_ms));
        }
        // SAFETY: the caller's promise.
        if let Some(owner) = unsafe { args::optional_text(options.expect_owner, "expect_owner")? } {
            build = build.expect_owner(owner.parse::<Owner>()?);
        }
        // SAFETY: the caller's promise.
        build = build.security(unsafe { security(options)? });
    }
    let client = Client::connect(build.peers(peers), &driver.driver)?;
    Ok(egm_client { client, read_only })
}

/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn security(options: &egm_client_options) -> Outcome<Security> {
    let file = |path, what| {
        // SAFETY: the caller's promise.
        unsafe { args::optional_text(path, what) }
    };
    let files = (
        file(options.ca, "ca")?,
        file(options.cert, "cert")?,
        file(options.key, "key")?,
    );
    let (crl, expect) = (
        file(options.crl, "crl")?,
        file(options.expect_peer, "expect_peer")?,
    );
    let plain_anywhere = options.flags & EGM_PLAIN_ANYWHERE != 0;
    match files {
        (Some(ca), Some(cert), Some(key)) if !plain_anywhere => {
            let tls = Tls::load(TlsFiles {
                ca: ca.into(),
                cert: cert.into(),
                key: key.into(),
                crl: crl.map(Into::into),
            })?;
            Ok(Security::Tls(match expect {
                Some(name) => tls.expect_peer(name)?,
                None => tls,
            }))
        }
        (None, None, None) if crl.is_none() && expect.is_none() => Ok(match plain_anywhere {
            true => Security::PlainAnywhere,
            false => Security::Plain,
        }),
        _ => Err(Failure::invalid(
            "certificates",
            "ca, cert and key go together; crl and expect_peer need them, and EGM_PLAIN_ANYWHERE excludes them",
        )),
    }
}

/// Fetches the memory under a name: takes a lease on it and maps it here, for the CPU and every GPU that can reach
/// it. egm_buffer_destroy() ends the lease. The CPU proves that the server sees the same memory, if there is room for
/// the proof; no GPU's context is created for it.
///
/// Fails with ::EGM_REFUSED, for instance if there is no such name; ::EGM_MISMATCHED for another owner than expected;
/// ::EGM_NO_COMMON_HANDLE, ::EGM_IMPORT_FAILED, ::EGM_DATA_PLANE, ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// # Safety
/// `client` is null or a client; `name` is null or a string; `out` is null or may be written. Any thread may call
/// this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_fetch(
    client: *const egm_client,
    name: *const c_char,
    out: *mut *mut egm_buffer,
) -> egm_status {
    call_that_allocates(|| {
        // SAFETY: the caller's promise.
        let client = unsafe { args::object(client, "client")? };
        // SAFETY: the caller's promise.
        let name = unsafe { args::text(name, "name")? };
        let out = args::out(out, "out")?;
        let fetched = client
            .client
            .fetch_with(name, |options| match client.read_only {
                true => options.read_only(),
                false => options,
            })?;
        let memory = Kind::Fetched(fetched);
        // SAFETY: the caller's promise.
        unsafe { args::give(out, egm_buffer { memory }) };
        Ok(())
    })
}

/// Destroys a client. Fetched memory and its leases stay until the buffers are destroyed. A null pointer is left
/// alone.
///
/// # Safety
/// `client` is null, or a client that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_destroy(client: *mut egm_client) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { args::take(client) });
        Ok(())
    })
}
