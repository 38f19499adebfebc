use ciborium::cbor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::server::ServerStats;

pub(super) async fn tcp(server: &Server) -> TcpStream {
    let Address::Tcp { host, port } = &server.addresses()[0] else {
        panic!()
    };
    TcpStream::connect((host.as_str(), *port)).await.unwrap()
}

/// Reads until the server hangs up, and ignores its messages meanwhile.
pub(super) async fn hung_up(stream: &mut TcpStream) {
    let mut sink = [0; 4096];
    let read = async { while let Ok(1..) = stream.read(&mut sink).await {} };
    tokio::time::timeout(LONG, read).await.expect("it is kept");
}

pub(super) fn framed(bytes: &[u8]) -> Vec<u8> {
    let mut frame = (bytes.len() as u32).to_be_bytes().to_vec();
    frame.extend_from_slice(bytes);
    frame
}

/// A server, and a session on it that the others must not disturb.
async fn with_bystander(limits: Limits) -> (Driver, Server, Raw) {
    let driver = driver();
    let server = loopback().limits(limits).start().await.unwrap();
    let bystander = Raw::open_in_time(&server).await;
    until("it is alone", || server.stats().handshakes == 0).await;
    (driver, server, bystander)
}

async fn unharmed(driver: Driver, server: Server, mut bystander: Raw) -> ServerStats {
    let (answer, _) = bystander.ask(Ask::Ping).await;
    assert_eq!(answer, Answer::Done);
    until("the others are gone", || server.stats().connections == 1).await;
    let stats = server.stats();
    assert_eq!(stats.sessions, 1);
    drop(bystander);
    close(server, &driver).await;
    stats
}

#[tokio::test]
async fn before_a_hello_nobody_gets_anything() {
    let handshake = soon_over();
    let limits = Limits {
        handshake,
        ..limits()
    };
    let (driver, server, bystander) = with_bystander(limits).await;
    let before = server.stats().failed_handshakes;
    let wrong = |change: fn(&mut Hello)| {
        let mut hello = hello();
        change(&mut hello);
        framed(&encode(&hello))
    };
    let request = encode(&(1, Ask::List(List::default())));
    let hellos: [Vec<u8>; 9] = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        vec![0; 64],
        u32::MAX.to_be_bytes().to_vec(),
        framed(&[0xff; 100]),
        framed(&request),
        wrong(|hello| hello.magic = "gemme".into()),
        wrong(|hello| hello.agent = "x".repeat(300)),
        wrong(|hello| hello.oldest = hello.newest + 1),
    ];
    for bytes in &hellos {
        let mut stream = tcp(&server).await;
        // On a busy machine the server may have hung up by now.
        stream.write_all(bytes).await.ok();
        hung_up(&mut stream).await;
    }
    // One is silent, one sends half of it, one hangs up.
    let mut silent = tcp(&server).await;
    hung_up(&mut silent).await;
    let mut slow = tcp(&server).await;
    let hello = framed(&encode(&hello()));
    slow.write_all(&hello[..hello.len() / 2]).await.ok();
    hung_up(&mut slow).await;
    drop(tcp(&server).await);
    let failed = hellos.len() as u64 + 3;
    until("all are counted", || {
        server.stats().failed_handshakes == before + failed
    })
    .await;
    unharmed(driver, server, bystander).await;
}

/// Neither before the handshake of TLS nor in it.
#[tokio::test]
async fn a_tls_client_that_is_silent_is_closed_in_time() {
    let authority = crate::certs::Authority::create("test", 1).unwrap();
    let limits = Limits {
        handshake: soon_over(),
        ..limits()
    };
    let options = loopback()
        .limits(limits)
        .security(tls(&authority, "server.test"));
    let server = options.start().await.unwrap();
    for bytes in [&b""[..], b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"] {
        let mut silent = tcp(&server).await;
        silent.write_all(bytes).await.unwrap();
        hung_up(&mut silent).await;
    }
    until("both are counted", || server.stats().failed_handshakes == 2).await;
    server.close(LONG).await.unwrap();
}

#[tokio::test]
async fn versions_that_are_not_spoken_are_refused_in_words() {
    let (driver, server, bystander) = with_bystander(limits()).await;
    let versions = |oldest, newest| Hello {
        oldest,
        newest,
        ..hello()
    };
    let address = &server.addresses()[0];
    for (oldest, newest) in [(VERSION + 1, VERSION + 9), (0, OLDEST - 1)] {
        let mut raw = Raw::connect(address, &Security::Plain).await;
        let Greeting::Refused(refused) = raw.greet(&versions(oldest, newest)).await else {
            panic!()
        };
        assert_eq!(refused.reason, Refusal::Version.word());
        raw.hung_up().await;
    }
    let raw = Raw::open_at(address, &Security::Plain, &versions(0, u16::MAX)).await;
    assert_eq!(raw.welcome().version, VERSION);
    drop(raw);
    unharmed(driver, server, bystander).await;
}

#[tokio::test]
async fn a_peer_that_breaks_the_protocol_is_dropped() {
    let frame = short();
    let (driver, server, bystander) = with_bystander(Limits { frame, ..limits() }).await;
    let broken: [Vec<u8>; 5] = [
        // A second hello.
        framed(&encode(&hello())),
        framed(b"\xff\xff\xff"),
        framed(b""),
        // A map that is not a request, and a frame that is too big.
        framed(b"\xa1\x61a\x01"),
        (Limits::default().frame_bytes + 1).to_be_bytes().to_vec(),
    ];
    for bytes in &broken {
        let mut stream = tcp(&server).await;
        stream.write_all(&framed(&encode(&hello()))).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        hung_up(&mut stream).await;
    }
    // A frame that stops in the middle.
    let mut stream = tcp(&server).await;
    stream.write_all(&framed(&encode(&hello()))).await.unwrap();
    stream.write_all(&[0, 0, 0, 9, 1]).await.unwrap();
    hung_up(&mut stream).await;
    let stats = unharmed(driver, server, bystander).await;
    assert_eq!(stats.protocol_errors, broken.len() as u64);
    assert_eq!(stats.dropped_peers, 1);
}

#[tokio::test]
async fn an_unknown_request_ends_its_connection_alone() {
    let (driver, server, bystander) = with_bystander(limits()).await;
    let mut stream = tcp(&server).await;
    stream.write_all(&framed(&encode(&hello()))).await.unwrap();
    // [1, {"dance": {}}]
    stream
        .write_all(&framed(b"\x82\x01\xa1\x65dance\xa0"))
        .await
        .unwrap();
    hung_up(&mut stream).await;
    let stats = unharmed(driver, server, bystander).await;
    assert_eq!(stats.protocol_errors, 1);
}

/// A peer of the first version reads a refusal that it knows, also if its hello has many leases.
#[tokio::test]
async fn a_peer_of_the_first_version_is_told_so() {
    let (driver, server, bystander) = with_bystander(limits()).await;
    for count in [2_u64, 20_000] {
        let mut stream = tcp(&server).await;
        let boot = ciborium::Value::Bytes(vec![7; 16]);
        let held: Vec<u64> = (1 << 32..).take(count as usize).collect();
        let hello = cbor!({
            "magic" => "egmem", "oldest" => 1, "newest" => 1, "boot" => boot, "fabric" => false,
            "resume" => ciborium::Value::Bytes(vec![1; 40]), "held" => held,
        });
        let hello = encode(&hello.unwrap());
        stream.write_all(&framed(&hello)).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        // A map of one entry, as in version 1.
        let answer: ciborium::Value = ciborium::from_reader(&answer[4..]).unwrap();
        let (key, refused) = &answer.as_map().unwrap()[0];
        assert_eq!(key.as_text(), Some("refused"));
        let field = |(key, value): &(ciborium::Value, ciborium::Value)| {
            format!("{}: {}", key.as_text().unwrap(), value.as_text().unwrap())
        };
        let fields: Vec<_> = refused.as_map().unwrap().iter().map(field).collect();
        assert_eq!(fields[0], "reason: version");
        assert!(fields[1].contains("versions 2 to 2"), "{fields:?}");
    }
    unharmed(driver, server, bystander).await;
}

#[tokio::test]
async fn a_peer_that_does_not_read_is_dropped() {
    let write = short();
    let (driver, server, bystander) = with_bystander(Limits { write, ..limits() }).await;
    let shared = memory(&driver);
    let names: Vec<_> = (0..200)
        .map(|i| {
            server
                .publish(format!("{i}"), shared.clone())
                .now()
                .unwrap()
        })
        .collect();
    let mut stream = tcp(&server).await;
    stream.write_all(&framed(&encode(&hello()))).await.unwrap();
    let list = framed(&encode(&(1, Ask::List(List::default()))));
    // Until the server stops reading, because it waits for the client to read.
    let ask = async { while stream.write_all(&list).await.is_ok() {} };
    tokio::time::timeout(LONG, ask).await.expect("it is kept");
    // Closed by the client, or by the kernel after its timeout: `until` in there sees it gone.
    drop((names, shared));
    unharmed(driver, server, bystander).await;
    drop(stream);
}

/// For tests with both ends of many connections in this process, while other tests run.
pub(super) fn raise_fd_limit() {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit {
        current: most.maximum,
        ..most
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_at_once() {
    raise_fd_limit();
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let server = server.clone();
        clients.spawn(async move {
            let mut raw = Raw::open(&server).await;
            let mut leases = Vec::new();
            for _ in 0..5 {
                leases.push(raw.fetch(fetch("a")).await.unwrap().0.lease);
            }
            for lease in &leases {
                raw.release(*lease).await;
            }
            leases
        });
    }
    let mut leases: Vec<u64> = clients.join_all().await.into_iter().flatten().collect();
    leases.sort_unstable();
    leases.dedup();
    assert_eq!(leases.len(), 1000);
    let stats = server.stats();
    assert_eq!(
        (stats.fetches, stats.released, stats.leases),
        (1000, 1000, 0)
    );
    until("all are gone", || server.stats().connections == 0).await;
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn over_tls_lists_go_by_certificates() {
    use crate::PeerList;

    let authority = crate::certs::Authority::create("test", 1).unwrap();
    let tls = |name: &str| tls(&authority, name);
    let driver = driver();
    let server = loopback().security(tls("server.test")).start();
    let server = server.await.unwrap();
    let published = server.publish("a", memory(&driver));
    let published = published.who(PeerList::list(["*.good.test"]).unwrap());
    let published = published.now().unwrap();
    let address = &server.addresses()[0];
    let good = Raw::open_at(address, &tls("a.good.test"), &hello()).await;
    assert_eq!(good.welcome().peer, "a.good.test");
    let mut bad = Raw::open_at(address, &tls("b.bad.test"), &hello()).await;
    assert_eq!(bad.fetch(fetch("a")).await.unwrap_err(), Refusal::NotFound);
    assert!(bad.names("").await.is_empty());
    let stolen = Hello {
        resume: Some(good.welcome().session.clone()),
        ..hello()
    };
    // At the Unix socket it keeps its name.
    let mut good = good.moved().await;
    assert_eq!(good.welcome().peer, "a.good.test");
    let (granted, fds) = good.fetch(fetch_fds("a")).await.unwrap();
    assert_eq!(granted.handles, Handles::Fds(1));
    assert_eq!(published.importers()[0].peer.to_string(), "a.good.test");
    drop(fds);
    good.release(granted.lease).await;
    // Another peer's session is not resumed, even with its token.
    let thief = Raw::open_at(address, &tls("b.bad.test"), &stolen).await;
    assert!(!thief.welcome().resumed);
    // Without TLS the server does not answer.
    let mut plain = tcp(&server).await;
    plain.write_all(&framed(&encode(&hello()))).await.unwrap();
    hung_up(&mut plain).await;
    until("it is counted", || server.stats().failed_handshakes == 1).await;
    drop((published, good, bad, thief));
    close(server, &driver).await;
}
