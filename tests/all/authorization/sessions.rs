//! Sessions of others: a peer neither begins one without a certificate nor resumes one that is not its
//! own; the fd socket is for tickets alone.

use egmem::driver::HandleType;
use egmem::exchange::protocol::{Ask, Greeting, Release, Secret, Welcome, encode};

use crate::authorization::requests;
use crate::authorization::stage::{ABSENT, HIDDEN, OTHER, OWNER, STRANGER, Stage, granted};

#[test]
fn hello_without_a_certificate() {
    let stage = Stage::new();
    let before = stage.snapshot();
    let mut nobody = stage.connection_with(None);
    assert!(nobody.hello(None).is_err());
    assert_eq!(stage.snapshot(), before);
    stage.end();
}

#[test]
fn ping_before_a_hello() {
    let stage = Stage::new();
    let before = stage.snapshot();
    let ask = Ask::Ping;
    let mut raw = stage.connection(STRANGER);
    raw.write(&encode(&(7, ask))).unwrap();
    assert!(raw.read().is_err(), "the connection ends without a word");
    assert_eq!(stage.snapshot(), before);
    stage.end();
}

/// A welcome without the new session's own token.
fn known(welcome: Welcome) -> Greeting {
    Greeting::Welcome(Welcome {
        session: Secret::new(&[]).unwrap(),
        ..welcome
    })
}

#[test]
fn resume_of_a_session_of_others() {
    let stage = Stage::new();
    let mut owner = stage.connection(OWNER);
    let token = owner.welcome(None).session;
    let lease = granted(&mut owner, HandleType::Fabric).lease;
    let before = stage.snapshot();
    let mut wrong = token.expose().to_vec();
    if let Some(last) = wrong.last_mut() {
        *last ^= 1;
    }
    let wrong = Secret::new(&wrong).unwrap();
    let made_up = Secret::new(&vec![0x5a; wrong.expose().len()]).unwrap();
    for peer in [OTHER, STRANGER, OWNER] {
        let resume = |token: &Secret| {
            let mut raw = stage.connection(peer);
            known(raw.welcome(Some(token.clone())))
        };
        let none = resume(&made_up);
        assert!(matches!(&none, Greeting::Welcome(welcome) if !welcome.resumed));
        assert_eq!(resume(&wrong), none, "nearly the token");
        if peer != OWNER {
            assert_eq!(resume(&token), none, "the token of another peer");
        }
        assert_eq!(stage.snapshot(), before);
    }
    // The owner has its connection and its lease.
    owner.ping();
    owner.ask(Ask::Release(Release { lease }));
    drop(owner);
    stage.end();
}

#[test]
fn other_requests_at_the_fd_socket() {
    let stage = Stage::new();
    let mut owner = stage.peer(OWNER);
    let lease = granted(&mut owner, HandleType::Fabric).lease;
    let raw = &mut stage.at_fd_socket();
    raw.ping();
    let of = |name, lease, group| requests::all(&requests::Target { name, lease, group });
    let exist = of(HIDDEN, lease, "job/hidden");
    let absent = of(ABSENT, u64::MAX, "job/absent");
    for (exists, absent) in exist.into_iter().zip(absent) {
        // The fd socket is for redeeming tickets alone.
        if !matches!(exists, Ask::Redeem(_)) {
            stage.nothing_comes_of(raw, exists, absent, "unsupported");
        }
    }
    owner.ask(Ask::Release(Release { lease }));
    drop(owner);
    stage.end();
}
