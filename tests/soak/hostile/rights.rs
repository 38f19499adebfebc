//! Peers that ask for memory without the right to it, and one that creates names up to its quota.

use std::io;

use egmem::exchange::protocol::Secret;
use serde_json::json;

use super::{Hostile, MALLORY, Target};
use crate::raw::{Raw, hello_of, names, refusal};

/// The name of a request in a session, and its fields.
type Asked = (&'static str, serde_json::Value);

pub fn wrong_certificates(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    for config in &hostile.arms.strangers {
        let greeted = Raw::tls(&target.tcp, config).and_then(|mut raw| raw.greet());
        if let Ok(welcome) = greeted {
            hostile
                .journal
                .violation(format!("a stranger is welcome: {welcome:?}"));
        }
    }
    Raw::tcp(&target.tcp)?.greet().map(drop)
}

/// Every request for memory of other peers must be refused.
pub fn without_rights(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = hostile.mallory(target)?;
    raw.greet()?;
    let accept = json!(["fabric", "posix_fd"]);
    let lease = hostile.rng.u64(..5000);
    let mut asks: Vec<Asked> = vec![
        (
            "fetch",
            json!({"name": "private", "accept": accept, "access": "read"}),
        ),
        (
            "fetch",
            json!({"name": "weights", "accept": accept, "access": "read_write"}),
        ),
        ("delete", json!({"name": "weights"})),
        ("delete", json!({"name": "private", "ms": 10})),
        ("probe", json!({"lease": lease | 1 << 40})),
        ("create", json!({"name": "weights", "bytes": 4096})),
        ("create", json!({"name": "a name", "bytes": 4096})),
        (
            "create",
            json!({"name": "mallory.test/huge", "bytes": u64::MAX}),
        ),
        ("create", json!({"name": "alice.test/mine", "bytes": 4096})),
        ("create", json!({"name": "nobodys", "bytes": 4096})),
    ];
    // The lease may be one that this peer abandoned, and then the release may succeed.
    raw.ask(1, "release", json!({"lease": lease}))?;
    let others = names(&raw.ask(2, "list", json!({}))?);
    let others = others.into_iter().filter(|name| name.contains("/soak-"));
    asks.extend(others.map(|name| ("delete", json!({"name": name}))));
    for (id, (what, fields)) in (3..).zip(asks) {
        let text = format!("{what} {fields}");
        let answer = raw.ask(id, what, fields)?;
        if refusal(&answer).is_none() {
            hostile
                .journal
                .violation(format!("{MALLORY}: {text} was not refused: {answer:?}"));
        }
    }
    Ok(())
}

/// No session moves with a token that nobody was given.
pub fn moves(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = Raw::unix(&target.unix)?;
    let token: Vec<u8> = (0..40).map(|_| hostile.rng.u8(..)).collect();
    raw.frame(&hello_of(Secret::new(&token), true))?;
    let greeting = raw.read()?;
    if refusal(&greeting).is_none() {
        hostile
            .journal
            .violation("a session moved with a made-up token");
    }
    Ok(())
}

/// Creates until it is refused, and deletes it all; other peers' memory does not count for it.
pub fn quota(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = hostile.mallory(target)?;
    raw.greet()?;
    let bytes = 1_u64 << hostile.rng.u32(12..26);
    let mut refused = false;
    for id in 1..64 {
        let name = format!("{MALLORY}/{id}");
        let answer = raw.ask(id, "create", json!({"name": name, "bytes": bytes}))?;
        refused |= refusal(&answer).is_some();
        if refused {
            break;
        }
    }
    if !refused {
        hostile
            .journal
            .violation(format!("63 names of {bytes} bytes are within the quota"));
    }
    clean_session(&mut raw)
}

/// Deletes all names of a connection's peer.
pub fn clean(raw: &mut Raw) -> io::Result<()> {
    raw.greet()?;
    clean_session(raw)
}

fn clean_session(raw: &mut Raw) -> io::Result<()> {
    let list = raw.ask(1000, "list", json!({"prefix": format!("{MALLORY}/")}))?;
    for (id, name) in (1001..).zip(names(&list)) {
        raw.ask(id, "delete", json!({"name": name, "ms": 500}))?;
    }
    Ok(())
}

/// Fetches the names that every peer may fetch, and leaves without releasing the leases.
pub fn abandon_leases(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = hostile.mallory(target)?;
    raw.greet()?;
    let list = raw.ask(1, "list", json!({}))?;
    for (id, name) in (2..).zip(names(&list)) {
        for accept in ["fabric", "posix_fd"] {
            let fields = json!({"name": name, "accept": [accept], "access": "read"});
            raw.request(id, "fetch", fields)?;
        }
    }
    if hostile.rng.bool() {
        raw.read()?;
    }
    Ok(())
}
