//! Processes that stop for a while, as under a debugger, a full disk or a frozen virtual machine.

use std::time::Duration;

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{LEASE, Role, Setup, eventually};
use egmem_tests::pki::Pki;

/// A peer that has the memory of an owner; the leases end after `lease`, if that is given.
fn pair(lease: Option<Duration>) -> (Role, Role) {
    // With certificates: without, one local process could confirm a release for another.
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let setup = Setup::owner("tcp://127.0.0.1:0", Some(&pki.issue("owner")));
    let setup = match lease {
        Some(lease) => setup.with_leases_of(lease),
        None => setup.with_heartbeats(),
    };
    let (mut owner, ready) = Role::start(&setup);
    let setup = Setup::peer(&parts(&ready).0, Some(&pki.issue("peer")));
    let (mut peer, _) = Role::start(&setup);
    owner.must("publish weights 3000000 1");
    peer.insist("fetch weights fabric");
    (owner, peer)
}

fn end(mut owner: Role, mut peer: Role) {
    peer.must("drop weights");
    eventually("the owner lets go", || {
        owner.must("importers weights").is_empty()
    });
    peer.finish();
    owner.finish();
}

/// Waits until the owner has dropped a connection whose peer is silent.
fn until_dropped(owner: &mut Role) {
    eventually("the owner drops the connection", || {
        !owner.must("stats").contains("dropped_peers: 0,")
    });
}

#[test]
fn a_peer_that_stops_for_a_moment_keeps_its_lease() {
    let (mut owner, mut peer) = pair(None);
    peer.signal(libc::SIGSTOP);
    until_dropped(&mut owner);
    peer.signal(libc::SIGCONT);
    // It has a connection again.
    peer.insist("list");
    assert_eq!(peer.must("state weights"), "held");
    assert_eq!(owner.must("importers weights"), "peer");
    owner.must("write weights 7");
    peer.must("check weights 7");
    end(owner, peer);
}

#[test]
fn an_owner_that_stops_for_a_moment_loses_nobody() {
    let (mut owner, mut peer) = pair(None);
    owner.signal(libc::SIGSTOP);
    // For a few heartbeats.
    std::thread::sleep(Duration::from_millis(350));
    owner.signal(libc::SIGCONT);
    peer.insist("list");
    assert_eq!(peer.must("state weights"), "held");
    assert_eq!(owner.must("importers weights"), "peer");
    end(owner, peer);
}

#[test]
fn a_peer_that_stops_for_long_loses_its_lease_and_learns_it() {
    let (mut owner, mut peer) = pair(Some(LEASE));
    peer.signal(libc::SIGSTOP);
    eventually("the lease ends", || {
        owner.must("importers weights") == "peer:expired"
    });
    let stats = owner.must("stats");
    assert!(stats.contains("expired: 1,"), "{stats}");
    peer.signal(libc::SIGCONT);
    peer.must("await weights lost");
    // Still mapped: nothing that it does there may fault.
    peer.must("write weights 8");
    owner.must("check weights 8");
    peer.must("drop weights");
    // The client itself goes on.
    peer.insist("fetch weights fabric");
    peer.must("check weights 8");
    end(owner, peer);
}

#[test]
fn an_owner_that_stops_for_long_is_lost_and_found_again() {
    let (owner, mut peer) = pair(Some(LEASE));
    owner.signal(libc::SIGSTOP);
    peer.must("await weights lost");
    peer.must("check weights 1");
    owner.signal(libc::SIGCONT);
    peer.must("drop weights");
    // The owner is found again.
    peer.insist("fetch weights fabric");
    peer.must("check weights 1");
    end(owner, peer);
}

#[test]
fn both_ends_that_stop_agree_afterwards() {
    let (mut owner, mut peer) = pair(Some(LEASE));
    owner.signal(libc::SIGSTOP);
    peer.signal(libc::SIGSTOP);
    // For longer than the lease.
    std::thread::sleep(2 * LEASE);
    peer.signal(libc::SIGCONT);
    owner.signal(libc::SIGCONT);
    // The owner may read the peer's message before it checks the deadline, or after: both ends report the same.
    eventually("both say the same", || {
        let importers = owner.must("importers weights");
        let state = peer.must("state weights");
        match importers.as_str() {
            "peer" => state == "held",
            "peer:expired" => state.starts_with("lost"),
            other => panic!("{other}"),
        }
    });
    peer.must("check weights 1");
    peer.must("write weights 8");
    owner.must("check weights 8");
    peer.must("drop weights");
    // A session goes on.
    peer.insist("fetch weights fabric");
    peer.must("check weights 8");
    end(owner, peer);
}
