//! Memory by name, from `egmem serve` and other servers of the exchange: fetched, created, listed, awaited and deleted.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::time::Duration;

use egmem::driver::{Location, NodeId};
use egmem::exchange::blocking::Client;
use egmem::exchange::protocol::Entry;
use egmem::exchange::{
    Address, Client as Connection, ClientOptions, CreateOptions, Owner, Security, Tls, TlsFiles,
};
use egmem::share::Peers;

use crate::args::{milliseconds, write};
use crate::failure::{Failure, Outcome, given_json, given_text};
use crate::options::{With, check_flags, nonzero, read_or_zeros};
use crate::{
    EGM_EXIST_OK, EGM_LOCATION_HOST_NUMA, EGM_PLAIN_ANYWHERE, EGM_READ_ONLY, args, ask, destroy,
    egm_buffer, egm_client_options, egm_create_options, egm_driver, egm_entry, egm_location,
    egm_status, make, noted, on,
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
    driver: Option<&egm_driver>,
    address: *const c_char,
    options: *const egm_client_options,
    out: Option<&mut MaybeUninit<*mut egm_client>>,
) -> egm_status {
    make(driver, out, |driver| {
        // SAFETY: the caller's promise.
        let address: Address = unsafe { args::text(address, "address")? }.parse()?;
        // SAFETY: the caller's promise.
        unsafe { connect(driver, address, &read_or_zeros(options)?) }
    })
}

/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn connect(
    driver: &egm_driver,
    address: Address,
    options: &egm_client_options,
) -> Outcome<egm_client> {
    check_flags(options.flags, EGM_PLAIN_ANYWHERE | EGM_READ_ONLY)?;
    let peers = Peers::same_user().and_user(0);
    // SAFETY: the caller's promise.
    let security = unsafe { security(options)? };
    // SAFETY: the caller's promise.
    let owner = unsafe { args::optional_text(options.expect_owner, "expect_owner")? };
    let owner = owner.map(str::parse::<Owner>).transpose()?;
    let timeout = nonzero(options.timeout_ms).map(Duration::from_millis);
    let build = Connection::options(address)
        .peers(peers.and_user(options.server_user))
        .security(security)
        .with(timeout, ClientOptions::timeout)
        .with(owner, ClientOptions::expect_owner);
    let client = Client::connect(build, &driver.0)?;
    let read_only = options.flags & EGM_READ_ONLY != 0;
    Ok(egm_client { client, read_only })
}

/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn security(options: &egm_client_options) -> Outcome<Security> {
    let file = |path, what| {
        // SAFETY: the caller's promise.
        unsafe { args::optional_text(path, what) }
    };
    let (ca, cert) = (file(options.ca, "ca")?, file(options.cert, "cert")?);
    let (key, crl) = (file(options.key, "key")?, file(options.crl, "crl")?);
    let expect = file(options.expect_peer, "expect_peer")?;
    let plain_anywhere = options.flags & EGM_PLAIN_ANYWHERE != 0;
    match (ca, cert, key) {
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
        (None, None, None) if crl.is_none() && expect.is_none() && plain_anywhere => {
            Ok(Security::PlainAnywhere)
        }
        (None, None, None) if crl.is_none() && expect.is_none() => Ok(Security::Plain),
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
    client: Option<&egm_client>,
    name: *const c_char,
    out: Option<&mut MaybeUninit<*mut egm_buffer>>,
) -> egm_status {
    let fetch = |client: &egm_client| {
        // SAFETY: the caller's promise.
        let name = unsafe { args::text(name, "name")? };
        let fetched = client.client.fetch_with(name, |options| {
            if client.read_only {
                options.read_only()
            } else {
                options
            }
        })?;
        Ok(egm_buffer::Fetched(fetched))
    };
    noted(|| make(client, out, fetch))
}

/// Destroys a client. Fetched memory and its leases stay until the buffers are destroyed. A null pointer is left
/// alone.
///
/// # Safety
/// `client` is null, or a client that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_destroy(client: *mut egm_client) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(client) }
}

impl From<&Entry> for egm_entry {
    fn from(entry: &Entry) -> Self {
        let first = entry.memory.parts.first().map(|part| part.location);
        Self {
            bytes: entry.memory.len,
            location: egm_location::of(first.unwrap_or(Location::Host)),
            leases: entry.leases,
            reserved: 0,
        }
    }
}

/// Has `egmem serve` create memory of `bytes` under a name. It stays until it is deleted, and outlives this process:
/// fetch it by egm_client_fetch(). `options` may be null: a node of the server's choice, for this peer only. `out` may be
/// null.
///
/// A server lets a peer create only names under its prefixes: by default those that begin with the text of
/// egm_client_peer_name() and a slash. The call takes 5 minutes at most; drivers create 4 to 6 GB a second.
///
/// Fails with ::EGM_REFUSED for a name outside the prefixes, one that exists, and a quota; with ::EGM_EXIST_OK with
/// ::EGM_MISMATCHED if the name has another owner, size or node; ::EGM_INVALID_ARGUMENT, ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// # Safety
/// `client` is null or a client; `name` is null or a string; `options` is null or points to as many bytes as its first field
/// says; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_create(
    client: Option<&egm_client>,
    name: *const c_char,
    bytes: u64,
    options: *const egm_create_options,
    out: Option<&mut MaybeUninit<egm_entry>>,
) -> egm_status {
    on(client, |client| {
        // SAFETY: the caller's promise.
        let name = unsafe { args::text(name, "name")? };
        // SAFETY: the caller's promise.
        let options = unsafe { read_or_zeros(options)? };
        // SAFETY: the caller's promise.
        let create = unsafe { with_options(CreateOptions::new(name, bytes), &options)? };
        let entry = if options.flags & EGM_EXIST_OK != 0 {
            client.client.create_or_get(create)?
        } else {
            client.client.create(create)?
        };
        write(out, egm_entry::from(&entry));
        Ok(())
    })
}

/// Returns the request with a program's options.
///
/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn with_options(
    mut create: CreateOptions,
    options: &egm_create_options,
) -> Outcome<CreateOptions> {
    check_flags(options.flags, EGM_EXIST_OK)?;
    match options.location.kind {
        0 => {}
        EGM_LOCATION_HOST_NUMA => create = create.node(NodeId(options.location.id)),
        kind => {
            let why = format!("its kind {kind} is neither 0 nor EGM_LOCATION_HOST_NUMA");
            return Err(Failure::invalid("location", why));
        }
    }
    // SAFETY: the caller's promise.
    let peers = unsafe { args::values(options.share_with, options.share_count, "share_with")? };
    for &peer in peers {
        // SAFETY: the caller's promise.
        create = create.share_with(unsafe { args::text(peer, "share_with")? });
    }
    Ok(create)
}

/// Deletes memory that this peer has created, and waits at most `timeout_ms` milliseconds, at least 1, for the processes
/// that hold it.
///
/// Fails with ::EGM_TIMED_OUT if it is still held: it is then being withdrawn, and no process can fetch it any more. Fails with
/// ::EGM_REFUSED if there is no such name or another peer has created it; ::EGM_PEER_LOST.
///
/// # Safety
/// `client` is null or a client; `name` is null or a string. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_delete(
    client: Option<&egm_client>,
    name: *const c_char,
    timeout_ms: u64,
) -> egm_status {
    on(client, |client| {
        // SAFETY: the caller's promise.
        let name = unsafe { args::text(name, "name")? };
        Ok(client.client.delete(name, milliseconds(timeout_ms)?)?)
    })
}

/// Waits at most `timeout_ms` milliseconds, at least 1, until there is memory under a name that this peer may fetch. `out`
/// may be null.
///
/// Fails with ::EGM_TIMED_OUT if there is none by then; ::EGM_PEER_LOST.
///
/// # Safety
/// `client` is null or a client; `name` is null or a string; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_wait(
    client: Option<&egm_client>,
    name: *const c_char,
    timeout_ms: u64,
    out: Option<&mut MaybeUninit<egm_entry>>,
) -> egm_status {
    on(client, |client| {
        // SAFETY: the caller's promise.
        let name = unsafe { args::text(name, "name")? };
        let entry = client.client.wait(name, milliseconds(timeout_ms)?)?;
        write(out, egm_entry::from(&entry));
        Ok(())
    })
}

/// Gives the names that begin with `prefix` and that this peer may fetch, as a JSON array of objects with `name`,
/// `bytes`, `access`, `locations`, `leases` and `owner` (null: the server itself), in the order of the names. Free the
/// text by egm_string_free().
///
/// Fails with ::EGM_LIMIT_REACHED for very many names; ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// # Safety
/// `client` is null or a client; `prefix` is null or a string, "" for all names; `out` is null or may be written. Any
/// thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_list_json(
    client: Option<&egm_client>,
    prefix: *const c_char,
    out: Option<&mut MaybeUninit<*mut c_char>>,
) -> egm_status {
    ask(client, out, |client| {
        // SAFETY: the caller's promise.
        let prefix = unsafe { args::text(prefix, "prefix")? };
        let entries = client.client.list(prefix)?;
        given_json(&entries.iter().map(as_json).collect::<Vec<_>>())
    })
}

/// As `egmem ls --json` has it.
fn as_json(entry: &Entry) -> serde_json::Value {
    serde_json::json!({
        "name": entry.name,
        "bytes": entry.memory.len,
        "access": entry.memory.access,
        "locations": entry.memory.locations(),
        "leases": entry.leases,
        "owner": entry.owner.peer().map(ToString::to_string),
    })
}

/// Gives the server's name for this peer: that of its certificate, or "uid:1000" over a Unix socket. Free the text by
/// egm_string_free().
///
/// # Safety
/// `client` is null or a client; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_client_peer_name(
    client: Option<&egm_client>,
    out: Option<&mut MaybeUninit<*mut c_char>>,
) -> egm_status {
    ask(client, out, |client| Ok(given_text(client.client.name())))
}
