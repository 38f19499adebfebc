//! Publishing and fetching between processes, and either of them killed.

use std::time::Duration;

use crate::exchange_failures::harness::{LEASE, Role, Setup, drivers, eventually, lone_host};
use egmem_tests::pki::Pki;

const ANY_PORT: &str = "tcp://127.0.0.1:0";

/// Splits the text of an owner that is ready: address and instance.
pub fn parts(ready: &str) -> (String, String) {
    let (address, instance) = ready.split_once(' ').expect("address and instance");
    (address.to_owned(), instance.to_owned())
}

/// Both write, and both verify the other's bytes, by CPU and by GPU.
#[track_caller]
fn verify(owner: &mut Role, peer: &mut Role, name: &str) {
    peer.must(&format!("check {name} 1"));
    peer.must(&format!("gpu {name} 1 2"));
    owner.must(&format!("check {name} 2"));
    owner.must(&format!("gpu {name} 2 3"));
    peer.must(&format!("check {name} 3"));
    peer.must(&format!("write {name} 4"));
    owner.must(&format!("check {name} 4"));
    owner.must(&format!("write {name} 1"));
}

#[test]
fn both_ends_verify_each_others_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let (owner_files, peer_files) = (pki.issue("owner"), pki.issue("peer"));
    for driver in drivers() {
        let setup = Setup::owner(ANY_PORT, Some(&owner_files)).on(driver);
        let (mut owner, ready) = Role::start(&setup);
        let (address, _) = parts(&ready);
        let (mut peer, _) = Role::start(&Setup::peer(&address, Some(&peer_files)).on(driver));
        owner.must("publish weights 5000000 1 peer");

        let vias: &[&str] = match driver {
            "cuda" => &["any", "fd"],
            _ => &["any", "fd", "fabric"],
        };
        for via in vias {
            let fetched = peer.must(&format!("fetch weights {via}"));
            let expected = if *via == "fabric" {
                "Fabric"
            } else {
                "PosixFd"
            };
            assert!(fetched.starts_with(expected), "{via}: {fetched}");
            assert_eq!(owner.must("importers weights"), "peer");
            verify(&mut owner, &mut peer, "weights");
            peer.must("release weights");
            assert_eq!(owner.must("importers weights"), "");
        }
        assert_eq!(peer.must("list"), "weights");
        peer.finish();
        owner.finish();
    }
}

#[test]
fn over_a_unix_socket_too() {
    let folder = tempfile::tempdir().expect("a folder");
    for driver in drivers() {
        let address = format!("unix:{}", folder.path().join(driver).display());
        let setup = Setup::owner(&address, None).on(driver).with_heartbeats();
        let (mut owner, ready) = Role::start(&setup);
        assert_eq!(parts(&ready).0, address);
        let (mut peer, _) = Role::start(&Setup::peer(&address, None).on(driver));
        owner.must("publish weights 5000000 1");
        let fetched = peer.insist("fetch weights any");
        assert!(fetched.starts_with("PosixFd"), "{fetched}");
        verify(&mut owner, &mut peer, "weights");
        assert!(owner.must("importers weights").starts_with("uid:"));
        // The socket's file is no obstacle to a successor.
        owner.kill();
        peer.must("await weights lost");
        peer.must("check weights 1");
        let (mut owner, _) = Role::start(&setup);
        owner.must("publish weights 5000000 5");
        peer.must("drop weights");
        // The client finds the new owner.
        peer.insist("fetch weights any");
        peer.must("check weights 5");
        peer.finish();
        owner.finish();
    }
}

#[test]
fn a_killed_owner_is_lost_and_its_successor_is_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let host = lone_host();
    let owner_files = pki.issue_for("owner", &["owner", &host], |_| ());
    let peer_files = pki.issue("peer");
    let setup = |address: &str| Setup::owner(address, Some(&owner_files)).with_heartbeats();
    let (mut owner, ready) = Role::start(&setup(&format!("tcp://{host}:0")));
    let (address, first) = parts(&ready);
    let (mut peer, _) = Role::start(&Setup::peer(&address, Some(&peer_files)));
    owner.must("publish weights 3000000 1");
    let fetched = peer.insist("fetch weights fabric");

    owner.kill();
    let lost = peer.must("await weights lost");
    assert!(
        lost.contains("PeerLost") || lost.contains("Stale"),
        "{lost}"
    );
    // The owner is gone, but the bytes are there, and can be unmapped.
    peer.must("check weights 1");
    peer.must("write weights 9");
    peer.must("gpu weights 9 10");

    // The same address and the same name, but other memory.
    let (mut owner, ready) = Role::start(&setup(&address));
    let (again, second) = parts(&ready);
    assert_eq!(address, again);
    assert_ne!(first, second);
    owner.must("publish weights 3000000 5");
    peer.must("check weights 10");
    assert!(peer.must("state weights").starts_with("lost"));
    peer.must("drop weights");
    // The client finds the new owner.
    peer.insist("list");
    let anew = peer.insist("fetch weights fabric");
    assert_ne!(fetched, anew, "another identity");
    assert_eq!(peer.must("instance"), second);
    peer.must("check weights 5");
    peer.must("release weights");
    peer.finish();
    owner.finish();
}

#[test]
fn an_owner_that_restarts_at_once_is_not_taken_for_the_old_one() {
    let setup = |address: &str| Setup::owner(address, None).with_heartbeats();
    let (mut owner, ready) = Role::start(&setup(&format!("tcp://{}:0", lone_host())));
    let (address, _) = parts(&ready);
    let (mut peer, _) = Role::start(&Setup::peer(&address, None));
    owner.must("publish weights 3000000 1");
    peer.insist("fetch weights any");
    owner.kill();
    let (mut owner, ready) = Role::start(&setup(&address));
    owner.must("publish weights 3000000 5");
    let lost = peer.must("await weights lost");
    assert!(
        lost.contains("Stale") || lost.contains("PeerLost"),
        "{lost}"
    );
    peer.must("check weights 1");
    peer.must("drop weights");
    // The client finds the new owner.
    peer.insist("list");
    peer.insist("fetch weights any");
    assert_eq!(peer.must("instance"), parts(&ready).1);
    peer.must("check weights 5");
    peer.finish();
    assert_eq!(owner.must("importers weights"), "");
    owner.finish();
}

#[test]
fn a_killed_importers_lease_ends_by_itself() {
    let setup = Setup::owner(ANY_PORT, None).with_leases_of(LEASE);
    let (mut owner, ready) = Role::start(&setup);
    let (address, _) = parts(&ready);
    owner.must("publish weights 8000000 1");
    // Killed at different points: before, while and after it imports.
    for delay in [0, 1, 3, 10, 40, 200] {
        let (mut peer, _) = Role::start(&Setup::peer(&address, None));
        peer.tell("fetch weights fabric");
        std::thread::sleep(Duration::from_millis(delay));
        peer.kill();
    }
    // Two that had it for sure.
    for via in ["fd", "fabric"] {
        let (mut peer, _) = Role::start(&Setup::peer(&address, None));
        peer.insist(&format!("fetch weights {via}"));
        peer.kill();
    }
    // Their sessions had moved to the Unix socket, where the kernel names the processes: after its end none has anything
    // mapped.
    eventually("every lease ends", || {
        owner.must("importers weights").is_empty()
    });
    // They are counted.
    let stats = owner.must("stats");
    let counted = stats
        .split([',', '{'])
        .find_map(|part| part.trim().strip_prefix("expired: "));
    let counted: usize = counted.unwrap().parse().unwrap();
    assert!(counted >= 2, "{stats}");
    owner.must("check weights 1");
    owner.must("withdraw weights 20000");
    owner.finish();
}
