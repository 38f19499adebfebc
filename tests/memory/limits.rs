//! What all connections of a peer together can make a server keep.

use egmem::exchange::Limits;

use crate::host::NEVER;
use crate::messages::create;
use crate::peer::{PATIENCE, Peer, requests, until};
use crate::setting::{CONNECTION, REQUEST, Setting, Transport};

/// Connections of the peer.
const MANY: usize = 32;
/// The most bytes of a frame that needs no permit, and how many larger ones of a peer are read at once.
const SMALL: usize = 64 << 10;
const LARGE: usize = 4;

fn setting(mut limits: Limits) -> Setting {
    (limits.frame, limits.handshake) = (PATIENCE, PATIENCE);
    let setting = Setting::with(Transport::Tcp, limits, 60, 0);
    drop(setting.greet(1));
    setting
}

/// Has each peer send the bytes, of which the server may not read all.
fn flood(setting: &Setting, peers: Vec<Peer>, bytes: &[u8]) -> Vec<tokio::task::JoinHandle<()>> {
    let floods = peers.into_iter().map(|mut peer| {
        let bytes = bytes.to_vec();
        setting.runtime.spawn(async move {
            peer.flood(&bytes).await;
            std::future::pending::<()>().await;
        })
    });
    floods.collect()
}

#[test]
fn few_unfinished_frames_of_a_peer_become_large() {
    let mut setting = setting(Limits::default());
    let size = 4_u32 << 20;
    let frame = [&size.to_be_bytes()[..], &vec![0; size as usize - 1]].concat();
    let before = setting.before();
    let floods = flood(&setting, setting.greet(MANY), &frame);
    let large = LARGE * size as usize;
    until("the large ones are there", || {
        setting.host.look().live > before.live + large
    });
    let now = setting.host.settled(0);
    assert_eq!(now.connections as usize, MANY, "the others wait");
    let grown = now.peak.saturating_sub(before.live);
    // While a buffer grows there is an old one of half its size.
    let most = large + large / 2 + MANY * (CONNECTION + 2 * SMALL);
    println!("at most {grown} of {most} bytes");
    assert!(grown <= most, "{grown} bytes");
    floods.iter().for_each(|flood| flood.abort());
    setting.given_back("unfinished frames", &before);
    // It is served as before.
    drop(setting.greet(1));
}

#[test]
fn so_many_requests_of_a_peer_wait() {
    const WAIT: usize = 80;
    /// A request counts once, and once more for each 2 KiB of its list.
    const EACH: usize = 1 + (1024 * 45 - 1) / REQUEST;
    let mut limits = Limits::default();
    limits.requests_per_peer = WAIT * EACH;
    let mut setting = setting(limits);
    let before = setting.before();
    let name = |id| {
        create(
            format!("{NEVER}{id}"),
            "a-node-with-a-long-name.rack-17.cluster.test",
        )
    };
    let (bytes, count) = requests((64 * 46) << 10, name);
    let floods = flood(&setting, setting.greet(4), &bytes);
    until("the others are refused", || {
        setting.host.look().limited >= 4 * count - WAIT as u64
    });
    let now = setting.host.settled(4 * count);
    assert_eq!(now.limited, 4 * count - WAIT as u64);
    let kept = now.live.saturating_sub(before.live);
    // The allocator's list is the request's.
    let most = 4 * CONNECTION + WAIT * (REQUEST + 2 * SMALL);
    println!("{kept} of {most} bytes");
    assert!(kept <= most, "{kept} bytes");
    floods.iter().for_each(|flood| flood.abort());
    setting.given_back("requests", &before);
}

#[test]
fn long_lists_of_peers_are_refused() {
    let mut setting = setting(Limits::default());
    let long = |id| create(format!("{NEVER}{id}"), &"x".repeat(SMALL / 1024));
    let (bytes, count) = requests(1 << 20, long);
    let mut peers = setting.greet(1);
    setting.runtime.block_on(peers[0].flood(&bytes));
    until("refused", || setting.host.look().limited == count);
    drop(peers);
    setting.host.empty();
}

#[test]
fn half_a_hello_is_short() {
    let mut setting = setting(Limits::default());
    let half = [&(200_u32 << 10).to_be_bytes()[..], &vec![0; 150 << 10]].concat();
    let before = setting.host.look().failed_handshakes;
    setting.runtime.block_on(async {
        for _ in 0..16 {
            Peer::dial(&setting.via).await.flood(&half).await;
        }
    });
    until("they are dropped", || {
        setting.host.look().failed_handshakes == before + 16
    });
    drop(setting.greet(1));
}
