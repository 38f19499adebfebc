//! Sessions of others: a peer neither begins one without a certificate nor resumes or moves one that is
//! not its own.

use egmem::driver::HandleType;
use egmem::exchange::protocol::{Ask, Greeting, Secret, Welcome, encode};

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
    owner.ask(Ask::Release { lease });
    drop(owner);
    stage.end();
}

/// A session moves with its token alone, once, while its peer is connected, and as its peer.
#[test]
fn move_of_a_session_of_others() {
    let stage = Stage::new();
    let mut owner = stage.connection(OWNER);
    let token = owner.welcome(None).session;
    let before = stage.snapshot();
    let mut wrong = token.expose().to_vec();
    if let Some(last) = wrong.last_mut() {
        *last ^= 1;
    }
    let wrong = Secret::new(&wrong).unwrap();
    let made_up = Secret::new(&vec![0x5a; wrong.expose().len()]).unwrap();
    let moved = |token: &Secret| stage.at_unix().moves(Some(token.clone())).unwrap();
    let none = moved(&made_up);
    assert!(matches!(&none, Greeting::Refused(why) if why.reason == "expired"));
    assert_eq!(moved(&wrong), none, "nearly the token");
    assert_eq!(stage.at_unix().moves(None).unwrap(), none, "no token");
    let over_tls = stage.connection(STRANGER).moves(Some(token.clone()));
    assert_eq!(over_tls.unwrap(), none, "not to TCP");
    owner.ping();
    assert_eq!(stage.snapshot(), before);
    let mut at_unix = stage.at_unix();
    let Greeting::Welcome(welcome) = at_unix.moves(Some(token.clone())).unwrap() else {
        panic!("it does not move");
    };
    assert_eq!((welcome.resumed, &*welcome.peer), (true, OWNER));
    assert_eq!(moved(&token), none, "twice");
    at_unix.ping();
    drop((owner, at_unix));
    stage.until_sessions(0);
    assert_eq!(moved(&token), none, "without a connection");
    stage.end();
}

/// A stranger that moves gains nothing of the service's own user, whose process it is.
#[test]
fn requests_of_a_session_that_has_moved() {
    let stage = Stage::new();
    let mut owner = stage.peer(OWNER);
    let lease = granted(&mut owner, HandleType::Fabric).lease;
    let mut stranger = stage.connection(STRANGER);
    let token = stranger.welcome(None).session;
    let raw = &mut stage.at_unix();
    let moved = raw.moves(Some(token)).unwrap();
    assert!(matches!(&moved, Greeting::Welcome(welcome) if welcome.peer == STRANGER));
    let of = |name, lease| requests::all(&requests::Target { name, lease });
    let exist = of(HIDDEN, lease);
    let absent = of(ABSENT, u64::MAX);
    for (exists, absent) in exist.into_iter().zip(absent) {
        // Lists and claims show what there is for this peer, which is nothing, and a wait ends with its time.
        let word = match &exists {
            Ask::List(_) | Ask::Held(_) => continue,
            Ask::Wait { .. } => "timed_out",
            Ask::Create(_) => "forbidden",
            _ => "not_found",
        };
        stage.nothing_comes_of(raw, exists, absent, word);
    }
    owner.ask(Ask::Release { lease });
    drop((owner, stranger));
    stage.end();
}
