//! Processes that stop for a while, as under a debugger, a full disk or a frozen virtual machine.

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{Role, Setup, alone, eventually, heartbeat, lease, ms};
use egmem_tests::pki::Pki;

fn pair() -> (Role, Role) {
    // With certificates: without, one local process could confirm a release for another.
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let setup = Setup::owner("tcp://127.0.0.1:0", Some(&pki.issue("owner")));
    let (mut owner, ready) = Role::start(&setup);
    let setup = Setup::peer(&parts(&ready).0, Some(&pki.issue("peer")));
    let (mut peer, _) = Role::start(&setup);
    owner.must("publish weights 3000000 1");
    peer.must("fetch weights fabric");
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

/// Stopped for a few heartbeats, but not for as long as the lease.
fn short() -> std::time::Duration {
    lease() / 3
}

/// Stopped for longer than the lease.
fn long() -> std::time::Duration {
    lease() * 2
}

#[test]
fn a_peer_that_stops_for_a_moment_keeps_its_lease() {
    let _alone = alone();
    let (mut owner, mut peer) = pair();
    peer.signal(libc::SIGSTOP);
    std::thread::sleep(short());
    peer.signal(libc::SIGCONT);
    std::thread::sleep(heartbeat() * 3);
    assert_eq!(peer.must("state weights"), "held");
    assert_eq!(owner.must("importers weights"), "peer");
    owner.must("write weights 7");
    peer.must("check weights 7");
    end(owner, peer);
}

#[test]
fn an_owner_that_stops_for_a_moment_loses_nobody() {
    let _alone = alone();
    let (mut owner, mut peer) = pair();
    owner.signal(libc::SIGSTOP);
    std::thread::sleep(short());
    owner.signal(libc::SIGCONT);
    std::thread::sleep(heartbeat() * 3);
    assert_eq!(peer.must("state weights"), "held");
    assert_eq!(owner.must("importers weights"), "peer");
    end(owner, peer);
}

#[test]
fn a_peer_that_stops_for_long_loses_its_lease_and_learns_it() {
    let _alone = alone();
    let (mut owner, mut peer) = pair();
    owner.must("events");
    peer.signal(libc::SIGSTOP);
    eventually("the lease ends", || {
        owner.must("importers weights") == "peer:expired"
    });
    let events = owner.must("events");
    assert!(events.contains("LeaseExpired"), "{events}");
    std::thread::sleep(ms(50));
    peer.signal(libc::SIGCONT);
    peer.must("await weights lost");
    // Still mapped: nothing that it does there may fault.
    peer.must("write weights 8");
    owner.must("check weights 8");
    peer.must("drop weights");
    // The client itself goes on.
    eventually("a new session", || peer.ask("fetch weights fabric").is_ok());
    peer.must("check weights 8");
    end(owner, peer);
}

#[test]
fn an_owner_that_stops_for_long_is_lost_and_found_again() {
    let _alone = alone();
    let (owner, mut peer) = pair();
    owner.signal(libc::SIGSTOP);
    peer.must("await weights lost");
    peer.must("check weights 1");
    std::thread::sleep(long() / 4);
    owner.signal(libc::SIGCONT);
    peer.must("drop weights");
    eventually("the owner is found again", || {
        peer.ask("fetch weights fabric").is_ok()
    });
    peer.must("check weights 1");
    end(owner, peer);
}

#[test]
fn both_ends_that_stop_agree_afterwards() {
    let _alone = alone();
    let (mut owner, mut peer) = pair();
    owner.signal(libc::SIGSTOP);
    peer.signal(libc::SIGSTOP);
    std::thread::sleep(long());
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
    eventually("a session goes on", || {
        peer.ask("fetch weights fabric").is_ok()
    });
    peer.must("check weights 8");
    end(owner, peer);
}
