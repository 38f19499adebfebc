//! Leases of others: a peer neither releases nor probes them.

use egmem::driver::HandleType;
use egmem::exchange::protocol::{Answer, Ask, Held};

use crate::authorization::stage::{OTHER, OWNER, STRANGER, Stage, granted};

/// A number that no lease has.
const NO_LEASE: u64 = 1 << 40;

#[test]
fn release_of_a_lease_of_others() {
    let stage = Stage::new();
    let mut owner = stage.peer(OWNER);
    let lease = granted(&mut owner, HandleType::Fabric).lease;
    let release = |lease| Ask::Release { lease };
    for peer in [OTHER, STRANGER, OWNER] {
        // Nor does another session of the same peer, as long as the first goes on.
        let raw = &mut stage.peer(peer);
        stage.nothing_comes_of(raw, release(lease), release(NO_LEASE), "not_found");
    }
    assert!(matches!(owner.ask(release(lease)), Answer::Done));
    drop(owner);
    stage.end();
}

#[test]
fn probe_of_a_lease_of_others() {
    let stage = Stage::new();
    let mut owner = stage.peer(OWNER);
    let lease = granted(&mut owner, HandleType::Fabric).lease;
    let probe = |lease| Ask::Probe { lease };
    for peer in [OTHER, STRANGER, OWNER] {
        let raw = &mut stage.peer(peer);
        stage.nothing_comes_of(raw, probe(lease), probe(NO_LEASE), "not_found");
    }
    let probed = owner.ask(probe(lease));
    assert!(matches!(probed, Answer::Probed(_)), "{probed:?}");
    owner.ask(Ask::Release { lease });
    drop(owner);
    stage.end();
}

#[test]
fn held_leases_of_others() {
    let stage = Stage::new();
    let mut owner = stage.peer(OWNER);
    let lease = granted(&mut owner, HandleType::Fabric).lease;
    for peer in [OTHER, STRANGER, OWNER] {
        let raw = &mut stage.peer(peer);
        for lease in [lease, NO_LEASE] {
            let before = stage.snapshot();
            let leases = vec![lease];
            let expired = raw.ask(Ask::Held(Held {
                leases: leases.clone(),
                ..Held::default()
            }));
            assert_eq!(expired, Answer::Expired { leases });
            assert_eq!(stage.snapshot(), before);
        }
    }
    owner.ask(Ask::Release { lease });
    drop(owner);
    stage.end();
}
