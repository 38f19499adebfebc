//! Leases of others: a peer neither releases, probes nor redeems them.

use egmem::driver::HandleType;
use egmem::exchange::protocol::{Answer, Ask, Handles, Probe, Redeem, Release, Secret};

use crate::authorization::stage::{OTHER, OWNER, STRANGER, Stage, granted};

/// A number that no lease has.
const NO_LEASE: u64 = 1 << 40;

#[test]
fn release_of_a_lease_of_others() {
    let stage = Stage::new();
    let mut owner = stage.peer(OWNER);
    let lease = granted(&mut owner, HandleType::Fabric).lease;
    let release = |lease| Ask::Release(Release { lease });
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
    let probe = |lease| {
        let wrote = Some(1);
        Ask::Probe(Probe { lease, wrote })
    };
    for peer in [OTHER, STRANGER, OWNER] {
        let raw = &mut stage.peer(peer);
        stage.nothing_comes_of(raw, probe(lease), probe(NO_LEASE), "not_found");
    }
    let probed = owner.ask(probe(lease));
    assert!(matches!(probed, Answer::Probed(_)), "{probed:?}");
    owner.ask(Ask::Release(Release { lease }));
    drop(owner);
    stage.end();
}

fn redeem(ticket: &[u8]) -> Ask {
    let ticket = Secret::new(ticket).unwrap();
    Ask::Redeem(Redeem { ticket })
}

#[test]
fn redeem_without_the_ticket() {
    let stage = Stage::new();
    let mut owner = stage.peer(OWNER);
    let granted = granted(&mut owner, HandleType::PosixFd);
    let Handles::Ticket(ticket) = granted.handles else {
        panic!("{:?}", granted.handles);
    };
    let ticket = ticket.expose().to_vec();
    let raw = &mut stage.at_fd_socket();
    for byte in [0, ticket.len() - 1] {
        let mut nearly = ticket.clone();
        nearly[byte] ^= 1;
        let none = redeem(&vec![0x5a; ticket.len()]);
        stage.nothing_comes_of(raw, redeem(&nearly), none, "not_found");
    }
    let fds = raw.ask(redeem(&ticket));
    assert!(matches!(fds, Answer::Fds(_)), "{fds:?}");
    // It is good once.
    stage.nothing_comes_of(raw, redeem(&ticket), redeem(&[]), "not_found");
    let lease = granted.lease;
    owner.ask(Ask::Release(Release { lease }));
    drop(owner);
    stage.end();
}

#[test]
fn redeem_away_from_the_fd_socket() {
    let stage = Stage::new();
    let mut owner = stage.peer(OWNER);
    let granted = granted(&mut owner, HandleType::PosixFd);
    let Handles::Ticket(ticket) = &granted.handles else {
        panic!("{:?}", granted.handles);
    };
    let raw = &mut stage.peer(STRANGER);
    let ticket = redeem(ticket.expose());
    stage.nothing_comes_of(raw, ticket, redeem(&[1]), "unsupported");
    let lease = granted.lease;
    owner.ask(Ask::Release(Release { lease }));
    drop(owner);
    stage.end();
}
