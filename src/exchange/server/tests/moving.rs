//! Sessions that move from TCP to the server's Unix socket.

use std::sync::Arc;

use tokio::io::AsyncWriteExt;

use super::hostile::framed;
use super::*;
use crate::driver::ShareableHandle;
use crate::server::connection;
use crate::server::quota::What;
use crate::share::ImportOptions;

/// Returns why a session does not move.
async fn refused(at: &Address, hello: &Hello) -> Refusal {
    let mut raw = Raw::connect(at, &Security::Plain).await;
    match raw.greet(hello).await {
        Greeting::Refused(why) => Refusal::from_word(&why.reason),
        Greeting::Welcome(welcome) => panic!("{welcome:?}"),
    }
}

#[tokio::test]
async fn a_session_that_has_moved_gets_fds() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (before, _) = raw.fetch(fetch("a")).await.unwrap();
    let refusal = raw.fetch(fetch_fds("a")).await.unwrap_err();
    assert_eq!(refusal, Refusal::NoCommonHandle);
    let token = raw.welcome().session.clone();
    let mut raw = raw.moved().await;
    assert!(raw.welcome().resumed && raw.welcome().session == token);
    assert_eq!(raw.welcome().peer, "local");
    assert_eq!((server.stats().moved, server.stats().sessions), (1, 1));
    let (granted, fds) = raw.fetch(fetch_fds("a")).await.unwrap();
    let handles = fds.into_iter().map(ShareableHandle::PosixFd).collect();
    let imported = ImportOptions::new()
        .import(&driver, &granted.memory, handles)
        .unwrap();
    imported.put_word(8, 9).unwrap();
    assert_eq!(published.shared().unwrap().word(8).unwrap(), 9);
    drop(imported);
    let process = published.importers().pop().unwrap().process.unwrap();
    assert_eq!(process.pid, std::process::id());
    for lease in [before.lease, granted.lease] {
        raw.release(lease).await;
    }
    drop((published, raw));
    close(server, &driver).await;
}

/// No session begins at the server's own socket, and no token opens one that the peer does not use over TCP.
#[tokio::test]
async fn a_session_moves_once_while_its_peer_is_connected() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let tcp = server.addresses().remove(0);
    let mut raw = Raw::open(&server).await;
    let (local, moves) = (raw.local(), raw.moves());
    assert_eq!(refused(&local, &hello()).await, Refusal::Unsupported);
    let resume = Hello {
        moves: false,
        ..moves.clone()
    };
    assert_eq!(refused(&local, &resume).await, Refusal::Unsupported);
    let mut guess = raw.welcome().session.expose().to_vec();
    guess[20] ^= 1;
    for resume in [None, Secret::new(&guess)] {
        let hello = Hello {
            resume,
            ..moves.clone()
        };
        assert_eq!(refused(&local, &hello).await, Refusal::Expired);
    }
    assert_eq!(refused(&tcp, &moves).await, Refusal::Expired);
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let raw = raw.moved().await;
    // Neither from the Unix socket, nor without a connection.
    assert_eq!(refused(&local, &moves).await, Refusal::Expired);
    drop(raw);
    until("it is noticed", || server.stats().connections == 0).await;
    assert_eq!(server.stats().sessions, 1);
    assert_eq!(refused(&local, &moves).await, Refusal::Expired);
    // Over TCP its peer proves its name anew.
    let raw = Raw::open_at(&tcp, &Security::Plain, &resume).await;
    assert!(raw.welcome().resumed);
    let mut raw = raw.moved().await;
    raw.release(granted.lease).await;
    assert_eq!((server.stats().moved, server.stats().resumed), (2, 1));
    drop((published, raw));
    close(server, &driver).await;
}

/// A peer with a certificate gains no right of the user that its process has.
#[tokio::test]
async fn a_session_that_moves_keeps_the_rights_of_its_certificate() {
    let authority = crate::certs::Authority::create("test", 1).unwrap();
    let driver = driver();
    let options = loopback().security(tls(&authority, "server.test"));
    let (_directory, unix, server) = start_at_unix(options).await;
    let publish = |name: &str, who: PeerList| server.publish(name, memory(&driver)).who(who);
    let user = PeerName::User(rustix::process::geteuid().as_raw());
    let users = publish("users", PeerList::nobody().and(user))
        .now()
        .unwrap();
    let nodes = publish("nodes", PeerList::list(["node.test"]).unwrap());
    let nodes = nodes.now().unwrap();
    let (address, node) = (server.addresses().remove(0), tls(&authority, "node.test"));
    let raw = Raw::open_at(&address, &node, &hello()).await;
    assert_eq!(raw.local(), unix);
    let mut raw = raw.moved().await;
    assert_eq!(raw.names("").await, ["nodes"]);
    assert_eq!(
        raw.fetch(fetch_fds("users")).await.unwrap_err(),
        Refusal::NotFound
    );
    let (granted, _) = raw.fetch(fetch_fds("nodes")).await.unwrap();
    assert_eq!(nodes.importers()[0].peer.to_string(), "node.test");
    raw.release(granted.lease).await;
    // The certificate's end ends the session there too.
    let node: PeerName = "node.test".parse().unwrap();
    assert_eq!(server.end_sessions(&node), 1);
    assert!(matches!(raw.notice().await, Event::Dismissed(_)));
    raw.hung_up().await;
    drop((users, nodes, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn other_users_are_not_let_in_and_go_back_to_tcp() {
    let driver = driver();
    let own = rustix::process::geteuid().as_raw();
    let server = loopback().peers(Peers::user(own).and_user(own + 1)).start();
    let server = server.await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await.moved().await;
    let (granted, _) = raw.fetch(fetch_fds("a")).await.unwrap();
    server.set_peers(Peers::user(own + 1)).unwrap();
    raw.hung_up().await;
    let mut raw = raw.resume(&server).await;
    assert!(raw.welcome().resumed);
    let mut other = Raw::connect(&raw.local(), &Security::Plain).await;
    let _ = (other.connection.writer)
        .write(&encode(&raw.moves()), &[])
        .await;
    other.hung_up().await;
    until("it is counted", || server.stats().failed_handshakes == 1).await;
    raw.release(granted.lease).await;
    drop((published, raw));
    close(server, &driver).await;
}

/// The connection that it leaves counts until it has ended: the one that it moves to takes its place.
#[tokio::test]
async fn a_session_moves_where_its_peer_may_have_one_connection() {
    let driver = driver();
    let limits = Limits {
        connections_per_peer: 1,
        ..limits()
    };
    let server = loopback().limits(limits).start().await.unwrap();
    let raw = Raw::open(&server).await;
    let moved = raw.moved().await;
    assert!(moved.welcome().resumed);
    let count = || server.handle.inner.quota.used(What::Connection);
    until("the other has ended", || server.stats().connections == 1).await;
    assert_eq!(count(), 1);
    let tcp = server.addresses().remove(0);
    assert_eq!(refused(&tcp, &hello()).await, Refusal::Limit);
    drop(moved);
    until("it has ended", || count() == 0).await;
    drop(Raw::open(&server).await);
    close(server, &driver).await;
}

/// A connection that has lost its session does not wait for a client that no longer reads there.
#[tokio::test]
async fn a_connection_that_is_blocked_ends_when_its_session_moves() {
    let driver = driver();
    let server = loopback().limits(limits()).start().await.unwrap();
    let core = Arc::clone(&server.handle.inner);
    let (near, mut far) = tokio::io::duplex(1 << 10);
    let mut connection = Connection::over(near, &limits());
    let begun = core.begin(&mut connection, &hello(), false);
    let (attached, welcome) = begun.unwrap();
    let serving = tokio::spawn(connection::serve(connection, attached));
    // The answer has no room.
    let leases = (0..1000).collect();
    let held = encode(&(
        1,
        Ask::Held(Held {
            leases,
            ..Held::default()
        }),
    ));
    far.write_all(&framed(&held)).await.unwrap();
    until("it is answered", || server.stats().requests == 1).await;
    let mut raw = Raw::connect(&server.addresses()[0], &Security::Plain).await;
    raw.welcome = Some(welcome);
    let moved = Raw::open_at(&raw.local(), &Security::Plain, &raw.moves()).await;
    tokio::time::timeout(LONG, serving).await.unwrap().unwrap();
    drop((far, raw, moved));
    until("they are gone", || server.stats().connections == 0).await;
    close(server, &driver).await;
}

/// Clients would refuse a welcome with such a path, also those that connect over TCP.
#[tokio::test]
async fn a_socket_whose_path_no_welcome_can_tell_is_not_the_one_to_move_to() {
    let driver = driver();
    let folder = tempfile::tempdir().unwrap();
    let odd = Address::Unix(folder.path().join("odd\nname"));
    let server = loopback().listen(odd.clone()).start().await.unwrap();
    assert_eq!(server.addresses()[1], odd);
    for at in server.addresses() {
        let raw = Raw::open_at(&at, &Security::Plain, &hello()).await;
        let local = raw.welcome().local.as_deref().unwrap();
        assert!(local.starts_with("@egmem-"), "{local}");
    }
    let moved = Raw::open(&server).await.moved().await;
    assert!(moved.welcome().resumed);
    drop(moved);
    close(server, &driver).await;
}
