//! Sessions whose peers are not trusted or admitted any more: the peer neither learns nor changes anything.

use std::time::Duration;

use egmem::certs::Issued;
use egmem::driver::HandleType;
use egmem::exchange::protocol::{Answer, Ask, Event, Greeting, Secret};

use crate::authorization::raw::{Raw, answer};
use crate::authorization::requests;
use crate::authorization::stage::{HIDDEN, OTHER, OWNER, Stage, USER, fetch};

fn fetch_hidden() -> Ask {
    fetch(HIDDEN, HandleType::Fabric)
}

/// The service ends the session and says why; it answers nothing more.
#[track_caller]
fn dismissed(raw: &mut Raw, word: &str) {
    let answered = raw.try_answer_bytes();
    assert!(answered.is_err(), "{:?}", answer(&answered.unwrap()));
    match &raw.events[..] {
        [Event::Dismissed(why)] => assert_eq!(why.reason, word),
        other => panic!("{other:?}"),
    }
    let all = requests::all(&requests::Target {
        name: HIDDEN,
        lease: 1,
    });
    for ask in all {
        // The connection may have ended for writing, too.
        let _ = raw.try_send(ask);
    }
    assert!(raw.read().is_err());
}

/// A later connection of the peer is not welcomed, and changes nothing.
#[track_caller]
fn kept_out(stage: &Stage, token: &Secret, connect: impl Fn() -> Raw) {
    let before = stage.snapshot();
    for resume in [None, Some(token.clone())] {
        let greeting = connect().hello(resume);
        assert!(greeting.is_err(), "{greeting:?}");
    }
    assert_eq!(stage.snapshot(), before);
}

/// The owner's session with this certificate, which holds a lease; `None` if it ends meanwhile.
fn with_rights(stage: &Stage, issued: &Issued) -> Option<(Raw, Secret)> {
    let mut raw = stage.connection_with(Some(issued));
    let Greeting::Welcome(welcome) = raw.hello(None).ok()? else {
        return None;
    };
    raw.try_send(fetch_hidden()).ok()?;
    let answered = answer(&raw.try_answer_bytes().ok()?);
    assert!(matches!(answered, Answer::Granted(_)), "{answered:?}");
    Some((raw, welcome.session))
}

/// The session is void for the same peer with a good certificate, too.
#[track_caller]
fn not_resumed(stage: &Stage, name: &str, token: Secret) {
    let before = stage.snapshot();
    let mut raw = stage.connection(name);
    assert!(!raw.welcome(Some(token)).resumed);
    drop(raw);
    assert_eq!(stage.snapshot(), before);
}

#[test]
fn requests_after_the_end_of_a_session() {
    let stage = Stage::new();
    let mut other = stage.connection(OTHER);
    let token = other.welcome(None).session;
    // It is on no list any more.
    stage.reload(&[OWNER], &[USER]);
    // Rights end with the reload, so this is not answered. The connection may have ended already.
    let _ = other.try_send(fetch_hidden());
    dismissed(&mut other, "forbidden");
    not_resumed(&stage, OTHER, token);
    stage.end();
}

#[test]
fn requests_after_the_certificate_has_expired() {
    let stage = Stage::new();
    // On a slow machine a certificate may expire before the session has its rights: the next one lasts longer.
    let lasting = (1..9).map(|power| Duration::from_secs(1 << power));
    let mut sessions = lasting.filter_map(|lasting| {
        let issued = stage.issue(OWNER, lasting);
        let session = with_rights(&stage, &issued)?;
        Some((issued, session))
    });
    let (issued, (mut raw, token)) = sessions.next().expect("a session");
    dismissed(&mut raw, "not_trusted");
    kept_out(&stage, &token, || stage.connection_with(Some(&issued)));
    not_resumed(&stage, OWNER, token);
    stage.end();
}

#[test]
fn requests_after_the_certificate_was_revoked() {
    let stage = Stage::new();
    let issued = stage.issue(OWNER, Duration::from_secs(3600));
    let (mut raw, token) = with_rights(&stage, &issued).expect("a session");
    stage.revoke(&issued);
    dismissed(&mut raw, "not_trusted");
    kept_out(&stage, &token, || stage.connection_with(Some(&issued)));
    not_resumed(&stage, OWNER, token);
    stage.end();
}

/// A session that has moved to the Unix socket depends on its certificate as before.
#[test]
fn requests_of_a_moved_session_after_the_certificate_was_revoked() {
    let stage = Stage::new();
    let issued = stage.issue(OWNER, Duration::from_secs(3600));
    let (_before, token) = with_rights(&stage, &issued).expect("a session");
    let mut raw = stage.at_unix();
    let moved = raw.moves(Some(token.clone())).unwrap();
    assert!(matches!(moved, Greeting::Welcome(_)), "{moved:?}");
    stage.revoke(&issued);
    dismissed(&mut raw, "not_trusted");
    let refused = stage.at_unix().moves(Some(token.clone())).unwrap();
    assert!(matches!(&refused, Greeting::Refused(why) if why.reason == "expired"));
    not_resumed(&stage, OWNER, token);
    stage.end();
}

#[test]
fn requests_after_the_user_was_removed() {
    let stage = Stage::new();
    let socket = stage.path("own.sock");
    let connect = |path| Raw::unix_as(USER, path).map(|raw| raw.expect("a connection"));
    let Some(mut raw) = connect(&socket) else {
        println!("skipped: this process may not become another user");
        return stage.end();
    };
    let token = raw.welcome(None).session;
    stage.reload(&[OWNER, OTHER], &[]);
    // Rights end with the reload, so this is not answered. The connection may have ended already.
    let _ = raw.try_send(fetch_hidden());
    dismissed(&mut raw, "forbidden");
    kept_out(&stage, &token, || connect(&socket).expect("a user"));
    stage.end();
}
