//! Memory with far more parts than the process, which has both ends, may have files open.

use egmem::Growth;
use egmem::exchange::group::{gather_memory, rendezvous};
use egmem::share::Shared;
use egmem_tests::{FdLess, alone, leave_files};

use super::*;

const PARTS: u64 = 400;
const RANKS: u32 = 3;
/// The most files that the process may open, which is a server, a client and three ranks.
const MOST: u64 = 256;

/// In a process of its own, whose limit does not concern other tests.
#[test]
fn hundreds_of_parts_are_exchanged_with_few_files() {
    let name = "hundreds_of_parts_are_exchanged_with_few_files";
    alone(module_path!(), name, with_few_files);
}

fn with_few_files() {
    leave_files(MOST);
    let runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = { runtime }.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        fetched_over_each_way().await;
    });
    gathered();
}

fn many_parts(driver: &Driver) -> Shared {
    let options = Buffer::on(NodeId(0)).bytes(PARTS * (2 << 20)).shareable();
    let options = options.growth(Growth::steady().chunk(2 << 20));
    let shared = Shared::from(options.overcommit(true).allocate(driver).unwrap());
    assert_eq!(shared.part_count() as u64, PARTS);
    shared
}

/// All parts of each exporter came, once and in order.
fn has_all_parts(imported: &[u64], exporters: usize) {
    assert_eq!(imported.len(), exporters * PARTS as usize);
    for one in imported.chunks(PARTS as usize) {
        assert_eq!(one, (one[0]..one[0] + PARTS).collect::<Vec<_>>());
    }
}

async fn fetched_over_each_way() {
    let folder = tempfile::tempdir().unwrap();
    let (_, own) = FdLess::open();
    let unix = Address::Unix(folder.path().join("socket"));
    let server = Server::options().listen(unix).listen(Address::loopback(0));
    let server = server.start().await.unwrap();
    let published = server.publish("x", many_parts(&own)).now().unwrap();
    // At the Unix socket, and over TCP.
    for address in server.addresses() {
        let (backend, driver) = FdLess::open();
        let client = within(Client::options(address).connect(&driver))
            .await
            .unwrap();
        let remote = within(client.fetch("x").probe(false).go()).await.unwrap();
        assert_eq!(remote.via(), HandleType::PosixFd);
        has_all_parts(&backend.imported(), 1);
        within(remote.release()).await.unwrap();
        // All handles at once are too many.
        within(client.fetch("x").lease()).await.unwrap_err();
        let_go(&published).await;
        client.close().await;
    }
    drop(published);
    server.close(LONG).await.unwrap();
    assert_eq!(server.stats().fds, 0);
}

fn gathered() {
    let folder = tempfile::tempdir().unwrap();
    let address = &Address::Unix(folder.path().join("group"));
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            scope.spawn(move || {
                let (backend, driver) = FdLess::open();
                let mut ranks = rendezvous(address, rank, RANKS, None, LONG).unwrap();
                for count in 1..=2 {
                    let own = Some(many_parts(&driver));
                    let gathered = gather_memory(&mut *ranks, own, &driver).unwrap();
                    assert_eq!(gathered.via(), HandleType::PosixFd);
                    has_all_parts(&backend.imported(), count * (RANKS as usize - 1));
                }
            });
        }
    });
}
