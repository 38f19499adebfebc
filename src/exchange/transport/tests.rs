//! Connections over each transport, and misbehaving peers.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::*;
use crate::ShareError;
use egmem_tests::ms;

fn quick() -> Limits {
    Limits {
        frame: ms(300),
        write: ms(300),
        handshake: ms(20_000),
        ..Limits::default()
    }
}

async fn listening(address: &Address, security: &Security) -> Listening {
    bind(address, security, Peers::same_user(), &quick())
        .await
        .unwrap()
}

async fn bind(
    address: &Address,
    security: &Security,
    peers: Peers,
    limits: &Limits,
) -> Result<Listening> {
    Listening::bind(address, security, &Arc::new(Mutex::new(peers)), limits).await
}

async fn pair_with(security: Security, address: Address) -> (Connection, Connection) {
    let listening = listening(&address, &security).await;
    let limits = quick();
    let server = async {
        let incoming = listening.accept().await.unwrap().unwrap();
        incoming.1.await.unwrap()
    };
    let peers = Peers::same_user();
    let client = connect(&listening.address, &security, &peers, &limits);
    let (server, client) = tokio::join!(server, client);
    (server, client.unwrap())
}

async fn tcp() -> (Connection, Connection) {
    pair_with(Security::Plain, Address::loopback(0)).await
}

async fn unix() -> (Connection, Connection) {
    let dir = tempfile::tempdir().unwrap();
    pair_with(Security::Plain, Address::Unix(dir.path().join("s"))).await
}

/// Returns a server's connection and the raw other end of it.
async fn raw(limits: &Limits) -> (Connection, TcpStream) {
    let (address, peers) = (Address::loopback(0), Peers::same_user());
    let listening = bind(&address, &Security::Plain, peers, limits)
        .await
        .unwrap();
    let Address::Tcp { port, .. } = listening.address else {
        panic!("it is TCP")
    };
    let client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let incoming = listening.accept().await.unwrap().unwrap();
    (incoming.1.await.unwrap(), client)
}

#[tokio::test]
async fn frames_travel_both_ways() {
    for (mut a, mut b) in [tcp().await, unix().await] {
        for size in [1, 5, FIRST_ROOM, FIRST_ROOM + 1, 100_000] {
            let message: Vec<u8> = (0..size).map(|i| i as u8).collect();
            let (sent, got) = tokio::join!(a.writer.write(&message, &[]), b.reader.read(1 << 20));
            sent.unwrap();
            assert_eq!(*got.unwrap().unwrap().bytes, message);
            let (sent, got) = tokio::join!(b.writer.write(&message, &[]), a.reader.read(1 << 20));
            sent.unwrap();
            assert_eq!(*got.unwrap().unwrap().bytes, message);
        }
        drop(a);
        assert!(b.reader.read(10).await.unwrap().is_none());
    }
}

const FIRST_ROOM: usize = 16 << 10;

#[tokio::test]
async fn peers_have_names() {
    let (a, b) = tcp().await;
    assert_eq!((a.peer, b.peer), (PeerName::Local, PeerName::Local));
    assert!(a.user.is_none());
    let (a, b) = unix().await;
    let own = PeerName::User(rustix::process::geteuid().as_raw());
    assert_eq!((a.peer, b.peer), (own.clone(), own));
    assert!(a.user.is_some() && b.user.is_some());
}

#[tokio::test]
async fn fds_come_with_their_frame() {
    let (mut a, mut b) = unix().await;
    let null = std::fs::File::open("/dev/null").unwrap();
    for count in [0, 1, 31, 32] {
        let fds = vec![null.as_fd(); count];
        a.writer.write(b"a first one, without", &[]).await.unwrap();
        a.writer.write(b"fds", &fds).await.unwrap();
        a.writer.write(b"and one behind", &[]).await.unwrap();
        for expected in [0, count, 0] {
            let frame = b.reader.read(100).await.unwrap().unwrap();
            assert_eq!(frame.fds.len(), expected);
        }
    }
}

#[tokio::test]
async fn fds_come_with_their_frame_although_frames_are_read_ahead() {
    let (mut one, mut other) = unix().await;
    let file = tempfile::tempfile().unwrap();
    // Frames within the bytes that are read ahead, at their end, and beyond, with and without fds, all of them sent before
    // the first is read.
    let sizes = [1, 30, 900, 5, 1020, 1, 4000, 7, 1019, 3];
    for (index, size) in sizes.into_iter().enumerate() {
        let fds = vec![file.as_fd(); index % 4];
        one.writer
            .write(&vec![index as u8; size], &fds)
            .await
            .unwrap();
    }
    drop(one);
    for (index, size) in sizes.into_iter().enumerate() {
        let frame = other.reader.read(1 << 20).await.unwrap().unwrap();
        assert_eq!(*frame.bytes, vec![index as u8; size]);
        assert_eq!(frame.fds.len(), index % 4, "{index}");
    }
    assert!(other.reader.read(1 << 20).await.unwrap().is_none());
}

#[tokio::test]
async fn too_many_fds_are_an_error() {
    let (mut a, mut b) = unix().await;
    let null = std::fs::File::open("/dev/null").unwrap();
    a.writer.write(b"x", &[null.as_fd(); 33]).await.unwrap();
    let error = b.reader.read(100).await.unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::Protocol { .. })),
        "{error}"
    );
    assert!(b.reader.read(100).await.is_err(), "it stays broken");
    let (mut a, _b) = tcp().await;
    assert!(a.writer.write(b"x", &[null.as_fd()]).await.is_err());
}

#[tokio::test]
async fn a_read_that_is_cancelled_loses_nothing() {
    for (mut a, mut b) in [tcp().await, unix().await] {
        let null = std::fs::File::open("/dev/null").unwrap();
        let fds: &[_] = if a.user.is_some() {
            &[null.as_fd()]
        } else {
            &[]
        };
        let message = vec![7; 300_000];
        let write = a.writer.write(&message, fds);
        let read = async {
            loop {
                // Polled once, then dropped: any suspension is a cancellation.
                let once = tokio::time::timeout(Duration::ZERO, b.reader.read(1 << 20));
                if let Ok(result) = once.await {
                    return result.unwrap().unwrap();
                }
            }
        };
        let (sent, frame) = tokio::join!(write, read);
        sent.unwrap();
        assert_eq!(*frame.bytes, message);
        assert_eq!(frame.fds.len(), fds.len());
    }
}

#[tokio::test]
async fn bad_frames_are_refused_and_small_pieces_are_put_together() {
    let limits = quick();
    for (bytes, why) in [
        (&b"\0\0\0\0"[..], "empty"),
        (
            b"\0\0\x10\x01xxxx",
            "frame of 4097 bytes exceeds the limit of 4096",
        ),
        (b"\xff\xff\xff\xff", "4294967295 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "bytes"),
    ] {
        let (mut server, mut client) = raw(&limits).await;
        client.write_all(bytes).await.unwrap();
        let error = server.reader.read(4096).await.unwrap_err();
        assert!(
            matches!(error, Error::Share(ShareError::Protocol { .. })),
            "{error}"
        );
        assert!(error.to_string().contains(why), "{error}");
    }
    let (mut server, mut client) = raw(&limits).await;
    let read = tokio::spawn(async move { server.reader.read(4096).await });
    for byte in b"\0\0\0\x03abc" {
        client.write_all(&[*byte]).await.unwrap();
        client.flush().await.unwrap();
        tokio::task::yield_now().await;
    }
    assert_eq!(*read.await.unwrap().unwrap().unwrap().bytes, b"abc");
}

#[tokio::test]
async fn a_tls_record_is_told_from_a_frame() {
    for record in [
        // An alert, and the beginning of a client's first message.
        &b"\x15\x03\x03\x00\x02\x02\x0a"[..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ] {
        let (mut server, mut client) = raw(&quick()).await;
        client.write_all(record).await.unwrap();
        let error = server.reader.read(4 << 20).await.unwrap_err();
        assert!(
            matches!(error, Error::TlsAtOneEnd { here: false, .. }),
            "{error}"
        );
    }
}

#[tokio::test]
async fn slow_and_cut_off_frames_are_errors() {
    let limits = quick();
    let (mut server, mut client) = raw(&limits).await;
    client.write_all(b"\0\0\0\x09ab").await.unwrap();
    let error = server.reader.read(4096).await.unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::TimedOut { .. })),
        "{error}"
    );

    let (mut server, mut client) = raw(&limits).await;
    client.write_all(b"\0\0\0\x09ab").await.unwrap();
    drop(client);
    let error = server.reader.read(4096).await.unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::PeerLost { .. })),
        "{error}"
    );
}

#[tokio::test]
async fn a_peer_that_does_not_read_is_given_up() {
    let limits = quick();
    let (mut server, _client) = raw(&limits).await;
    let much = vec![0; 64 << 20];
    let error = server.writer.write(&much, &[]).await.unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::TimedOut { .. })),
        "{error}"
    );
    let error = server.writer.write(b"x", &[]).await.unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::PeerLost { .. })),
        "{error}"
    );
}

#[tokio::test]
async fn without_tls_only_the_loopback_interface_is_open() {
    let peers = Peers::same_user();
    let limits = quick();
    for host in ["0.0.0.0", "::", "192.0.2.1", "::ffff:192.0.2.1"] {
        let address = Address::Tcp {
            host: host.into(),
            port: 0,
        };
        let bound = bind(&address, &Security::Plain, peers.clone(), &limits).await;
        assert!(matches!(bound, Err(Error::Insecure { .. })), "{host}");
        let error = connect(&address, &Security::Plain, &peers, &limits)
            .await
            .unwrap_err();
        match host.parse::<IpAddr>().unwrap().is_unspecified() {
            true => {
                let error = error.to_string();
                assert!(error.contains("such as tcp://127.0.0.1:0"), "{error}");
            }
            false => assert!(matches!(error, Error::Insecure { .. }), "{host}: {error}"),
        }
    }
    let any = "0.0.0.0:0".parse().unwrap();
    bind(&any, &Security::PlainAnywhere, peers.clone(), &limits)
        .await
        .unwrap();
    // A minimal system may not know even this name.
    if tokio::net::lookup_host("localhost:0").await.is_ok() {
        let name = "localhost:0".parse().unwrap();
        bind(&name, &Security::Plain, peers.clone(), &limits)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_left_over_socket_is_replaced_and_a_used_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let address = Address::Unix(path.clone());
    let first = listening(&address, &Security::Plain).await;
    let peers = Peers::same_user();
    let second = bind(&address, &Security::Plain, peers.clone(), &quick()).await;
    assert!(second.is_err());
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(first);
    assert!(!path.exists());
    std::fs::write(&path, "a file").unwrap();
    assert!(
        bind(&address, &Security::Plain, peers.clone(), &quick())
            .await
            .is_err()
    );
    assert!(path.exists(), "a file that is not a socket stays");
}

#[tokio::test]
async fn another_user_is_not_admitted() {
    let dir = tempfile::tempdir().unwrap();
    let address = Address::Unix(dir.path().join("s"));
    let own = rustix::process::geteuid().as_raw();
    let others = Peers::user(own + 1);
    let listening = bind(&address, &Security::Plain, others.clone(), &quick())
        .await
        .unwrap();
    let mut client = UnixStream::connect(dir.path().join("s")).await.unwrap();
    let incoming = listening.accept().await.unwrap().unwrap();
    let error = incoming.1.await.unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::NotTrusted { .. })),
        "{error}"
    );
    assert_eq!(client.read(&mut [0]).await.unwrap(), 0, "it is closed");
    // A client refuses another user's server, too.
    let error = connect(&address, &Security::Plain, &others, &quick())
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Share(ShareError::NotTrusted { .. })),
        "{error}"
    );
}

#[tokio::test]
async fn where_nobody_listens_the_peer_is_lost() {
    let free = {
        let listening = listening(&Address::loopback(0), &Security::Plain).await;
        listening.address.clone()
    };
    for address in [free, "unix:/nonexistent/socket".parse().unwrap()] {
        let peers = Peers::same_user();
        let error = connect(&address, &Security::Plain, &peers, &quick())
            .await
            .unwrap_err();
        assert!(
            matches!(error, Error::Share(ShareError::Unreachable { .. })),
            "{error:?}"
        );
        assert!(error.nobody_listens(), "{error:?}");
    }
    // If the path exists but is not a reachable listener, the cause is not "nobody listens".
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file/socket");
    std::fs::write(folder.path().join("file"), "").unwrap();
    let (address, peers) = (Address::Unix(file), Peers::same_user());
    let error = connect(&address, &Security::Plain, &peers, &quick())
        .await
        .unwrap_err();
    assert!(!error.nobody_listens(), "{error:?}");
}

#[test]
fn the_end_of_a_runtime_does_not_wait_for_a_look_up() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let (answer, waits) = std::sync::mpsc::channel::<()>();
    let mut look_up = Box::pin(on_own_thread(move || waits.recv()));
    {
        let _inside = runtime.enter();
        let mut context = Context::from_waker(Waker::noop());
        assert!(matches!(look_up.as_mut().poll(&mut context), Poll::Pending));
    }
    drop(look_up);
    // With a thread of the runtime this would never return.
    drop(runtime);
    drop(answer);
}

#[tokio::test]
async fn an_address_that_does_not_answer_leaves_time_for_the_next_one() {
    let full = TcpSocket::new_v4().unwrap();
    full.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let full = full.listen(0).unwrap();
    let dead = full.local_addr().unwrap();
    // Once its queue is full, it drops packets.
    let connect = || std::net::TcpStream::connect_timeout(&dead, ms(50));
    let _queue: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
    let (listener, good) = super::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let security = Security::Plain;
    let address = Address::loopback(good.port());
    let reals = vec![dead, good];
    let connecting = connect_any(&address, reals, &security, deadline(ms(500)));
    let stream = timeout(ms(60_000), connecting).await.unwrap().unwrap();
    assert_eq!(stream.peer_addr().unwrap(), good);
    drop(listener);
}
