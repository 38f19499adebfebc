//! Names of real servers.

use std::net::TcpStream;

use egmem::driver::{HandleType, NodeId, ShareableHandle};
use egmem::exchange::directory::{Directory, Exporter, Registration};
use egmem::exchange::protocol::{Greeting, Hello, MAGIC, OLDEST, VERSION, decode, encode};
use egmem::exchange::{Address, Client, Error, Refusal, Server};
use egmem::share::{BootId, Shared};
use egmem::{Buffer, Driver, Machine};

use super::{LONG, becomes, directory, registered};
use crate::directory::etcd::{self, Etcd};
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

async fn server(address: Address) -> Server {
    Server::options().listen(address).start().await.unwrap()
}

/// Registers a server, with one name.
async fn register(directory: &Directory, server: &Server, name: &str) -> (Exporter, Registration) {
    let exporter = Exporter {
        addresses: server.addresses(),
        instance: server.instance(),
        boot: BootId::current().unwrap(),
    };
    let registration = directory.register(exporter.clone()).unwrap();
    registration.add(name).unwrap();
    registered(&registration).await;
    (exporter, registration)
}

/// Fetches a word of a name from the exporter that a directory names.
async fn word_of(name: &str, exporter: &Exporter, driver: &Driver) -> Result<u64, Error> {
    let address = exporter.address(BootId::current()?).unwrap().clone();
    let client = Client::options(address).connect(driver).await?;
    let memory = client.fetch(name).instance(exporter.instance).await?;
    let word = memory.get(0)?;
    memory.release().await?;
    Ok(word)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_is_fetched_from_its_exporter_and_never_from_the_one_after_it() {
    let Some(mut etcd) = Etcd::start(None) else {
        return;
    };
    let driver = driver();
    let directory = directory(&etcd);
    // An address of its own: while no server listens there, no other test takes the port, nor does one
    // of the connections that are tried.
    let own = Address::Tcp {
        host: etcd::host().to_string(),
        port: 0,
    };
    let first = server(own).await;
    let address = first.addresses()[0].clone();
    let published = first.publish("x", memory(&driver, 7)).now().unwrap();
    let (old, registration) = register(&directory, &first, "x").await;
    becomes(&directory, "x", &[&old]).await;
    assert_eq!(word_of("x", &old, &driver).await.unwrap(), 7);

    etcd.kill();
    let error = directory.resolve("x").await.unwrap_err();
    assert!(matches!(error, Error::Directory { .. }), "{error}");
    let word = word_of("x", &old, &driver).await;
    assert_eq!(word.unwrap(), 7, "the exporter itself still answers");
    etcd.restart();
    registered(&registration).await;
    becomes(&directory, "x", &[&old]).await;

    // A restarted exporter at the same address is another.
    published.withdraw(LONG).await.unwrap();
    registration.close().await.unwrap();
    first.close(LONG).await.unwrap();
    drop(first);
    becomes(&directory, "x", &[]).await;
    let next = server(address).await;
    let _published = next.publish("x", memory(&driver, 8)).now().unwrap();
    let (new, _registration) = register(&directory, &next, "x").await;
    becomes(&directory, "x", &[&new]).await;
    let error = word_of("x", &old, &driver).await.unwrap_err();
    let stale = matches!(
        &error,
        Error::Refused {
            reason: Refusal::Stale,
            ..
        }
    );
    assert!(stale, "{error}");
    assert_eq!(word_of("x", &new, &driver).await.unwrap(), 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_secret_is_ever_in_etcd() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    let driver = driver();
    let directory = directory(&etcd);
    let server = server(Address::loopback(0)).await;
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
    let _registered = register(&directory, &server, "known").await;
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
        resume: None,
        agent: String::new(),
        moves: false,
        fabric: false,
    };
    write_frame(&mut stream, &encode(&hello));
    let Greeting::Welcome(welcome) = decode(&read_frame(&mut stream)).unwrap() else {
        panic!("not welcome");
    };
    welcome.session.expose().to_vec()
}
