//! The bytes that all connections of a peer together can make a server keep.

use egmem::exchange::Limits;
use egmem::exchange::protocol::*;

use crate::peer::{PATIENCE, Peer, requests, until};
use crate::setting::{Setting, Transport};

const PER_PEER: usize = 4 << 20;

fn setting(bytes_per_peer: usize, bytes: usize) -> Setting {
    let mut limits = Limits::default();
    (limits.bytes_per_peer, limits.bytes) = (bytes_per_peer, bytes);
    (limits.frame, limits.handshake) = (PATIENCE, PATIENCE);
    Setting::with(Transport::Tcp, limits, 60, 0)
}

/// Has each peer send the bytes, one after the other.
fn flood(setting: &Setting, peers: &mut [Peer], bytes: &[u8]) {
    setting.runtime.block_on(async {
        for peer in peers {
            peer.flood(bytes).await;
        }
    });
}

#[test]
fn many_unfinished_frames_of_a_peer_stay_within_its_bytes() {
    let mut setting = setting(PER_PEER, 4 * PER_PEER);
    drop(setting.greet(1));
    let frame = [&(4_u32 << 20).to_be_bytes()[..], &vec![0; 1 << 20]].concat();
    let before = setting.before();
    let mut peers = setting.greet(32);
    flood(&setting, &mut peers, &frame);
    until("some are dropped", || setting.host.look().connections < 32);
    let now = setting.host.look();
    assert!(now.charged <= PER_PEER, "{} charged", now.charged);
    let grown = now.peak.saturating_sub(before.live);
    assert!(grown <= 2 * PER_PEER, "{grown} bytes");
    drop(peers);
    setting.given_back("unfinished frames", &before);
    // It is served as before.
    drop(setting.greet(1));
}

#[test]
fn a_request_beyond_a_peers_bytes_is_refused() {
    // A connection, a session, and some requests.
    let mut setting = setting(48 << 10, PER_PEER);
    let mut peers = setting.greet(1);
    let wait = |id| {
        Ask::Wait(Wait {
            name: format!("{id}"),
            ms: 600_000,
        })
    };
    flood(&setting, &mut peers, &requests(1000, wait).0);
    until("refused", || setting.host.look().limited > 0);
    assert!(setting.host.look().charged <= 48 << 10);
    drop(peers);
    setting.host.empty();
}

#[test]
fn connections_without_a_greeting_leave_room_for_those_that_have_one() {
    let mut setting = setting(1 << 20, 2 << 20);
    // Each is half of a hello, and together they are more than a quarter.
    let half = [&(200_u32 << 10).to_be_bytes()[..], &vec![0; 150 << 10]].concat();
    let mut silent: Vec<_> = setting.runtime.block_on(async {
        let mut silent = Vec::new();
        for _ in 0..16 {
            silent.push(Peer::dial(&setting.via).await);
        }
        silent
    });
    flood(&setting, &mut silent, &half);
    until("some are dropped", || {
        setting.host.look().failed_handshakes > 0
    });
    assert!(setting.host.look().charged <= (2 << 20) / 4);
    drop(silent);
    setting.host.empty();
    let peers = setting.greet(1);
    assert!(setting.host.look().charged > 0);
    drop(peers);
}
