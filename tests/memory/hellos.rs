//! Peers that only say hello.

use egmem::exchange::protocol::{Ask, Held, MAX_LISTED};

use crate::peer::{Peer, hello, request};
use crate::setting::{CONNECTION, Setting, Transport};

/// Sessions are resumed with leases that they never had, again and again.
#[test]
fn a_peer_without_rights_cannot_grow_the_server() {
    let mut setting = Setting::new(Transport::Tcp);
    let parts = (0..44).map(|part| {
        let first = (1 << 20) + part * MAX_LISTED as u64;
        let leases = (first..first + MAX_LISTED as u64).collect();
        let after = Some(first - 1);
        let more = true;
        request(
            part,
            Ask::Held(Held {
                leases,
                after,
                more,
            }),
        )
    });
    let held = parts.collect::<Vec<_>>().concat();
    let resume = |setting: &Setting, times: usize| {
        let mut peers = Vec::new();
        setting.runtime.block_on(async {
            for _ in 0..times {
                let (peer, welcome) = Peer::greet(&setting.via, &setting.hello).await;
                for _ in 0..2 {
                    let again = hello(Some(welcome.session.clone()));
                    let mut peer = Peer::dial(&setting.via).await;
                    peer.flood(&[again, held.clone()].concat()).await;
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
