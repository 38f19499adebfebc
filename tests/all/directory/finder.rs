//! Names fetched wherever they are, from real servers.

use std::net::TcpStream;
use std::time::Duration;

use egmem::driver::{HandleType, NodeId, ShareableHandle};
use egmem::exchange::directory::{Directory, Finder, RegistrationState};
use egmem::exchange::protocol::{
    Answer, Ask, Fetch, FromServer, Greeting, Handles, Hello, MAGIC, OLDEST, VERSION, decode,
    encode,
};
use egmem::exchange::{Address, Client, Error, Reconnect, Refusal, Server};
use egmem::share::{BootId, Shared};
use egmem::{Buffer, Driver, Machine};

use super::{LONG, becomes_empty, directory, etcd};
use crate::directory::etcd::Etcd;
use egmem_tests::{read_frame, write_frame};

fn driver() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

fn memory(driver: &Driver, mark: u64) -> Shared {
    let buffer = Buffer::on(NodeId(0))
        .bytes(1 << 20)
        .shareable()
        .allocate(driver)
        .unwrap();
    buffer.put(0, mark).unwrap();
    buffer.into()
}

async fn server(directory: Option<&Directory>, address: Address) -> Server {
    let options = Server::options().listen(address);
    let options = match directory {
        Some(directory) => options.directory(directory.clone()),
        None => options,
    };
    options.start().await.unwrap()
}

fn finder(directory: Directory, driver: &Driver) -> Finder {
    Finder::with_clients(directory, driver, |address| {
        Client::options(address)
            .timeout(LONG)
            .reconnect(Reconnect::backoff(
                Duration::from_millis(10),
                Duration::from_millis(100),
            ))
    })
}

fn is_not_found(error: &Error) -> bool {
    matches!(
        error,
        Error::Refused {
            reason: Refusal::NotFound,
            ..
        }
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fixed_exporters_are_all_asked_and_a_dead_one_hides_nothing() {
    let driver = driver();
    let first = server(None, Address::loopback(0)).await;
    let second = server(None, Address::loopback(0)).await;
    let (a, b) = (first.addresses()[0].clone(), second.addresses()[0].clone());
    let published = second.publish("x", memory(&driver, 7)).now().unwrap();
    let _longer = first.publish("x/y", memory(&driver, 8)).now().unwrap();
    // At this process's own host no other test listens.
    let dead = format!("tcp://{}:1", etcd::host()).parse().unwrap();

    let with_dead = finder(
        Directory::fixed([dead, a.clone(), b.clone()]).unwrap(),
        &driver,
    );
    let buffer = with_dead.fetch("x").await.unwrap();
    assert_eq!(buffer.get::<u64>(0).unwrap(), 7);
    buffer.release().await.unwrap();
    // The dead one might have it.
    let error = with_dead.fetch("y").await.unwrap_err();
    assert!(
        matches!(error, Error::Share(egmem::share::Error::Unreachable { .. })),
        "{error}"
    );

    let living = finder(Directory::fixed([a, b]).unwrap(), &driver);
    let error = living.fetch("y").await.unwrap_err();
    assert!(is_not_found(&error), "{error}");
    let waiting = tokio::spawn({
        let living = living.clone();
        async move { living.wait("y", LONG, |fetch| fetch).await }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let y = first.publish("y", memory(&driver, 9)).now().unwrap();
    let buffer = waiting.await.unwrap().unwrap();
    assert_eq!(buffer.get::<u64>(0).unwrap(), 9);
    let error = living
        .wait("z", Duration::from_millis(300), |fetch| fetch)
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Share(egmem::share::Error::TimedOut { .. })),
        "{error}"
    );
    buffer.release().await.unwrap();
    y.withdraw(LONG).await.unwrap();
    published.withdraw(LONG).await.unwrap();
}

async fn registered(server: &Server) {
    let before = std::time::Instant::now();
    while server.registration() != Some(RegistrationState::Registered) {
        assert!(before.elapsed() < LONG, "{:?}", server.registration());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_found_through_etcd_and_while_it_is_away_what_is_open_goes_on() {
    let Some(mut etcd) = Etcd::start(None) else {
        return;
    };
    let driver = driver();
    let directory = directory(&etcd);
    // An address of its own: while no server listens there, no other test takes the port, nor does one
    // of the connections that are tried.
    let own = Address::Tcp {
        host: super::etcd::host().to_string(),
        port: 0,
    };
    let first = server(Some(&directory), own).await;
    let address = first.addresses()[0].clone();
    let finder = finder(directory.clone(), &driver);
    let error = finder.fetch("x").await.unwrap_err();
    assert!(is_not_found(&error), "{error}");
    let published = first.publish("x", memory(&driver, 7)).now().unwrap();
    let buffer = finder.wait("x", LONG, |fetch| fetch).await.unwrap();
    assert_eq!(buffer.get::<u64>(0).unwrap(), 7);
    registered(&first).await;

    etcd.kill();
    let error = finder.fetch("x").await.unwrap_err();
    assert!(matches!(error, Error::Directory { .. }), "{error}");
    buffer.put(8, 1_u64).unwrap();
    let again = Client::options(address.clone())
        .connect(&driver)
        .await
        .unwrap();
    let second = again.fetch("x").go().await.unwrap();
    assert_eq!(
        second.get::<u64>(8).unwrap(),
        1,
        "the exporter itself still answers"
    );
    second.release().await.unwrap();
    etcd.restart();
    let second = finder.wait("x", LONG, |fetch| fetch).await.unwrap();
    second.release().await.unwrap();
    buffer.release().await.unwrap();

    // A restarted exporter at the same address is another; the finder follows.
    published.withdraw(LONG).await.unwrap();
    let before = first.instance();
    first.close(LONG).await.unwrap();
    drop(first);
    becomes_empty(&directory, "x").await;
    let next = server(Some(&directory), address).await;
    assert_ne!(next.instance(), before);
    let _published = next.publish("x", memory(&driver, 8)).now().unwrap();
    let buffer = finder.wait("x", LONG, |fetch| fetch).await.unwrap();
    assert_eq!(buffer.get::<u64>(0).unwrap(), 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_secret_is_ever_in_etcd() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    let driver = driver();
    let directory = directory(&etcd);
    let server = server(Some(&directory), Address::loopback(0)).await;
    let address = server.addresses()[0].clone();
    let shared = memory(&driver, 7);
    let mut secrets = Vec::new();
    for handle in shared.export(HandleType::Fabric).unwrap() {
        let ShareableHandle::Fabric(handle) = handle else {
            panic!("{handle:?}")
        };
        secrets.push(handle.expose_bytes().to_vec());
    }
    let _published = server.publish("known", shared).now().unwrap();
    registered(&server).await;
    // A session, begun by hand.
    let spoken = {
        let address = address.to_string();
        tokio::task::spawn_blocking(move || vec![session(&address)])
            .await
            .unwrap()
    };
    secrets.extend(spoken);
    let Some(dump) = etcd.ctl(None, &["get", "", "--from-key"]) else {
        return;
    };
    let has = |bytes: &[u8]| dump.windows(bytes.len()).any(|window| window == bytes);
    assert!(
        has(b"names/known@") && has(address.to_string().as_bytes()),
        "the scan sees what there is"
    );
    for secret in secrets {
        assert!(secret.len() >= 16);
        let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(!has(&secret) && !has(hex.as_bytes()));
        // Nor half of it, unless that is all zeros.
        let part = &secret[..16];
        assert!(part.iter().all(|&byte| byte == 0) || !has(part));
    }
}

/// The token of a session.
fn session(address: &str) -> Vec<u8> {
    let mut stream = TcpStream::connect(address.trim_start_matches("tcp://")).unwrap();
    let hello = Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: BootId::current().unwrap(),
        fabric: false,
        resume: None,
        held: None,
        agent: String::new(),
        queues: false,
        moves: false,
    };
    write_frame(&mut stream, &encode(&hello));
    let Greeting::Welcome(welcome) = decode(&read_frame(&mut stream)).unwrap() else {
        panic!("not welcome");
    };
    welcome.session.expose().to_vec()
}
