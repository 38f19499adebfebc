//! A cut cable, in network namespaces of our own.

use std::time::Duration;

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{LEASE, Role, Setup, eventually};
use crate::exchange_failures::netns::Cable;
use egmem_tests::pki::Pki;

struct Pair {
    cable: Cable,
    owner: Role,
    peer: Role,
    _folder: tempfile::TempDir,
}

/// An owner and a peer with its memory, each in its own namespace, under TLS; the leases end after `lease`, if
/// that is given.
fn pair(lease: Option<Duration>) -> Option<Pair> {
    let cable = Cable::lay()?;
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let address = cable.address(0);
    let files = pki.issue_for("owner", &["owner", &address], |_| ());
    let setup = Setup::owner(&format!("tcp://{address}:0"), Some(&files));
    let setup = match lease {
        Some(lease) => setup.with_leases_of(lease),
        None => setup.with_heartbeats(),
    };
    let (mut owner, ready) = Role::start_in(Some(cable.name(0)), &setup);
    let setup = Setup::peer(&parts(&ready).0, Some(&pki.issue("peer")));
    let (mut peer, _) = Role::start_in(Some(cable.name(1)), &setup);
    owner.must("publish weights 3000000 1");
    let fetched = peer.insist("fetch weights fabric");
    assert!(fetched.starts_with("Fabric"), "{fetched}");
    peer.must("check weights 1");
    Some(Pair {
        cable,
        owner,
        peer,
        _folder: folder,
    })
}

#[test]
fn a_short_cut_is_not_noticed() {
    let Some(mut pair) = pair(None) else { return };
    pair.cable.cut();
    // For some heartbeats.
    std::thread::sleep(Duration::from_secs(1));
    pair.cable.heal();
    // The control plane works.
    pair.peer.insist("list");
    assert_eq!(pair.peer.must("state weights"), "held");
    assert_eq!(pair.owner.must("importers weights"), "peer");
    pair.owner.must("write weights 2");
    pair.peer.must("check weights 2");
    pair.peer.must("release weights");
    assert_eq!(pair.owner.must("importers weights"), "");
    pair.peer.finish();
    pair.owner.finish();
}

#[test]
fn a_long_cut_is_a_loss_and_heals() {
    let Some(mut pair) = pair(Some(LEASE)) else {
        return;
    };
    pair.cable.cut();
    // Each end detects it by itself: no packet arrives.
    let lost = pair.peer.must("await weights lost");
    assert!(lost.contains("PeerLost"), "{lost}");
    eventually("the lease ends", || {
        pair.owner.must("importers weights") == "peer:expired"
    });
    // The data plane is another: bytes still pass.
    pair.owner.must("write weights 2");
    pair.peer.must("check weights 2");
    pair.cable.heal();
    pair.peer.must("drop weights");
    // The owner is found again.
    pair.peer.insist("fetch weights fabric");
    pair.peer.must("check weights 2");
    pair.peer.must("drop weights");
    pair.peer.finish();
    pair.owner.finish();
}

#[test]
fn nobody_listens_without_certificates_beyond_loopback() {
    let Some(cable) = Cable::lay() else { return };
    let setup = Setup::owner(&format!("tcp://{}:0", cable.address(0)), None);
    let mut owner = Role::spawn(Some(cable.name(0)), &setup);
    let refused = owner.answer("its start").unwrap_err();
    assert!(refused.starts_with("Insecure"), "{refused}");
}
