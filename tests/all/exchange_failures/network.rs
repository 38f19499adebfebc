//! A cut cable, in network namespaces of our own.

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{Role, Setup, alone, eventually, heartbeat, lease};
use crate::exchange_failures::netns::Cable;
use egmem_tests::pki::Pki;

struct Pair {
    cable: Cable,
    owner: Role,
    peer: Role,
    _folder: tempfile::TempDir,
}

/// An owner and a peer with its memory, each in its own namespace, under TLS.
fn pair() -> Option<Pair> {
    let cable = Cable::lay()?;
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let address = cable.address(0);
    let files = pki.issue_for("owner", &["owner", &address], |_| ());
    let mut setup = Setup::owner(&format!("tcp://{address}:0"), Some(&files));
    // TCP sends lost packets again after 0.2 s, 0.6 s, 1.4 s: the lease must leave room for that.
    setup.lease = lease() * 3;
    let (mut owner, ready) = Role::start_in(Some(cable.name(0)), &setup);
    let setup = Setup::peer(&parts(&ready).0, Some(&pki.issue("peer")));
    let (mut peer, _) = Role::start_in(Some(cable.name(1)), &setup);
    owner.must("publish weights 3000000 1");
    let fetched = peer.must("fetch weights fabric");
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
    let _alone = alone();
    let Some(mut pair) = pair() else { return };
    pair.cable.cut();
    std::thread::sleep(lease());
    pair.cable.heal();
    eventually("the control plane works", || pair.peer.ask("list").is_ok());
    std::thread::sleep(heartbeat() * 4);
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
    let _alone = alone();
    let Some(mut pair) = pair() else { return };
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
    eventually("the owner is found again", || {
        pair.peer.ask("fetch weights fabric").is_ok()
    });
    pair.peer.must("check weights 2");
    pair.peer.must("release weights");
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
