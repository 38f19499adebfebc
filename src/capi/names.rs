//! Names at a server: created, listed, awaited and deleted.

use std::ffi::c_char;

use egmem::driver::{Location, NodeId};
use egmem::exchange::CreateOptions;
use egmem::exchange::protocol::Entry;

use crate::args::milliseconds;
use crate::call::call;
use crate::failure::{Failure, Outcome};
use crate::options::{check_flags, read};
use crate::{
    EGM_EXIST_OK, EGM_LOCATION_HOST_NUMA, args, egm_client, egm_create_options, egm_entry,
    egm_location, egm_status, text,
};

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
    client: *const egm_client,
    name: *const c_char,
    bytes: u64,
    options: *const egm_create_options,
    out: *mut egm_entry,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let client = unsafe { args::object(client, "client")? };
        // SAFETY: the caller's promise.
        let name = unsafe { args::text(name, "name")? };
        let create = CreateOptions::new(name, bytes);
        let (create, exist_ok) = match options.is_null() {
            true => (create, false),
            // SAFETY: the caller's promise.
            false => unsafe { with_options(create, &read(options)?)? },
        };
        let entry = match exist_ok {
            true => client.client.create_or_get(create)?,
            false => client.client.create(create)?,
        };
        // SAFETY: the caller's promise.
        unsafe { give(out, &entry) };
        Ok(())
    })
}

/// Returns the request with a program's options, and whether the memory may exist.
///
/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn with_options(
    mut create: CreateOptions,
    options: &egm_create_options,
) -> Outcome<(CreateOptions, bool)> {
    check_flags(options.flags, EGM_EXIST_OK)?;
    match options.location {
        egm_location { kind: 0, .. } => {}
        egm_location {
            kind: EGM_LOCATION_HOST_NUMA,
            id,
        } => create = create.node(NodeId(id)),
        egm_location { kind, .. } => {
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
    Ok((create, options.flags & EGM_EXIST_OK != 0))
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
    client: *const egm_client,
    name: *const c_char,
    timeout_ms: u64,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let client = unsafe { args::object(client, "client")? };
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
    client: *const egm_client,
    name: *const c_char,
    timeout_ms: u64,
    out: *mut egm_entry,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let client = unsafe { args::object(client, "client")? };
        // SAFETY: the caller's promise.
        let name = unsafe { args::text(name, "name")? };
        let entry = client.client.wait(name, milliseconds(timeout_ms)?)?;
        // SAFETY: the caller's promise.
        unsafe { give(out, &entry) };
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
    client: *const egm_client,
    prefix: *const c_char,
    out: *mut *mut c_char,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let client = unsafe { args::object(client, "client")? };
        // SAFETY: the caller's promise.
        let prefix = unsafe { args::text(prefix, "prefix")? };
        let out = args::out(out, "out")?;
        let entries = client.client.list(prefix)?;
        let entries: Vec<_> = entries.iter().map(as_json).collect();
        // SAFETY: the caller's promise.
        unsafe { text::give_json(out, &entries) }
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
    client: *const egm_client,
    out: *mut *mut c_char,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let client = unsafe { args::object(client, "client")? };
        let out = args::out(out, "out")?;
        // SAFETY: the caller's promise.
        unsafe { text::give(out, client.client.name()) };
        Ok(())
    })
}

/// # Safety
/// `out` is null or may be written.
unsafe fn give(out: *mut egm_entry, entry: &Entry) {
    if !out.is_null() {
        // SAFETY: the caller's promise; not null.
        unsafe { out.write(entry.into()) }
    }
}
