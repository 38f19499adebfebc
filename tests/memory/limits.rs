//! What all connections of a peer together can make a server keep.

use egmem::driver::{Access, HandleType};
use egmem::exchange::Limits;
use egmem::exchange::protocol::{Ask, Fetch, MAX_REQUEST, encode};

use crate::host::{IN_PARTS, NEVER};
use crate::messages::create;
use crate::peer::{PATIENCE, Peer, request, requests, until};
use crate::setting::{CONNECTION, REQUEST, Setting, Transport};

/// Connections of the peer.
const MANY: usize = 32;
/// The most bytes of an answer that needs no permit, and how many larger ones of a peer are written at once.
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
fn unfinished_frames_are_no_longer_than_a_request() {
    let mut setting = setting(Limits::default());
    let frame = |size: u32| [&size.to_be_bytes()[..], &vec![0; size as usize - 1]].concat();
    let before = setting.before();
    let floods = flood(&setting, setting.greet(MANY), &frame(MAX_REQUEST));
    let all = MANY * MAX_REQUEST as usize;
    until("they are there", || {
        setting.host.look().live > before.live + all
    });
    let now = setting.host.settled(0);
    assert_eq!(now.connections as usize, MANY);
    let grown = now.peak.saturating_sub(before.live);
    // While a buffer grows there is an old one of half its size.
    let most = all + all / 2 + MANY * CONNECTION;
    println!("at most {grown} of {most} bytes");
    assert!(grown <= most, "{grown} bytes");
    floods.iter().for_each(|flood| flood.abort());
    setting.given_back("unfinished frames", &before);
    let longer = flood(&setting, setting.greet(MANY), &frame(MAX_REQUEST + 1));
    until("longer ones end their connections", || {
        setting.host.look().connections == 0
    });
    longer.iter().for_each(|flood| flood.abort());
    // It is served as before.
    drop(setting.greet(1));
}

/// Has many peers send requests whose answers are large frames of at least `size` bytes, and read none of them.
fn unread(mut setting: Setting, what: &str, ask: Ask, size: usize, kept: usize) {
    let requests: Vec<u8> = (1..=16).flat_map(|id| request(id, ask.clone())).collect();
    let answer = |setting: &Setting| {
        let mut peer = setting.greet(1).remove(0);
        let answer = setting.runtime.block_on(peer.ask(ask.clone()));
        encode(&answer).len()
    };
    let length = answer(&setting);
    assert!(length >= size, "{length} bytes");
    setting.host.end_sessions();
    let before = setting.before();
    let writes = setting.greet(MANY).into_iter().map(|mut peer| {
        let requests = requests.clone();
        setting.runtime.spawn(async move {
            peer.send(&requests).await;
            std::future::pending::<()>().await;
        })
    });
    let writes: Vec<_> = writes.collect();
    until("each has sent one", || {
        setting.host.look().requests >= before.requests + MANY as u64
    });
    let now = setting.host.settled(0);
    assert_eq!(now.connections as usize, MANY, "the others wait");
    let grown = now.peak.saturating_sub(before.live);
    // Beside those that are written: one request of each connection that waits.
    let most = LARGE * kept + MANY * (CONNECTION + 2 * SMALL);
    println!("{what}: at most {grown} of {most} bytes");
    assert!(grown <= most, "{what}: {grown} bytes");
    writes.iter().for_each(|write| write.abort());
    until("they are gone", || setting.host.look().connections == 0);
    setting.host.end_sessions();
    // Pages on which much was allocated in small pieces may stay.
    let left = setting.host.empty().live.saturating_sub(before.live);
    assert!(left <= SMALL / 2, "{what}: {left} bytes are left");
    answer(&setting);
}

fn patient() -> Limits {
    let mut limits = Limits::default();
    (limits.write, limits.frame) = (PATIENCE, PATIENCE);
    limits
}

#[test]
fn few_grants_in_many_parts_are_kept_for_peers_that_do_not_read() {
    /// The most that a buffer of its own has.
    const PARTS: u64 = 2048;
    let setting = Setting::in_parts(Transport::Tcp, patient(), 60, 0, PARTS);
    let fetch = Fetch {
        name: IN_PARTS.into(),
        accept: vec![HandleType::Fabric],
        access: Some(Access::ReadWrite),
        probe: false,
        instance: None,
        owner: None,
    };
    let size = PARTS as usize * 160;
    unread(setting, "grants", Ask::Fetch(fetch), size, 8 * size);
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
