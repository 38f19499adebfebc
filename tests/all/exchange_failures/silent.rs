//! Connections that say nothing, at a server that may have few file descriptors.

use std::net::TcpStream;
use std::time::Duration;

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{Role, Setup, eventually};

/// The server's limit of file descriptors.
const FDS: u64 = 256;

/// An owner with few fds, and its address. No deadline of its own ends a silent connection.
fn owner() -> (Role, String) {
    let mut setup = Setup::owner("tcp://127.0.0.1:0", None);
    setup.fds = Some(FDS);
    setup.step = Some(Duration::from_secs(3600));
    let (mut owner, ready) = Role::start(&setup);
    owner.must("publish weights 4000 1");
    (owner, parts(&ready).0)
}

fn silent(address: &str, count: u64) -> Vec<TcpStream> {
    let address = address.strip_prefix("tcp://").expect("it is TCP");
    let connect = |_| TcpStream::connect(address).expect("it is in the backlog");
    (0..count).map(connect).collect()
}

/// A client that keeps the rules gets in, and is served.
fn right_client(address: &str) {
    let mut setup = Setup::peer(address, None);
    setup.step = Some(Duration::from_secs(3600));
    let (mut peer, _) = Role::start(&setup);
    assert_eq!(peer.must("list"), "weights");
    peer.finish();
}

fn number(owner: &mut Role, what: &str) -> u64 {
    let stats = owner.must("stats");
    let mut parts = stats.split(['{', ',']).map(str::trim);
    let value = parts.find_map(|part| part.strip_prefix(what)?.strip_prefix(": "));
    value.and_then(|value| value.parse().ok()).expect(what)
}

#[test]
fn more_silent_connections_than_fds_keep_nobody_out() {
    let (mut owner, address) = owner();
    let silent = silent(&address, FDS + 20);
    // Its share is an eighth; the others wait until the oldest has had its second.
    eventually("all are accepted, the oldest for the newest", || {
        assert!(number(&mut owner, "handshakes") <= FDS / 8);
        number(&mut owner, "accepted") == FDS + 20
    });
    right_client(&address);
    assert!(number(&mut owner, "dropped_handshakes") > FDS / 2);
    drop(silent);
    owner.finish();
}

#[test]
fn silent_connections_give_way_where_other_files_have_the_fds() {
    let (mut owner, address) = owner();
    owner.must("hoard 12");
    let silent = silent(&address, 20);
    right_client(&address);
    assert!(number(&mut owner, "dropped_handshakes") > 4);
    drop(silent);
    owner.finish();
}
