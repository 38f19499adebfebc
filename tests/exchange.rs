//! Server and client in one process: memory found by name, imported, proved, given back.
#![cfg(all(feature = "exchange", feature = "certs"))]

use std::future::IntoFuture;
use std::path::PathBuf;
use std::time::Duration;

use egmem::certs::{Authority, CertRequest};
use egmem::driver::{Access, HandleType, Location, NodeId};
use egmem::exchange::server::ServerEvent;
use egmem::exchange::{
    Address, Client, ClientOptions, LeaseState, Reconnect, RemoteBuffer, Security, Server, Tls,
    TlsPem, WatchEvent, Who,
};
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::{Buffer, Driver, End, Error, Machine, Refusal};
use tokio::time::timeout;

/// No test waits longer for anything.
const LONG: Duration = Duration::from_secs(30);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn within<W: IntoFuture>(work: W) -> W::Output {
    timeout(LONG, work).await.expect("no hang")
}

/// This machine's driver, where it has one; `EGMEM_REQUIRE_CUDA=1` makes a missing one a failure.
fn cuda() -> Option<Driver> {
    match Driver::open() {
        Ok(driver) => Some(driver),
        Err(error) if std::env::var_os("EGMEM_REQUIRE_CUDA").is_some() => panic!("{error}"),
        Err(error) => {
            println!("skipped on CUDA: {error}");
            None
        }
    }
}

fn fabric() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

fn no_fabric() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

fn buffer(driver: &Driver, bytes: u64) -> Buffer {
    let buffer = Buffer::on(NodeId(0)).bytes(bytes).shareable();
    buffer.allocate(driver).unwrap()
}

async fn server_at(address: Address) -> Server {
    Server::options().listen(address).start().await.unwrap()
}

async fn server() -> Server {
    server_at(Address::loopback(0)).await
}

fn options(server: &Server) -> ClientOptions {
    Client::options(server.addresses().remove(0)).reconnect(Reconnect::backoff(ms(5), ms(50)))
}

async fn client(server: &Server, driver: &Driver) -> Client {
    within(options(server).connect(driver)).await.unwrap()
}

async fn nothing_held(driver: &Driver) {
    let Some(sim) = driver.sim() else { return };
    let empty = async {
        while !sim.held().is_empty() {
            tokio::time::sleep(ms(2)).await;
        }
    };
    assert!(timeout(LONG, empty).await.is_ok(), "held: {}", sim.held());
}

/// Patterns written at one end are found at the other, by CPU and by GPU, both ways.
fn verify(own: &Driver, published: &egmem::exchange::server::Published, remote: &RemoteBuffer) {
    let shared = published.shared();
    let buffer = shared.buffer().unwrap();
    write_pattern(&buffer.cpu().unwrap(), 1).unwrap();
    let there = Prover::new(egmem::Memory::driver(remote), 0).unwrap();
    there.check_rewrite(remote, 1, 2).unwrap();
    check_pattern(&buffer.cpu().unwrap(), 2).unwrap();
    write_pattern(&remote.cpu().unwrap(), 3).unwrap();
    let here = Prover::new(own, 0).unwrap();
    here.check_rewrite(&**buffer, 3, 4).unwrap();
    check_pattern(&remote.cpu().unwrap(), 4).unwrap();
}

struct Ends {
    server: Security,
    client: Security,
}

fn tls() -> Ends {
    let authority = Authority::create("test", 30).unwrap();
    let ca = authority.cert_pem();
    let end = |name: &str| {
        let issued = authority.issue(&CertRequest::new(name)).unwrap();
        let pem = TlsPem {
            ca: ca.as_bytes(),
            cert: issued.cert_pem.as_bytes(),
            key: issued.key_pem.as_bytes(),
            crl: None,
        };
        Tls::from_pem(pem).unwrap()
    };
    Ends {
        server: Security::Tls(end("node-a")),
        client: Security::Tls(end("node-b").expect_peer("node-a").unwrap()),
    }
}

impl Ends {
    async fn server(&self) -> Server {
        let options = Server::options().listen(Address::loopback(0));
        options.security(self.server.clone()).start().await.unwrap()
    }
}

#[tokio::test]
async fn memory_goes_by_fd_over_a_unix_socket() {
    let (own, other) = (fabric(), fabric());
    let folder = tempfile::tempdir().unwrap();
    let server = server_at(Address::Unix(folder.path().join("socket"))).await;
    let published = server.publish("a/x", buffer(&own, 3 << 20)).now().unwrap();
    let client = client(&server, &other).await;
    assert_eq!(client.instance(), server.instance());
    let remote = within(client.fetch("a/x").go()).await.unwrap();
    assert_eq!(remote.via(), HandleType::PosixFd);
    assert_eq!((remote.len(), remote.no_fabric()), (3 << 20, None));
    let proof = remote.proved();
    assert!(
        proof.cpu && proof.gpu == Some(0) && proof.both_ways,
        "{proof:?}"
    );
    verify(&own, &published, &remote);
    assert_eq!(published.importers().len(), 1);
    within(remote.release()).await.unwrap();
    assert!(published.importers().is_empty());
    nothing_held(&other).await;
}

#[tokio::test]
async fn memory_goes_by_ticket_over_tls() {
    let (own, other) = (no_fabric(), no_fabric());
    let ends = tls();
    let server = ends.server().await;
    let published = server.publish("x", buffer(&own, 5 << 20)).now().unwrap();
    let options = options(&server).security(ends.client.clone());
    let client = within(options.connect(&other)).await.unwrap();
    assert_eq!(client.name(), "node-b");
    assert!(client.peer().contains("node-a"), "{}", client.peer());
    let remote = within(client.fetch("x")).await.unwrap();
    // There is no IMEX channel, and that is told.
    assert_eq!(remote.via(), HandleType::PosixFd);
    assert!(remote.no_fabric().unwrap().contains("IMEX"), "{remote:?}");
    verify(&own, &published, &remote);
    assert_eq!(published.importers()[0].peer.to_string(), "node-b");
    drop(remote);
    nothing_held(&other).await;
    within(async {
        while !published.importers().is_empty() {
            tokio::time::sleep(ms(2)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn memory_goes_by_fabric_handle_over_tcp() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let published = server.publish("x", buffer(&own, 3 << 20)).now().unwrap();
    let client = client(&server, &other).await;
    let fetch = client.fetch("x").via(HandleType::Fabric);
    let remote = within(fetch.access_by([Location::Device(0)]).go())
        .await
        .unwrap();
    assert_eq!(
        (remote.via(), remote.no_fabric()),
        (HandleType::Fabric, None)
    );
    assert!(remote.proved().both_ways);
    verify(&own, &published, &remote);
    drop(remote);
    nothing_held(&other).await;
    // One that cannot is told which end cannot.
    let weak = no_fabric();
    let client = within(options(&server).connect(&weak)).await.unwrap();
    let error = client
        .fetch("x")
        .via(HandleType::Fabric)
        .go()
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::NoCommonHandle { reasons } if reasons[0].contains("IMEX")),
        "{error}"
    );
    assert_eq!(
        within(client.fetch("x").go()).await.unwrap().via(),
        HandleType::PosixFd
    );
}

#[tokio::test]
async fn an_import_that_fails_says_where_to_look() {
    let (own, other) = (fabric(), no_fabric());
    let server = Server::options().listen(Address::loopback(0)).door(None);
    let server = server.start().await.unwrap();
    // It says that it can, and cannot; and there is no other way without a door.
    let client = within(options(&server).fabric(true).connect(&other))
        .await
        .unwrap();
    let published = server.publish("y", buffer(&own, 1 << 20)).now().unwrap();
    let error = within(client.fetch("y").go()).await.unwrap_err();
    match &error {
        Error::Import { end, source, .. } => {
            assert_eq!(*end, End::Here);
            assert!(matches!(**source, Error::NoImexChannel { .. }), "{error}");
        }
        _ => panic!("{error}"),
    }
    within(async {
        while !published.importers().is_empty() {
            tokio::time::sleep(ms(2)).await;
        }
    })
    .await;
    nothing_held(&other).await;
}

#[tokio::test]
async fn whom_the_certificate_does_not_name_is_not_let_in() {
    let driver = fabric();
    let (ends, others) = (tls(), tls());
    let server = ends.server().await;
    let connect = |security: Security| options(&server).security(security).connect(&driver);
    let error = within(connect(others.client.clone())).await.unwrap_err();
    assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
    let error = within(connect(Security::Plain)).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::PeerLost { .. } | Error::Protocol { .. } | Error::NotTrusted { .. }
        ),
        "{error}"
    );
    let client = within(connect(ends.client.clone())).await.unwrap();
    let mine = buffer(&driver, 1 << 20);
    let who = Who::list(["node-c"]).unwrap();
    let published = server.publish("x", mine).who(who).now().unwrap();
    let error = within(client.fetch("x").go()).await.unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                reason: Refusal::NotFound,
                ..
            }
        ),
        "{error}"
    );
    assert!(within(client.list("")).await.unwrap().is_empty());
    published.set_who(Who::list(["node-b"]).unwrap());
    assert_eq!(within(client.list("")).await.unwrap().len(), 1);
}

#[tokio::test]
async fn names_are_listed_waited_for_watched_and_withdrawn() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let mut watch = within(client.watch("a/")).await.unwrap();
    let late = async {
        tokio::time::sleep(ms(50)).await;
        server
            .publish("a/late", buffer(&own, 1 << 20))
            .now()
            .unwrap()
    };
    let (entry, published) =
        within(async { tokio::join!(client.wait("a/late", LONG), late) }).await;
    assert_eq!(entry.unwrap().name, "a/late");
    let error = within(client.wait("never", ms(40))).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    match within(watch.recv()).await.unwrap() {
        WatchEvent::Published(entry) => assert_eq!(entry.name, "a/late"),
        other => panic!("{other:?}"),
    }
    let names: Vec<_> = (0..600).map(|i| format!("b/{i:03}")).collect();
    let shared = egmem::share::Shared::from(buffer(&own, 1 << 20));
    let all: Vec<_> = names
        .iter()
        .map(|name| server.publish(name, shared.clone()).now().unwrap())
        .collect();
    let list = within(client.list("b/")).await.unwrap();
    assert!(list.iter().map(|entry| &entry.name).eq(&names));
    drop(all);

    let remote = within(client.fetch("a/late").go()).await.unwrap();
    let holder = async {
        let state = remote.changed().await;
        assert!(matches!(state, LeaseState::Withdrawing { .. }), "{state}");
        remote.release().await.unwrap();
    };
    let (taken, ()) = within(async { tokio::join!(published.withdraw(LONG), holder) }).await;
    taken.unwrap();
    assert_eq!(
        within(watch.recv()).await.unwrap(),
        WatchEvent::Gone("a/late".into())
    );
    drop(published);
    assert!(within(client.list("")).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_holder_that_stays_loses_its_lease() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let published = server.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let remote = within(client.fetch("x").go()).await.unwrap();
    let error = within(published.withdraw(ms(50))).await.unwrap_err();
    assert!(matches!(error, Error::StillHeld { .. }), "{error}");
    remote.put(0, 5_u64).unwrap();
    drop(published);
    within(async { while !remote.changed().await.is_lost() {} }).await;
    assert_eq!(remote.get::<u64>(0).unwrap(), 5);
    drop(remote);
    nothing_held(&other).await;
}

#[tokio::test]
async fn a_restarted_server_is_another_one() {
    let (own, other) = (fabric(), fabric());
    let first = server().await;
    let address = first.addresses().remove(0);
    let client = client(&first, &other).await;
    let published = first.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let remote = within(client.fetch("x").go()).await.unwrap();
    remote.put(0, 9_u64).unwrap();
    let before = client.instance();
    drop(published);
    assert!(within(remote.changed()).await.is_lost());
    drop(first);
    let second = within(async {
        loop {
            match Server::options().listen(address.clone()).start().await {
                Ok(server) => break server,
                Err(_) => tokio::time::sleep(ms(10)).await,
            }
        }
    })
    .await;
    let _published = second.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let again = within(client.wait("x", LONG)).await;
    assert_eq!(again.unwrap().name, "x");
    assert_ne!(client.instance(), before);
    let error = within(client.fetch("x").instance(before).go())
        .await
        .unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                reason: Refusal::Stale,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(remote.get::<u64>(0).unwrap(), 9);
    assert_eq!(
        within(client.fetch("x").go())
            .await
            .unwrap()
            .get::<u64>(0)
            .unwrap(),
        0
    );
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
    let remote = within(client.fetch("x").go()).await.unwrap();
    assert!(remote.proved().cpu && !remote.proved().both_ways);
    published.shared().put_word(8, 3).unwrap();
    assert_eq!(remote.get::<u64>(8).unwrap(), 3);
    assert!(matches!(
        remote.put(0, 1_u8),
        Err(Error::NotAccessible { .. })
    ));
    let error = within(client.fetch("x").read_write().go())
        .await
        .unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                reason: Refusal::Forbidden,
                ..
            }
        ),
        "{error}"
    );
    let writable = server.publish("y", buffer(&own, 1 << 20)).now().unwrap();
    let remote = within(client.fetch("y").read_only().go()).await.unwrap();
    assert!(matches!(
        remote.put(0, 1_u8),
        Err(Error::NotAccessible { .. })
    ));
    drop(writable);
}

#[tokio::test]
async fn without_room_or_wish_nothing_is_probed() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let full = server.publish("full", buffer(&own, 2 << 20)).now().unwrap();
    let some = server.publish("some", buffer(&own, 1 << 20)).now().unwrap();
    let remote = within(client.fetch("full").go()).await.unwrap();
    assert!(
        remote
            .proved()
            .why_not
            .as_ref()
            .unwrap()
            .contains("no room")
    );
    let remote = within(client.fetch("some").probe(false).go())
        .await
        .unwrap();
    assert!(!remote.proved().is_some());
    // Many at once do not disturb each other.
    let fetches = (0..16).map(|_| {
        let client = client.clone();
        tokio::spawn(async move {
            client
                .fetch("some")
                .go()
                .await
                .map(|remote| remote.proved().both_ways)
        })
    });
    for fetch in fetches.collect::<Vec<_>>() {
        assert!(within(fetch).await.unwrap().unwrap());
    }
    drop((full, some));
}

#[tokio::test]
async fn where_the_door_is_shut_fabric_handles_are_tried() {
    let (own, other) = (fabric(), fabric());
    let folder = tempfile::tempdir().unwrap();
    let door = folder.path().join("door");
    let options_with_door = Server::options().listen(Address::loopback(0));
    let server = options_with_door
        .door(Some(door.clone()))
        .start()
        .await
        .unwrap();
    let published = server.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let client = client(&server, &other).await;
    let remote = within(client.fetch("x").go()).await.unwrap();
    assert_eq!(remote.via(), HandleType::PosixFd);
    drop(remote);
    std::fs::remove_file(&door).unwrap();
    let remote = within(client.fetch("x").go()).await.unwrap();
    assert_eq!(remote.via(), HandleType::Fabric);
    verify(&own, &published, &remote);
    drop(remote);
    let error = within(client.fetch("x").via(HandleType::PosixFd))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    within(async {
        while !published.importers().is_empty() {
            tokio::time::sleep(ms(2)).await;
        }
    })
    .await;
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
    within(async {
        while !published.importers().is_empty() {
            tokio::time::sleep(ms(5)).await;
        }
    })
    .await;
    nothing_held(&other).await;
    println!("{done} of 200 were in time");
}

#[tokio::test]
async fn the_exporter_sees_who_comes_and_goes() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let mut events = server.events();
    let published = server.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let client = client(&server, &other).await;
    let remote = within(client.fetch("x").go()).await.unwrap();
    drop(remote);
    drop(client);
    let mut seen = Vec::new();
    within(async {
        loop {
            match events.recv().await.unwrap() {
                ServerEvent::Fetched { name, .. } => seen.push(format!("fetched {name}")),
                ServerEvent::Released { name, .. } => {
                    seen.push(format!("released {name}"));
                    break;
                }
                _ => {}
            }
        }
    })
    .await;
    assert_eq!(seen, ["fetched x", "released x"]);
    within(server.close(LONG)).await.unwrap();
    assert_eq!(server.stats().tasks, 0);
    drop(published);
}

#[tokio::test]
async fn memory_of_this_machine_is_exchanged() {
    let Some(driver) = cuda() else { return };
    let server = server().await;
    let memory = Buffer::near(&driver, 0, 1).unwrap().physical()[0].location();
    let memory = Buffer::on(memory)
        .bytes(3 << 20)
        .shareable()
        .allocate(&driver)
        .unwrap();
    let published = server.publish("x", memory).now().unwrap();
    let client = client(&server, &driver).await;
    let remote = within(client.fetch("x").go()).await.unwrap();
    println!("via {}, {:?}", remote.via(), remote.no_fabric());
    assert!(remote.proved().both_ways, "{:?}", remote.proved());
    verify(&driver, &published, &remote);
    within(remote.release()).await.unwrap();
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
        assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        let far: Address = "192.0.2.1:1".parse().unwrap();
        let error = within(Client::options(far).connect(&driver))
            .await
            .unwrap_err();
        assert!(matches!(error, Error::Insecure { .. }), "{error}");
    });
}
