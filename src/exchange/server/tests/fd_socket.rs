use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::driver::ShareableHandle;
use crate::share::ImportOptions;

async fn connect_to_fd_socket(raw: &Raw) -> Raw {
    let fd_socket = raw.welcome().door.as_ref().unwrap();
    let address = Address::Unix(fd_socket.into());
    Raw::open_at(&address, &Security::Plain, &hello()).await
}

fn ticket(granted: &Granted) -> Secret {
    match &granted.handles {
        Handles::Ticket(ticket) => ticket.clone(),
        other => panic!("{other:?}"),
    }
}

fn redeem(ticket: &Secret) -> Ask {
    Ask::Redeem(Redeem {
        ticket: ticket.clone(),
    })
}

#[tokio::test]
async fn a_ticket_is_redeemed_for_fds_once() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let path = PathBuf::from(raw.welcome().door.clone().unwrap());
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    let (granted, fds) = raw.fetch(fetch_fds("a")).await.unwrap();
    assert!(fds.is_empty());
    let ticket = ticket(&granted);

    let mut fd_socket = connect_to_fd_socket(&raw).await;
    assert_eq!(fd_socket.welcome().instance, server.instance());
    assert!(fd_socket.welcome().session.expose().is_empty());
    let wrong = Secret::new(&[0; 40]).unwrap();
    assert_eq!(fd_socket.refusal(redeem(&wrong)).await, Refusal::NotFound);
    let (answer, fds) = fd_socket.ask(redeem(&ticket)).await;
    assert_eq!(answer, Answer::Fds(Fds::of(1)));
    let handles = fds.into_iter().map(ShareableHandle::PosixFd).collect();
    let imported = ImportOptions::new()
        .import(&driver, &granted.memory, handles)
        .unwrap();
    imported.put_word(8, 9).unwrap();
    assert_eq!(published.shared().unwrap().word(8).unwrap(), 9);
    drop(imported);
    assert_eq!(fd_socket.refusal(redeem(&ticket)).await, Refusal::NotFound);
    // The fd socket answers no other request, to any peer.
    let list = Ask::List(List::default());
    assert_eq!(fd_socket.refusal(list).await, Refusal::Unsupported);
    let ask = Ask::Fetch(fetch("a"));
    assert_eq!(fd_socket.refusal(ask).await, Refusal::Unsupported);
    let (answer, _) = fd_socket.ask(Ask::Ping).await;
    assert_eq!(answer, Answer::Done);
    assert_eq!(server.stats().redeemed, 1);

    raw.release(granted.lease).await;
    drop(published);
    close(server, &driver).await;
    assert!(!path.exists() && !path.parent().unwrap().exists());
}

#[tokio::test]
async fn a_ticket_that_a_byte_limit_refuses_can_be_redeemed_later() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let mut fd_socket = connect_to_fd_socket(&raw).await;
    let (granted, _) = raw.fetch(fetch_fds("a")).await.unwrap();
    let user = PeerName::User(rustix::process::geteuid().as_raw());
    let account = server.handle.inner.accounts.of(&user);
    // Takes all that is left, in halves.
    let mut charges = Vec::new();
    for shift in (0..usize::BITS - 1).rev() {
        charges.extend(account.charge(1 << shift));
    }
    let ask = || redeem(&ticket(&granted));
    assert_eq!(fd_socket.refusal(ask()).await, Refusal::Limit);
    assert_eq!(server.stats().redeemed, 0);
    drop((charges, account));
    let (answer, fds) = fd_socket.ask(ask()).await;
    assert_eq!(answer, Answer::Fds(Fds::of(1)));
    raw.release(granted.lease).await;
    drop((published, fds));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_ticket_ends_with_its_time_and_with_its_lease() {
    let driver = driver();
    let server = loopback().ticket(short()).start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let mut fd_socket = connect_to_fd_socket(&raw).await;
    let (granted, _) = raw.fetch(fetch_fds("a")).await.unwrap();
    tokio::time::sleep(short() + short()).await;
    assert_eq!(
        fd_socket.refusal(redeem(&ticket(&granted))).await,
        Refusal::NotFound
    );
    raw.release(granted.lease).await;
    let (granted, _) = raw.fetch(fetch_fds("a")).await.unwrap();
    raw.release(granted.lease).await;
    assert_eq!(
        fd_socket.refusal(redeem(&ticket(&granted))).await,
        Refusal::NotFound
    );
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn a_peer_has_so_many_tickets() {
    let driver = driver();
    let mut limits = limits();
    limits.tickets_per_peer = 1;
    let server = loopback().limits(limits).start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch_fds("a")).await.unwrap();
    let refusal = raw.fetch(fetch_fds("a")).await.unwrap_err();
    assert_eq!(refusal, Refusal::Limit);
    assert_eq!(published.importers().len(), 1, "no lease without a ticket");
    raw.release(granted.lease).await;
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn other_users_are_not_let_in() {
    let driver = driver();
    let own = rustix::process::geteuid().as_raw();
    let server = loopback().peers(Peers::user(own + 1)).start();
    let server = server.await.unwrap();
    let raw = Raw::open(&server).await;
    let fd_socket = Address::Unix(raw.welcome().door.clone().unwrap().into());
    let mut refused = Raw::connect(&fd_socket, &Security::Plain).await;
    let _ = (refused.connection.writer)
        .write(&encode(&hello()), &[])
        .await;
    refused.hung_up().await;
    until("it is counted", || server.stats().failed_handshakes == 1).await;
    drop(raw);
    close(server, &driver).await;
}
