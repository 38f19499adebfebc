//! Server and client in one process: memory found by name, imported, proved, given back.

mod failures;
mod few_fds;
mod follow;
mod names;
mod parts;
mod windows;

use std::future::IntoFuture;
use std::time::Duration;

use egmem::certs::{Authority, CertRequest};
use egmem::driver::{Call, HandleType, HandleTypes, Location, NodeId};
use egmem::exchange::server::Published;
use egmem::exchange::{
    Address, Client, ClientOptions, Error, Reconnect, RemoteBuffer, Security, Server, Tls, TlsPem,
};
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::{Buffer, Driver, Machine};
use tokio::time::timeout;

use egmem_tests::drivers::cuda;

/// No test waits longer for anything.
const LONG: Duration = Duration::from_secs(300);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn within<W: IntoFuture>(work: W) -> W::Output {
    timeout(LONG, work).await.expect("no hang")
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

/// Waits until no importer holds the published memory.
async fn let_go(published: &Published) {
    within(async {
        while !published.importers().is_empty() {
            tokio::time::sleep(ms(2)).await;
        }
    })
    .await;
}

/// Patterns written at one end are found at the other, by CPU and by GPU, both ways.
fn verify(own: &Driver, published: &Published, remote: &RemoteBuffer) {
    let shared = published.shared().unwrap();
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
    let remote = within(client.fetch("a/x")).await.unwrap();
    assert_eq!(remote.via(), HandleType::PosixFd);
    assert_eq!((remote.len(), remote.no_fabric()), (3 << 20, None));
    // An fd names memory of this machine.
    let proof = remote.proved();
    assert!(proof.by.is_none() && proof.why_not.is_some(), "{proof:?}");
    verify(&own, &published, &remote);
    assert_eq!(published.importers().len(), 1);
    within(remote.release()).await.unwrap();
    assert!(published.importers().is_empty());
    nothing_held(&other).await;
}

#[tokio::test]
async fn memory_goes_by_fd_over_tls() {
    let (own, other) = (no_fabric(), no_fabric());
    let ends = tls();
    let server = ends.server().await;
    let published = server.publish("x", buffer(&own, 5 << 20)).now().unwrap();
    let options = options(&server).security(ends.client.clone());
    let client = within(options.connect(&other)).await.unwrap();
    assert_eq!(client.name(), "node-b");
    assert!(client.peer().contains("node-a"), "{}", client.peer());
    let remote = within(client.fetch("x")).await.unwrap();
    // There is no IMEX channel, and the import gives that as the reason.
    assert_eq!(remote.via(), HandleType::PosixFd);
    assert!(remote.no_fabric().unwrap().contains("IMEX"), "{remote:?}");
    verify(&own, &published, &remote);
    assert_eq!(published.importers()[0].peer.to_string(), "node-b");
    drop(remote);
    nothing_held(&other).await;
    let_go(&published).await;
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
    let proof = remote.proved();
    assert!(proof.both_ways, "{proof:?}");
    assert_eq!(proof.by, Some(Location::Device(0)));
    verify(&own, &published, &remote);
    drop(remote);
    nothing_held(&other).await;
    // The error names the end that cannot use fabric handles.
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
async fn without_room_or_wish_nothing_is_probed() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let full = server.publish("full", buffer(&own, 2 << 20)).now().unwrap();
    let some = server.publish("some", buffer(&own, 1 << 20)).now().unwrap();
    let fetch = |name| client.fetch(name).via(HandleType::Fabric);
    let tight = buffer(&own, (2 << 20) - 7);
    let _tight = server.publish("tight", tight).now().unwrap();
    for name in ["full", "tight"] {
        let remote = within(fetch(name)).await.unwrap();
        let why = remote.proved().why_not.as_ref().unwrap();
        assert!(why.contains("no place for a probe"), "{why}");
        assert!(why.contains("room_for_probes"), "{why}");
        assert!(why.contains("published it without probes"), "{why}");
    }
    let remote = within(fetch("some").probe(false)).await.unwrap();
    assert_eq!(remote.proved().by, None);
    // A fetch by fd uses no context of a GPU, nor a word of the memory.
    let sim = other.sim().unwrap();
    sim.reset_counts();
    let remote = within(client.fetch("some").via(HandleType::PosixFd)).await;
    assert_eq!(remote.unwrap().proved().by, None);
    assert_eq!(sim.count(Call::MemHostAlloc), 0);
    assert_eq!(sim.count(Call::StreamCreate), 0);
    // Many at once do not disturb each other.
    let fetches = (0..16).map(|_| {
        let client = client.clone();
        tokio::spawn(async move {
            let fetch = client.fetch("some").via(HandleType::Fabric);
            fetch.go().await.map(|remote| remote.proved().both_ways)
        })
    });
    for fetch in fetches.collect::<Vec<_>>() {
        assert!(within(fetch).await.unwrap().unwrap());
    }
    drop((full, some));
}

#[tokio::test]
async fn memory_of_any_size_is_proved_where_its_owner_left_room() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    const GRANULE: u64 = 2 << 20;
    for (bytes, padded) in [
        (1, GRANULE),
        (GRANULE - 4096, GRANULE),
        (GRANULE - 4095, 2 * GRANULE),
        (GRANULE - 1, 2 * GRANULE),
        (GRANULE, 2 * GRANULE),
        (GRANULE + 1, 2 * GRANULE),
        (8 * GRANULE, 9 * GRANULE),
    ] {
        let memory = Buffer::on(NodeId(0)).bytes(bytes).shareable();
        let memory = memory.room_for_probes().allocate(&own).unwrap();
        assert_eq!((memory.len(), memory.padded()), (bytes, padded));
        memory.fill(0xa5_u8).unwrap();
        let published = server.publish("x", memory).now().unwrap();
        let fetch = client.fetch("x").via(HandleType::Fabric);
        let remote = within(fetch).await.unwrap();
        assert!(remote.proved().both_ways, "{:?}", remote.proved());
        let description = remote.description();
        assert_eq!((remote.len(), description.len), (bytes, bytes));
        assert_eq!(description.padded(), padded);
        // The user's bytes are as they were.
        let mut all = vec![0_u8; bytes as usize];
        remote.read_at(0, &mut all).unwrap();
        assert!(all.iter().all(|&byte| byte == 0xa5));
        assert!(remote.put(bytes, 1_u8).is_err());
        drop(remote);
        drop(published);
    }
    let empty = Buffer::on(NodeId(0)).bytes(0).room_for_probes();
    assert!(empty.allocate(&own).is_err());
    let huge = Buffer::on(NodeId(0)).bytes(u64::MAX).room_for_probes();
    assert!(huge.allocate(&own).is_err());
}

#[tokio::test]
async fn the_last_share_of_spread_memory_has_room_for_probes() {
    let (own, other) = (no_fabric(), no_fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let topology = egmem::Topology::discover(&own).unwrap();
    let shares = egmem::topology::Placement::Spread.request(16 << 20);
    let shares = shares.place(&topology).unwrap();
    let memory = Buffer::spread(&shares).handle_types(HandleTypes::POSIX_FD);
    let memory = memory.room_for_probes().allocate(&own).unwrap();
    assert_eq!((memory.len(), memory.padded()), (16 << 20, 18 << 20));
    let _published = server.publish("x", memory).now().unwrap();
    let remote = within(client.fetch("x").go()).await.unwrap();
    let description = remote.description();
    assert!(description.parts.len() > 1);
    assert_eq!(
        (description.len, description.padded()),
        (16 << 20, 18 << 20)
    );
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
    verify(&driver, &published, &remote);
    within(remote.release()).await.unwrap();
}
