//! The blocking API, on threads without a runtime.

mod silent;

use std::time::{Duration, Instant};

use super::*;
use crate as exchange;
use crate::driver::{Access, HandleType, NodeId};
use crate::{
    Address, Buffer, ClientOptions, Driver, LeaseState, Machine, MemoryError, ShareError, ledger,
};
use egmem_tests::ms;

const LONG: Duration = Duration::from_secs(300);

/// How often a client sends a heartbeat. Leases are so long that no pause of a busy machine ends one.
const HEARTBEAT: Duration = Duration::from_millis(300);

fn driver() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

fn buffer(driver: &Driver) -> Buffer {
    let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable();
    buffer.allocate(driver).unwrap()
}

fn server() -> Server {
    let options = exchange::Server::options().listen(Address::loopback(0));
    Server::start(options.heartbeat(HEARTBEAT).lease(LONG)).unwrap()
}

/// Waits until a client that nothing is asked of has sent several heartbeats.
fn heartbeats_go_on(server: &Server) {
    let (begun, before) = (Instant::now(), server.stats().requests);
    while server.stats().requests < before + 8 {
        assert!(begun.elapsed() < LONG, "no heartbeats");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn options(server: &Server) -> ClientOptions {
    exchange::Client::options(server.addresses().remove(0)).timeout(LONG)
}

#[test]
fn everything_there_is_without_async() {
    let (own, other) = (driver(), driver());
    let server = server();
    let client = Client::connect(options(&server), &other).unwrap();
    assert_eq!(
        (client.instance(), client.name()),
        (server.instance(), "local".into())
    );
    let published = server.publish("x", buffer(&own)).unwrap();
    assert_eq!(client.wait("x", LONG).unwrap().name, "x");
    assert_eq!(client.list("").unwrap().len(), 1);

    let remote = client
        .fetch_with("x", |fetch| fetch.via(HandleType::Fabric))
        .unwrap();
    remote.put(0, 7_u64).unwrap();
    assert_eq!(published.shared().unwrap().word(0).unwrap(), 7);
    heartbeats_go_on(&server);
    assert_eq!(remote.changed(Duration::ZERO).unwrap(), None);
    assert_eq!(remote.state(), LeaseState::Held);
    std::thread::scope(|scope| {
        let withdrawn = scope.spawn(|| published.withdraw(LONG));
        let state = remote.changed(LONG).unwrap();
        assert!(
            matches!(state, Some(LeaseState::Withdrawing { .. })),
            "{state:?}"
        );
        remote.release().unwrap();
        withdrawn.join().unwrap().unwrap();
    });
    drop(published);
    let published = server.publish_with("y", buffer(&own), |publish| publish.access(Access::Read));
    let published = published.unwrap();
    assert!(client.fetch_with("y", |fetch| fetch.read_write()).is_err());
    drop(published);
    client.close().unwrap();
    server.close(LONG).unwrap();
    assert!(other.sim().unwrap().held().is_empty());
}

#[test]
fn a_dropped_client_releases_and_its_thread_ends() {
    let (own, other) = (driver(), driver());
    let server = server();
    let published = server.publish("x", buffer(&own)).unwrap();
    let remote = {
        let client = Client::connect(options(&server), &other).unwrap();
        client.fetch("x").unwrap()
    };
    // The lease keeps the thread alive.
    assert_eq!(published.importers().len(), 1);
    heartbeats_go_on(&server);
    assert_eq!(remote.changed(Duration::ZERO).unwrap(), None);
    drop(remote);
    // The server learns it without being waited for.
    let begun = Instant::now();
    while !published.importers().is_empty() {
        assert!(begun.elapsed() < LONG, "not released");
        std::thread::sleep(ms(5));
    }
}

#[test]
fn within_a_runtime_it_is_refused() {
    let own = driver();
    let server = server();
    let client = Client::connect(options(&server), &own).unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let wrong = |error: Error| {
            matches!(
                error,
                Error::Share(ShareError::Memory(MemoryError::InvalidArgument { .. }))
            )
        };
        assert!(wrong(Client::connect(options(&server), &own).unwrap_err()));
        assert!(wrong(client.list("").unwrap_err()));
        assert!(wrong(server.close(LONG).unwrap_err()));
        // Dropping is allowed, and does not wait.
        drop(client);
    });
    server.close(LONG).unwrap();
}

/// The entries of imported memory: the line of this file that imported it, and the sender.
fn imports(driver: &Driver) -> Vec<(u32, String)> {
    let mut entries = ledger::allocations(driver);
    entries.retain(|entry| entry.path.is_import());
    let shown = entries.into_iter().map(|entry| {
        let site = entry.site.unwrap();
        assert!(site.file.ends_with("blocking/tests.rs"), "{site}");
        (site.line, entry.imported.unwrap().from.unwrap().name)
    });
    shown.collect()
}

#[test]
fn the_ledger_shows_the_programs_lines() {
    let (own, other) = (driver(), driver());
    let server = server();
    let client = Client::connect(options(&server), &other).unwrap();
    let _published = server.publish("x", buffer(&own)).unwrap();
    let line = line!();
    let fetched = client.fetch("x").unwrap();
    assert_eq!(imports(&other)[0].0, line + 1);
    drop(fetched);
    let _fetched = client.fetch_with("x", |fetch| fetch).unwrap();
    assert_eq!(imports(&other)[0].0, line + 4);
}
