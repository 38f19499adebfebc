//! Groups through the public interface: ranks as tasks, and as processes that are killed.

mod admission;
mod gathers;
mod leaving;
mod parts;
mod processes;
mod refusals;

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use egmem::driver::{HandleType, NodeId};
use egmem::exchange::group::{Admission, Error, Group, GroupOptions, GroupSecret, Host, Map};
use egmem::exchange::{Address, Server, Who};
use egmem::share::Shared;
use egmem::{Buffer, Driver, Machine};
use egmem_tests::ms;
use tokio::task::JoinSet;

/// Far beyond every deadline of these tests.
pub const LONG: Duration = Duration::from_secs(600);

/// With an IMEX channel.
fn fabric() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

/// Without one.
fn no_fabric() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

fn buffer(driver: &Driver, mark: u64) -> Buffer {
    let buffer = Buffer::on(NodeId(0))
        .bytes(1 << 20)
        .shareable()
        .allocate(driver)
        .unwrap();
    buffer.put(0, mark).unwrap();
    buffer
}

/// A free port of a loopback address that no other test uses, so that none takes it meanwhile.
fn free_address() -> Address {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let number = std::process::id() << 8 | LAST.fetch_add(1, Ordering::Relaxed) & 0xff;
    let [_, a, b, c] = number.to_be_bytes();
    let host = Ipv4Addr::new(127, a | 0x80, b, c);
    let listener = TcpListener::bind((host, 0)).unwrap();
    format!("tcp://{}", listener.local_addr().unwrap())
        .parse()
        .unwrap()
}

/// One that is no rank's.
async fn server() -> Server {
    let server = Server::options().listen(Address::loopback(0));
    let server = server.groups("job*", Who::anyone());
    server.start().await.unwrap()
}

fn secret(byte: u8) -> Admission {
    Admission::Secret(GroupSecret::new([byte; 32]).unwrap())
}

fn options(rank: u32, size: u32, address: &Address) -> GroupOptions {
    Group::options("job", rank, size, address.clone(), secret(7))
        .deadline(LONG)
        .lease(ms(10_000))
}

/// Waits until it is so.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(LONG, wait).await;
    waited.unwrap_or_else(|_| panic!("not within {LONG:?}: {what}"));
}

/// Runs all ranks as tasks; their results in the order of ranks.
async fn all<T: Send + 'static, F>(size: u32, rank: impl Fn(u32) -> F) -> Vec<T>
where
    F: Future<Output = T> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for index in 0..size {
        let work = rank(index);
        tasks.spawn(async move { (index, work.await) });
    }
    let mut done = tokio::time::timeout(LONG, tasks.join_all())
        .await
        .expect("a rank hangs");
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Each rank reads the mark of every rank, writes a second mark beside it, and then finds the second marks of all.
async fn exchange_and_verify(
    size: u32,
    driver: Driver,
    map: Map,
    via: HandleType,
    address: Address,
) {
    let results = all(size, |rank| {
        let (driver, address) = (driver.clone(), address.clone());
        async move {
            let group = options(rank, size, &address)
                .memory(buffer(&driver, 1000 + u64::from(rank)))
                .map(map)
                .join(&driver)
                .await?;
            assert_eq!(
                (group.via(), group.size(), group.own_rank()),
                (via, size, rank)
            );
            let others = (0..size).filter(|other| *other != rank);
            for other in others {
                let memory = group.rank(other)?;
                assert_eq!(memory.get::<u64>(0)?, 1000 + u64::from(other));
                memory.put(
                    8 * (1 + u64::from(rank)),
                    u64::from(rank) << 32 | u64::from(other),
                )?;
            }
            let own = group.leave(LONG).await?.unwrap();
            // All have left, so that no rank writes any more.
            let own = own.buffer().unwrap();
            for other in (0..size).filter(|other| *other != rank) {
                let found = own.get::<u64>(8 * (1 + u64::from(other)))?;
                assert_eq!(found, u64::from(other) << 32 | u64::from(rank));
            }
            Ok::<_, Error>(())
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_ranks_by_fabric_handles() {
    exchange_and_verify(8, fabric(), Map::All, HandleType::Fabric, free_address()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_ranks_by_fds_through_the_socket_that_rank_0_makes() {
    exchange_and_verify(
        8,
        no_fabric(),
        Map::All,
        HandleType::PosixFd,
        free_address(),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_ranks_by_fds_at_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix(folder.path().join("group"));
    exchange_and_verify(8, no_fabric(), Map::Lazy, HandleType::PosixFd, address).await;
}

/// Each rank brings its own window of one memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_with_windows() {
    for (driver, via) in [
        (fabric(), HandleType::Fabric),
        (no_fabric(), HandleType::PosixFd),
    ] {
        let (address, shared) = (free_address(), Shared::from(buffer(&driver, 0)));
        let results = all(3, |rank| {
            let (driver, address) = (driver.clone(), address.clone());
            let window = shared.window(u64::from(rank) * 4096, 4096).unwrap();
            async move {
                window.put_word(8, 100 + u64::from(rank))?;
                let group = options(rank, 3, &address).memory(window);
                let group = group.join(&driver).await?;
                assert_eq!(group.via(), via);
                for other in (0..3).filter(|other| *other != rank) {
                    let memory = group.rank(other)?;
                    assert_eq!(memory.len(), 4096);
                    assert_eq!(memory.get::<u64>(8)?, 100 + u64::from(other));
                    memory.put(4096 - 8 * u64::from(rank + 1), u64::from(rank))?;
                }
                group.leave(LONG).await
            }
        })
        .await;
        for (rank, result) in (0_u64..).zip(results) {
            let own = result.unwrap().unwrap();
            assert_eq!((own.len(), own.is_window()), (4096, true));
            for other in (0..3).filter(|other| *other != rank) {
                let at = 4096 - 8 * (other + 1);
                assert_eq!(own.word(at).unwrap(), other);
                assert_eq!(shared.word(rank * 4096 + at).unwrap(), other);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seventy_two_ranks() {
    // One driver for all ranks, so that its end releases the imports; one rank's memory each.
    let size = 72;
    let address = free_address();
    let driver = fabric();
    let results = all(size, |rank| {
        let (driver, address) = (driver.clone(), address.clone());
        async move {
            let group = options(rank, size, &address)
                .memory(buffer(&driver, rank.into()))
                .map(Map::Lazy)
                .join(&driver)
                .await?;
            let next = (rank + 1) % size;
            assert_eq!(group.rank(next)?.get::<u64>(0)?, u64::from(next));
            group.leave(LONG).await.map(|_| ())
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rank_0_may_come_late() {
    let address = free_address();
    let results = all(3, |rank| {
        let address = address.clone();
        async move {
            if rank == 0 {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            let driver = fabric();
            let group = options(rank, 3, &address).join(&driver).await?;
            assert_eq!(
                group.description((rank + 1) % 3)?,
                None,
                "no rank brings memory"
            );
            group.leave(LONG).await.map(|_| ())
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_elsewhere_serves_several_groups() {
    let server = server().await;
    let address = server.addresses()[0].clone();
    let results = all(6, |index| {
        let address = address.clone();
        async move {
            let driver = fabric();
            let name = format!("job-{}", index / 2);
            let group = Group::options(name, index % 2, 2, address, secret(7))
                .host(Host::Elsewhere)
                .memory(buffer(&driver, index.into()))
                .join(&driver)
                .await?;
            let other = group.rank(1 - index % 2)?.get::<u64>(0)?;
            assert_eq!(other, u64::from(index ^ 1));
            group.leave(LONG).await.map(|_| ())
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
    server.close(Duration::ZERO).await.unwrap();
}
