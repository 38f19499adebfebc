//! Peers and requests that are refused; nothing is left of failed ones.

use std::path::PathBuf;
use std::time::Duration;

use egmem::driver::{Access, Call, Code, HandleType};
use egmem::exchange::{Address, Client, End, Error, PeerList, Refusal, Security, Server};
use tokio::time::timeout;

use super::{
    buffer, client, fabric, let_go, nothing_held, options, server, server_at, tls, verify, within,
};
use crate::refused::assert_refused;

#[tokio::test]
async fn whom_the_certificate_does_not_name_is_not_let_in() {
    let driver = fabric();
    let (ends, others) = (tls(), tls());
    let server = ends.server().await;
    let connect = |security: Security| options(&server).security(security).connect(&driver);
    let error = within(connect(others.client.clone())).await.unwrap_err();
    assert!(
        matches!(error, Error::Share(egmem::share::Error::NotTrusted { .. })),
        "{error}"
    );
    let error = within(connect(Security::Plain)).await.unwrap_err();
    assert!(
        matches!(error, Error::TlsAtOneEnd { here: false, .. }),
        "{error}"
    );
    let client = within(connect(ends.client.clone())).await.unwrap();
    let mine = buffer(&driver, 1 << 20);
    let who = PeerList::list(["node-c"]).unwrap();
    let published = server.publish("x", mine).who(who).now().unwrap();
    let error = within(client.fetch("x").go()).await.unwrap_err();
    assert_refused(&error, Refusal::NotFound);
    assert!(within(client.list("")).await.unwrap().is_empty());
    published.set_who(PeerList::list(["node-b"]).unwrap());
    assert_eq!(within(client.list("")).await.unwrap().len(), 1);
}

#[test]
fn addresses_without_a_server() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let driver = fabric();
        let nowhere = Address::Unix(PathBuf::from("/nonexistent/socket"));
        let error = within(Client::options(nowhere).connect(&driver))
            .await
            .unwrap_err();
        assert!(
            matches!(error, Error::Share(egmem::share::Error::Unreachable { .. })),
            "{error}"
        );
        let far: Address = "192.0.2.1:1".parse().unwrap();
        let error = within(Client::options(far).connect(&driver))
            .await
            .unwrap_err();
        assert!(matches!(error, Error::Insecure { .. }), "{error}");
    });
}

#[tokio::test]
async fn reading_is_all_that_some_memory_allows() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let publish = server
        .publish("x", buffer(&own, 1 << 20))
        .access(Access::Read);
    let published = publish.now().unwrap();
    let remote = within(client.fetch("x").via(HandleType::Fabric)).await;
    let remote = remote.unwrap();
    assert!(remote.proved().by.is_some() && !remote.proved().both_ways);
    published.shared().unwrap().put_word(8, 3).unwrap();
    assert_eq!(remote.get::<u64>(8).unwrap(), 3);
    assert!(matches!(
        remote.put(0, 1_u8),
        Err(egmem::Error::NotAccessible { .. })
    ));
    let error = within(client.fetch("x").read_write().go())
        .await
        .unwrap_err();
    assert_refused(&error, Refusal::ReadOnly);
    let writable = server.publish("y", buffer(&own, 1 << 20)).now().unwrap();
    let remote = within(client.fetch("y").read_only().go()).await.unwrap();
    assert!(matches!(
        remote.put(0, 1_u8),
        Err(egmem::Error::NotAccessible { .. })
    ));
    drop(writable);
}

#[tokio::test]
async fn an_import_that_fails_says_where_to_look() {
    let (own, other) = (fabric(), fabric());
    let server = Server::options()
        .listen(Address::loopback(0))
        .local_socket(false);
    let server = server.start().await.unwrap();
    let client = within(options(&server).connect(&other)).await.unwrap();
    // Without a Unix socket there is no other path.
    let simulator = other.sim().unwrap();
    simulator.fail(Call::MemImportFromShareableHandle, 1, Code::OUT_OF_MEMORY);
    let published = server.publish("y", buffer(&own, 1 << 20)).now().unwrap();
    let error = within(client.fetch("y").go()).await.unwrap_err();
    match &error {
        Error::Import { end, source, .. } => {
            assert_eq!(*end, End::Here);
            let failed = source.driver_error().map(|call| call.code);
            assert_eq!(failed, Some(Code::OUT_OF_MEMORY), "{error}");
        }
        _ => panic!("{error}"),
    }
    let_go(&published).await;
    nothing_held(&other).await;
}

#[tokio::test]
async fn without_the_unix_socket_fabric_handles_are_tried() {
    let (own, other) = (fabric(), fabric());
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let options = Server::options().listen(Address::loopback(0));
    let options = options.listen(Address::Unix(socket.clone()));
    let server = options.start().await.unwrap();
    let published = server.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    // It connects over TCP; the session moves.
    let moved = client(&server, &other).await;
    let remote = within(moved.fetch("x").go()).await.unwrap();
    assert_eq!(remote.via(), HandleType::PosixFd);
    drop(remote);
    std::fs::remove_file(&socket).unwrap();
    let client = client(&server, &other).await;
    let remote = within(client.fetch("x").go()).await.unwrap();
    assert_eq!(remote.via(), HandleType::Fabric);
    verify(&own, &published, &remote);
    drop(remote);
    let error = within(client.fetch("x").via(HandleType::PosixFd))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::NoCommonHandle { .. }), "{error}");
    let_go(&published).await;
}

#[tokio::test]
async fn a_fetch_given_up_at_any_time_leaves_nothing() {
    let (own, other) = (fabric(), fabric());
    let folder = tempfile::tempdir().unwrap();
    let server = server_at(Address::Unix(folder.path().join("socket"))).await;
    let published = server.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let client = client(&server, &other).await;
    drop(within(client.fetch("x").go()).await.unwrap());
    let mut done = 0;
    for round in 0..200_u64 {
        let fetch = client.fetch("x").probe(round % 2 == 0).go();
        done += usize::from(
            timeout(Duration::from_micros(round * 20), fetch)
                .await
                .is_ok(),
        );
    }
    let_go(&published).await;
    nothing_held(&other).await;
    println!("{done} of 200 were in time");
}
