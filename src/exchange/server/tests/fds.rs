//! Fds: no request may carry any, and those that are sent have their limits.

use std::os::fd::AsFd;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::hostile::framed;
use super::*;

#[tokio::test]
async fn no_frame_carries_fds_to_a_server() {
    let driver = driver();
    let (_directory, address, server) = start_at_unix(options()).await;
    let Address::Unix(path) = &address else {
        panic!()
    };
    let null = std::fs::File::open("/dev/null").unwrap();
    // Refused before the frame is complete.
    let mut stream = tokio::net::UnixStream::connect(path).await.unwrap();
    stream.write_all(&framed(&encode(&hello()))).await.unwrap();
    assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0, "a welcome");
    let sent = crate::share::fd::try_send(stream.as_fd(), &[0], &[null.as_fd()]);
    assert_eq!(sent.unwrap(), 1);
    while stream.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {}
    // With a request, and with a hello.
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let (writer, ping) = (&mut raw.connection.writer, encode(&(1, Ask::Ping)));
    writer.write(&ping, &[null.as_fd()]).await.unwrap();
    raw.hung_up().await;
    let mut early = Raw::connect(&address, &Security::Plain).await;
    let writer = &mut early.connection.writer;
    writer
        .write(&encode(&hello()), &[null.as_fd()])
        .await
        .unwrap();
    early.hung_up().await;
    until("they are gone", || server.stats().connections == 0).await;
    assert_eq!(server.stats().fds, 0);
    close(server, &driver).await;
}

#[tokio::test]
async fn a_peer_is_sent_so_many_fds_at_once() {
    let driver = driver();
    let mut limits = limits();
    limits.fds_per_peer = 2;
    let options = options().limits(limits);
    let (_directory, address, server) = start_at_unix(options).await;
    let parts = |count: u64| {
        let buffer = Buffer::on(NodeId(0)).bytes(count * 2 * MIB).shareable();
        let chunks = egmem_core::Growth::steady().chunk(2 * MIB);
        Shared::from(buffer.growth(chunks).allocate(&driver).unwrap())
    };
    let many = server.publish("three", parts(3)).now().unwrap();
    let few = server.publish("two", parts(2)).now().unwrap();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let refusal = raw.fetch(fetch_fds("three")).await.unwrap_err();
    assert_eq!(refusal, Refusal::Limit);
    assert_eq!((server.stats().fds, server.stats().leases), (0, 0));
    let (granted, fds) = raw.fetch(fetch_fds("two")).await.unwrap();
    assert_eq!(fds.len(), 2);
    until("they are sent", || server.stats().fds == 0).await;
    raw.release(granted.lease).await;
    drop((many, few, raw, fds));
    close(server, &driver).await;
}
