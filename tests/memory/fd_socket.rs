//! Peers at the fd socket, and peers that only say hello.

use egmem::exchange::protocol::*;

use crate::messages::{create, secret};
use crate::peer::{Peer, hello, requests, socket};
use crate::setting::{CONNECTION, Setting, Transport};

/// Bytes that are sent on each connection.
const EACH: usize = 64 << 10;

#[test]
fn bytes_kept_for_a_message_are_bounded_at_the_fd_socket() {
    let mut setting = Setting::new(Transport::Tcp);
    setting.via = socket(&setting.host.folder, "door");
    let (bytes, count) = requests(EACH, |_| Ask::Ping);
    setting.flood("ping", &bytes, count, 0);
    // A request that waits has its task.
    let (bytes, count) = requests(EACH, |_| Ask::Redeem(Redeem { ticket: secret(32) }));
    setting.flood("redeem", &bytes, count, 64);
    let (bytes, count) = requests(EACH, |id| create(format!("{id}"), "ab"));
    setting.flood("create, which is unsupported", &bytes, count, 0);
    let unfinished = [&(4_u32 << 20).to_be_bytes()[..], &vec![0; EACH]].concat();
    setting.flood("an unfinished frame", &unfinished, 0, 0);
}

/// Sessions are resumed with leases that they never had, again and again.
#[test]
fn a_peer_without_rights_cannot_grow_the_server() {
    let mut setting = Setting::new(Transport::Tcp);
    let held: Vec<u64> = (1 << 20..(1 << 20) + 45_000).collect();
    let resume = |setting: &Setting, times: usize| {
        let mut peers = Vec::new();
        setting.runtime.block_on(async {
            for _ in 0..times {
                let (peer, welcome) = Peer::greet(&setting.via, &setting.hello).await;
                for _ in 0..2 {
                    let again = hello(Some(welcome.session.clone()), Some(held.clone()));
                    let mut peer = Peer::dial(&setting.via).await;
                    peer.flood(&again).await;
                    peers.push(peer);
                }
                peers.push(peer);
            }
        });
        peers
    };
    drop(resume(&setting, 1));
    let before = setting.before();
    let peers = resume(&setting, 8);
    let now = setting.host.settled(0);
    let received = peers.iter().map(|peer| peer.sent).sum();
    let beside = peers.len() * CONNECTION;
    setting.bounded("resume", &before, &now, received, beside);
    drop(peers);
    setting.given_back("resume", &before);
}
