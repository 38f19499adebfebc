//! Names withdrawn while a peer holds them.

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{Role, Setup, patience};
use egmem_tests::pki::Pki;

#[test]
fn a_holder_that_releases_in_time_lets_the_name_go() {
    let (mut owner, ready) = Role::start(&Setup::owner("tcp://127.0.0.1:0", None));
    let (mut peer, _) = Role::start(&Setup::peer(&parts(&ready).0, None));
    owner.must("publish weights 3000000 1");
    peer.must("fetch weights fabric");
    let command = format!("withdraw weights {}", patience().as_millis());
    owner.tell(&command);
    peer.must("await weights withdrawing");
    let refused = peer.ask("fetch weights fabric").unwrap_err();
    assert!(refused.starts_with("Refused"), "{refused}");
    peer.must("check weights 1");
    peer.must("release weights");
    owner.answer(&command).expect("nobody holds it any more");
    assert_eq!(peer.must("list"), "");
    peer.finish();
    owner.finish();
}

#[test]
fn a_holder_that_does_not_release_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let setup = Setup::owner("tcp://127.0.0.1:0", Some(&pki.issue("owner")));
    let (mut owner, ready) = Role::start(&setup);
    let address = parts(&ready).0;
    let (mut stubborn, _) = Role::start(&Setup::peer(&address, Some(&pki.issue("stubborn"))));
    let (mut polite, _) = Role::start(&Setup::peer(&address, Some(&pki.issue("polite"))));
    owner.must("publish weights 3000000 1");
    stubborn.must("fetch weights fabric");
    polite.must("fetch weights fabric");
    let command = "withdraw weights 500";
    owner.tell(command);
    polite.must("await weights withdrawing");
    polite.must("release weights");
    let held = owner.answer(command).unwrap_err();
    assert!(held.starts_with("StillHeld"), "{held}");
    // The first withdrawal may have ended before the release.
    let held = owner.ask(command).unwrap_err();
    assert!(held.starts_with("StillHeld"), "{held}");
    assert!(
        held.contains("stubborn") && !held.contains("polite"),
        "{held}"
    );
    // Its mapping is good until it lets go itself.
    stubborn.must("check weights 1");
    stubborn.must("drop weights");
    stubborn.finish();
    polite.finish();
    owner.finish();
}

#[test]
fn a_dropped_name_ends_its_leases() {
    let (mut owner, ready) = Role::start(&Setup::owner("tcp://127.0.0.1:0", None));
    let (mut peer, _) = Role::start(&Setup::peer(&parts(&ready).0, None));
    owner.must("publish weights 3000000 1");
    peer.must("fetch weights fabric");
    owner.must("drop weights");
    peer.must("await weights lost");
    peer.must("check weights 1");
    assert_eq!(peer.must("list"), "");
    let refused = peer.ask("fetch weights fabric").unwrap_err();
    assert!(refused.starts_with("Refused"), "{refused}");
    peer.finish();
    owner.finish();
}
