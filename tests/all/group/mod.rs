//! Groups through the public interface: ranks as threads, as processes that are killed, and under attack.

mod attacks;
mod failures;
mod processes;

use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use egmem::driver::{HandleType, NodeId};
use egmem::exchange::group::{
    self, AllGather, GatherOptions, GatheredMemory, GroupSecret, rendezvous,
};
use egmem::exchange::{Address, Error, Result};
use egmem::share::Shared;
use egmem::{Buffer, Driver, Growth, Machine};

/// Far beyond everything that must happen.
pub const LONG: Duration = Duration::from_secs(300);
const PART: u64 = 2 << 20;

/// With an IMEX channel.
fn fabric() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

/// Without one.
fn no_fabric() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

/// A buffer of so many parts, each with a mark.
fn buffer(driver: &Driver, parts: u64, mark: u64) -> Buffer {
    let options = Buffer::on(NodeId(0)).bytes(parts * PART).shareable();
    let options = options.growth(Growth::steady().chunk(PART));
    let buffer = options.allocate(driver).unwrap();
    for part in 0..parts {
        buffer.put(part * PART, mark + part).unwrap();
    }
    buffer
}

fn secret(byte: u8) -> GroupSecret {
    GroupSecret::new([byte; 32]).unwrap()
}

fn unix(folder: &Path) -> Address {
    Address::Unix(folder.join("group"))
}

/// Runs all ranks as threads; their results in the order of ranks.
fn all<T: Send>(size: u32, rank: impl Fn(u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|index| {
                scope.spawn({
                    let rank = &rank;
                    move || rank(index)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Ranks that are threads of one process and share a table. `change` is what happens to all contributions on the way to a
/// rank.
struct Table {
    rank: u32,
    size: u32,
    round: u32,
    shared: Arc<(Barrier, Mutex<Vec<Vec<u8>>>)>,
    change: Change,
}

type Change = fn(u32, u32, &mut Vec<Vec<u8>>);

impl Table {
    fn of(size: u32, change: Change) -> Vec<Mutex<Option<Self>>> {
        let shared = Arc::new((
            Barrier::new(size as usize),
            Mutex::new(vec![Vec::new(); size as usize]),
        ));
        let one = |rank| Self {
            rank,
            size,
            round: 0,
            shared: Arc::clone(&shared),
            change,
        };
        (0..size).map(|rank| Mutex::new(Some(one(rank)))).collect()
    }
}

impl AllGather for Table {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (barrier, table) = &*self.shared;
        table.lock().unwrap()[self.rank as usize] = own.to_vec();
        barrier.wait();
        let mut all = table.lock().unwrap().clone();
        barrier.wait();
        (self.change)(self.rank, self.round, &mut all);
        self.round += 1;
        Ok(all)
    }
}

/// Each rank reads the marks of every rank and writes beside them; then each finds what all have written.
fn verify(memory: &GatheredMemory, meet: &Barrier, parts: impl Fn(u32) -> u64) {
    let own = memory.own_rank();
    for rank in (0..memory.size()).filter(|rank| *rank != own) {
        let mapped = memory.rank(rank).unwrap();
        assert_eq!(mapped.description().parts.len() as u64, parts(rank));
        for part in 0..parts(rank) {
            assert_eq!(mapped.get(part * PART), Ok(1000 * u64::from(rank) + part));
        }
        mapped
            .put(
                8 * (1 + u64::from(own)),
                u64::from(own) << 32 | u64::from(rank),
            )
            .unwrap();
    }
    meet.wait();
    let buffer = memory.memory().unwrap().buffer().unwrap();
    for rank in (0..memory.size()).filter(|rank| *rank != own) {
        let found: u64 = buffer.get(8 * (1 + u64::from(rank))).unwrap();
        assert_eq!(found, u64::from(rank) << 32 | u64::from(own));
    }
}

/// Ranks meet and gather their memory twice, by one handle type.
fn exchange_and_verify(
    size: u32,
    driver: impl Fn() -> Driver + Sync,
    via: HandleType,
    parts: fn(u32) -> u64,
    (address, secret): (&Address, Option<&GroupSecret>),
) {
    let meet = Barrier::new(size as usize);
    all(size, |rank| {
        let driver = driver();
        let mut ranks = rendezvous(address, rank, size, secret, LONG).unwrap();
        assert_eq!((ranks.rank(), ranks.size()), (rank, size));
        for _ in 0..2 {
            let own = Shared::from(buffer(&driver, parts(rank), 1000 * u64::from(rank)));
            let memory = GatherOptions::new()
                .via(via)
                .gather(&mut *ranks, Some(own), &driver);
            let memory = memory.unwrap();
            assert_eq!(
                (memory.via(), memory.size(), memory.own_rank()),
                (via, size, rank)
            );
            verify(&memory, &meet, parts);
            meet.wait();
        }
        let bytes = ranks
            .all_gather(&rank.to_be_bytes()[..1 + rank as usize % 4])
            .unwrap();
        let expected = (0..size).map(|rank| rank.to_be_bytes()[..1 + rank as usize % 4].to_vec());
        assert!(expected.eq(bytes));
        meet.wait();
        assert!(driver.sim().unwrap().held().is_empty());
    });
}

#[test]
fn ranks_of_one_machine_exchange_fds() {
    let folder = tempfile::tempdir().unwrap();
    let at = unix(folder.path());
    exchange_and_verify(4, no_fabric, HandleType::PosixFd, |_| 1, (&at, None));
    // Of many parts the fds come through queues.
    exchange_and_verify(
        3,
        fabric,
        HandleType::PosixFd,
        |rank| 2 + 58 * u64::from(rank % 2),
        (&at, None),
    );
}

#[test]
fn ranks_exchange_fabric_handles() {
    let folder = tempfile::tempdir().unwrap();
    let at = unix(folder.path());
    exchange_and_verify(
        4,
        fabric,
        HandleType::Fabric,
        |rank| 1 + 40 * u64::from(rank % 2),
        (&at, Some(&secret(1))),
    );
}

#[test]
fn ranks_meet_over_tcp_with_a_secret() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Address::loopback(listener.local_addr().unwrap().port());
    drop(listener);
    exchange_and_verify(
        3,
        fabric,
        HandleType::PosixFd,
        |_| 1,
        (&at, Some(&secret(1))),
    );
}

#[test]
fn any_all_gather_does() {
    let size = 3;
    let tables = Table::of(size, |_, _, _| {});
    let meet = Barrier::new(size as usize);
    all(size, |rank| {
        let driver = no_fabric();
        let mut table = tables[rank as usize].lock().unwrap().take().unwrap();
        let own = Shared::from(buffer(&driver, 1, 1000 * u64::from(rank)));
        let memory = group::gather_memory(&mut table, Some(own), &driver).unwrap();
        assert_eq!(memory.via(), HandleType::PosixFd);
        verify(&memory, &meet, |_| 1);
    });
}

#[test]
fn a_rank_without_memory_maps_that_of_the_others() {
    let tables = Table::of(3, |_, _, _| {});
    all(3, |rank| {
        let driver = fabric();
        let mut table = tables[rank as usize].lock().unwrap().take().unwrap();
        let own = (rank != 1).then(|| Shared::from(buffer(&driver, 1, rank.into())));
        let memory = group::gather_memory(&mut table, own, &driver).unwrap();
        let error = memory.rank(1).unwrap_err().to_string();
        let why = ["1 contributed no memory", "1 is this process's own"];
        assert!(error.contains(why[usize::from(rank == 1)]), "{error}");
        assert!(memory.rank(3).is_err() && memory.rank(rank).is_err());
        if rank != 2 {
            assert_eq!(memory.rank(2).unwrap().get(0), Ok(2_u64));
        }
    });
}

#[test]
fn a_lone_rank_has_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let driver = fabric();
    let mut ranks = rendezvous(&unix(folder.path()), 0, 1, None, LONG).unwrap();
    let own = Shared::from(buffer(&driver, 1, 7));
    let memory = group::gather_memory(&mut *ranks, Some(own), &driver).unwrap();
    assert_eq!(
        (memory.size(), memory.memory().unwrap().word(0)),
        (1, Ok(7))
    );
}

#[test]
fn seventy_two_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let (size, at, driver) = (72, unix(folder.path()), fabric());
    let results = all(size, |rank| {
        let mut ranks = rendezvous(&at, rank, size, None, LONG)?;
        let own = Shared::from(buffer(&driver, 1, rank.into()));
        let options = GatherOptions::new().via(HandleType::Fabric);
        let memory = options.gather(&mut *ranks, Some(own), &driver)?;
        let next = (rank + 1) % size;
        assert_eq!(memory.rank(next)?.get::<u64>(0)?, u64::from(next));
        Ok::<_, Error>(())
    });
    for result in results {
        result.unwrap();
    }
}
