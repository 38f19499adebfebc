//! For each message: the bytes that a server keeps for it are bounded by those received, and given back.

use egmem::exchange::protocol::*;

use crate::host::{NAME, NEVER};
use crate::peer::{framed, requests};
use crate::setting::{CONNECTIONS, Setting, Transport};

/// Bytes that are sent on each connection.
const EACH: usize = 128 << 10;
/// Bytes of the longest text that a request may keep.
const NULS: usize = 60 << 10;
/// Of requests that may wait: so many do on a connection.
const WAITING: usize = 64;

fn name(id: u64) -> String {
    format!("{id:0>255}")
}

fn never(id: u64) -> String {
    format!("{NEVER}{id:0>240}")
}

pub fn create(name: String, peer: &str) -> Ask {
    Ask::Create(Create {
        name,
        bytes: 1,
        node: None,
        peers: [peer; 1024].join(", "),
    })
}

/// A message's name, how many of its requests may wait on a connection, and how it is made.
type Message = (&'static str, usize, fn(u64) -> Ask);

/// Messages that are answered at once.
const ANSWERED: &[Message] = &[
    ("ping", 0, |_| Ask::Ping),
    ("list", 0, |id| {
        Ask::List(List {
            prefix: name(id),
            after: Some(name(id)),
        })
    }),
    ("list after much", 0, |_| {
        Ask::List(List {
            prefix: String::new(),
            after: Some("x".repeat(NULS)),
        })
    }),
    ("release", 0, |lease| Ask::Release { lease: lease << 40 }),
    ("probe", 0, |lease| Ask::Probe { lease: lease << 40 }),
    ("delete in vain", WAITING, |id| Ask::Delete {
        name: name(id),
        ms: 600_000,
    }),
];

/// Messages that wait for ever.
const WAITED_FOR: &[Message] = &[
    ("wait", WAITING, |id| Ask::Wait {
        name: name(id),
        ms: 600_000,
    }),
    ("wait for short names", WAITING, |id| Ask::Wait {
        name: format!("{id}"),
        ms: 600_000,
    }),
    ("create", WAITING, |id| {
        create(never(id), "a-node-with-a-long-name.rack-17.cluster.test")
    }),
    ("create for many short names", WAITING, |id| {
        create(never(id), "ab")
    }),
    ("delete", WAITING, |id| Ask::Delete {
        name: never(id),
        ms: 600_000,
    }),
];

/// A request that is encoded as it stands.
fn plain(request: &serde_json::Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    ciborium::into_writer(request, &mut bytes).unwrap();
    framed(&bytes)
}

/// The shortest request for a lease: fields with a default are left out.
fn fetch(id: u64, accept: &str) -> Vec<u8> {
    let ask = serde_json::json!({"name": NAME, "accept": [accept], "access": "read"});
    plain(&serde_json::json!([id, {"fetch": ask}]))
}

/// A request whose one text is all NULs.
fn create_for_nuls(id: u64) -> Vec<u8> {
    let nuls = "\0".repeat(NULS);
    let ask = serde_json::json!({"name": never(id), "bytes": 1, "peers": nuls});
    let request = plain(&serde_json::json!([id, {"create": ask}]));
    let sent = request.iter().filter(|byte| **byte == 0).count();
    assert!(sent >= NULS, "{sent} NULs are sent");
    request
}

fn all_messages(transport: Transport) {
    let is_unix = matches!(transport, Transport::Unix);
    let mut setting = Setting::new(transport);
    for (what, waiting, ask) in ANSWERED.iter().chain(WAITED_FOR) {
        let (bytes, count) = requests(EACH, ask);
        setting.flood(what, &bytes, count, *waiting);
    }
    let nuls = create_for_nuls(1);
    setting.flood("create for one long text of NULs", &nuls, 1, WAITING);
    leases(&mut setting);
    if is_unix {
        leases_with_fds(&mut setting);
    }
    let unknown = [
        b"\x82\x01\xa1\x64list\xa1\x65dance\x5a\x00\x01\x00\x00".to_vec(),
        vec![0; 1 << 16],
    ];
    let unknown = framed(&unknown.concat());
    setting.flood("a request with an unknown field", &unknown.repeat(2), 2, 0);
    let most = vec![0; MAX_REQUEST as usize - 1];
    let unfinished = [&MAX_REQUEST.to_be_bytes()[..], &most].concat();
    setting.flood("an unfinished frame", &unfinished, 0, 0);
    // Closed at the first.
    let short = [&4_u32.to_be_bytes()[..], b"\x83\x01\x02\x03"].concat();
    setting.flood("no request", &short.repeat(1000), 0, 0);
}

/// A lease stays when its request is answered: nothing beside the ratio is allowed for it.
fn leases(setting: &mut Setting) {
    let count = (EACH / fetch(1000, "fabric").len()) as u64;
    let bytes: Vec<u8> = (1..=count).flat_map(|id| fetch(id, "fabric")).collect();
    let now = setting.flood("fetch", &bytes, count, 0);
    // Until the driver has exported the memory requests wait, and some are refused.
    let refused = CONNECTIONS as u64 * count - now.leases;
    assert!(refused < count, "{now:?}");
}

fn leases_with_fds(setting: &mut Setting) {
    // The answers fit in a socket's buffer unread: a server that cannot write an answer reads nothing more.
    let bytes: Vec<u8> = (1..=96).flat_map(|id| fetch(id, "posix_fd")).collect();
    let now = setting.flood("fetch for fds", &bytes, 96, WAITING);
    assert!(now.leases > 96, "{now:?}");
}

#[test]
fn bytes_kept_for_a_message_are_bounded_over_tcp() {
    all_messages(Transport::Tcp);
}

#[test]
fn bytes_kept_for_a_message_are_bounded_over_tls() {
    all_messages(Transport::Tls);
}

#[test]
fn bytes_kept_for_a_message_are_bounded_over_a_unix_socket() {
    all_messages(Transport::Unix);
}

/// A lease has the name of its peer, which may be long: it is shared, not copied.
#[test]
fn a_lease_of_a_peer_with_a_long_name_is_no_bigger() {
    leases(&mut Setting::new(Transport::LongName));
}
