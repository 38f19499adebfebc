//! What all connections of a peer can make a server keep together.

use std::io::Write;
use std::time::Duration;

use egmem::exchange::protocol::*;
use egmem::exchange::{Address, Limits, Server};

use crate::counting::{live, peak, reset};
use crate::flood::{PATIENCE, dial, flood, greet, hello, requests, until};
use crate::{alone, runtime};

const PER_PEER: usize = 4 << 20;

fn start(runtime: &tokio::runtime::Runtime, limits: Limits) -> Server {
    let server = Server::options()
        .listen(Address::loopback(0))
        .heartbeat(PATIENCE)
        .lease(PATIENCE)
        .limits(limits);
    runtime.block_on(server.start()).unwrap()
}

fn limits(bytes_per_peer: usize, bytes: usize) -> Limits {
    let mut limits = Limits::default();
    (limits.bytes_per_peer, limits.bytes) = (bytes_per_peer, bytes);
    (limits.frame, limits.handshake) = (PATIENCE, PATIENCE);
    limits
}

#[test]
fn many_unfinished_frames_of_a_peer_stay_within_its_bytes() {
    let _alone = alone();
    let runtime = runtime();
    let server = start(&runtime, limits(PER_PEER, 4 * PER_PEER));
    let hello = hello(None, None);
    drop(greet(&server, &hello));
    until("gone", || server.stats().connections == 0);
    let frame = [&(4_u32 << 20).to_be_bytes()[..], &vec![0; 1 << 20]].concat();
    let before = live();
    let mut streams: Vec<_> = (0..32).map(|_| greet(&server, &hello).0).collect();
    reset();
    flood(&mut streams, &frame);
    until("some are dropped", || server.stats().connections < 32);
    let charged = usize::try_from(server.stats().peer_bytes).unwrap();
    assert!(charged <= PER_PEER, "{charged} charged");
    let grown = peak().saturating_sub(before);
    assert!(grown <= 2 * PER_PEER, "{grown} bytes");
    drop(streams);
    until("gone", || server.stats().connections == 0);
    until("all is given back", || server.stats().peer_bytes == 0);
    // It is served as before.
    drop(greet(&server, &hello));
    runtime.block_on(server.close(PATIENCE)).unwrap();
}

#[test]
fn a_request_beyond_a_peers_bytes_is_refused() {
    let _alone = alone();
    let runtime = runtime();
    // A connection, a session, and some requests.
    let server = start(&runtime, limits(48 << 10, PER_PEER));
    let (mut stream, _) = greet(&server, &hello(None, None));
    let wait = |id| {
        Ask::Wait(Wait {
            name: format!("{id}"),
            ms: 600_000,
        })
    };
    let some = requests(1000, wait);
    stream.write_all(&some).unwrap();
    until("refused", || server.stats().refusals.contains_key("limit"));
    assert!(server.stats().peer_bytes <= 48 << 10);
    drop(stream);
    until("all is given back", || server.stats().peer_bytes == 0);
    runtime.block_on(server.close(PATIENCE)).unwrap();
}

#[test]
fn connections_without_a_greeting_leave_room_for_those_that_have_one() {
    let _alone = alone();
    let runtime = runtime();
    let server = start(&runtime, limits(1 << 20, 2 << 20));
    // Each is half of a hello, and together they are more than a quarter.
    let half = [&(200_u32 << 10).to_be_bytes()[..], &vec![0; 150 << 10]].concat();
    let mut silent: Vec<_> = (0..16).map(|_| dial(&server)).collect();
    flood(&mut silent, &half);
    until("some are dropped", || server.stats().failed_handshakes > 0);
    assert!(server.stats().peer_bytes <= (2 << 20) / 4);
    drop(silent);
    until("they are gone", || server.stats().peer_bytes == 0);
    let (stream, _) = greet(&server, &hello(None, None));
    std::thread::sleep(Duration::from_millis(1));
    assert!(server.stats().peer_bytes > 0);
    drop(stream);
    runtime.block_on(server.close(PATIENCE)).unwrap();
}
