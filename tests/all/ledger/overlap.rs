//! Live ranges of addresses never overlap: over nodes, GPUs, paths and threads, in any order.

use std::alloc::Layout;
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use egmem::driver::{Access, HandleType, HandleTypes, Location};
use egmem::ledger::{self, Allocation};
use egmem::pinned::{
    DeviceMemory, ManagedMemory, PageSize, PinnedHost, RegisteredHost, SystemMemory,
};
use egmem::shapes::{Appender, Growable, Replicated, Ring, Stripes};
use egmem::share::{ImportOptions, Shared};
use egmem::vmm::PhysicalMemory;
use egmem::{Block, Buffer, Driver, Error, Heap, Memory, Pool, PoolBuffer, Stream};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::ledger::{MIB, labelled, places};

/// One allocation of any path.
enum Live {
    Buffer(Buffer),
    Mapping(egmem::vmm::Mapping),
    Pool(PoolBuffer),
    Pinned(PinnedHost),
    Device(DeviceMemory),
    Growable(Growable<u64>),
    Block(Block),
    Registered(RegisteredHost),
    System(SystemMemory),
    Managed(ManagedMemory),
    Pieces(Pieces),
}

/// An allocation with several ranges of addresses.
struct Pieces {
    ranges: Vec<(u64, u64)>,
    /// Its name in the ledger, which has its ranges.
    label: String,
    all: Box<dyn Any>,
}

impl Pieces {
    /// Takes an allocation with at least so many ranges.
    fn live(driver: &Driver, label: String, all: impl Any, least: usize) -> Live {
        let ranges = in_ledger(driver, &label);
        assert!(ranges.len() >= least, "{label}: {ranges:x?}");
        Live::Pieces(Self {
            ranges,
            label,
            all: Box::new(all),
        })
    }
}

/// The mapped ranges with a label.
fn in_ledger(driver: &Driver, label: &str) -> Vec<(u64, u64)> {
    let mut entries = labelled(driver, label);
    entries.retain(|entry| entry.label.as_deref() == Some(label));
    let mapped = entries.iter().flat_map(|entry| &entry.mapped);
    mapped.map(|at| (at.start, at.bytes)).collect()
}

impl Live {
    fn ranges(&self) -> Vec<(u64, u64)> {
        let of = |memory: &dyn Memory| vec![(memory.device_ptr().0, memory.len())];
        match self {
            Self::Buffer(memory) => of(memory),
            Self::Mapping(memory) => of(memory),
            Self::Pool(memory) => of(memory),
            Self::Pinned(memory) => of(memory),
            Self::Device(memory) => of(memory),
            Self::Growable(memory) => of(memory),
            Self::Block(memory) => of(memory),
            Self::Registered(memory) => of(memory),
            Self::System(memory) => of(memory),
            Self::Managed(memory) => of(memory),
            Self::Pieces(pieces) => pieces.ranges.clone(),
        }
    }

    /// Adds to a vector or an appender, at the same address.
    fn grow(&mut self, driver: &Driver, more: usize) {
        match self {
            Self::Growable(vector) => {
                let start = vector.device_ptr();
                let more = more.min(vector.max_len() - vector.len());
                vector.extend_unwritten(more).unwrap();
                assert_eq!(vector.device_ptr(), start);
            }
            Self::Pieces(pieces) => {
                let Some(appender) = pieces.all.downcast_mut::<Appender<u64>>() else {
                    return;
                };
                match appender.append(&vec![1; more]) {
                    // A GPU's memory, which the CPU does not reach on this machine.
                    Ok(_) | Err(Error::NotAccessible { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                pieces.ranges = in_ledger(driver, &pieces.label);
            }
            _ => {}
        }
    }
}

/// The next step of a thread.
#[derive(Clone, Debug)]
enum Step {
    /// Allocates by the path of this number at the place of this number.
    Make(u8, usize, u64),
    /// Drops one of the thread's.
    Drop(prop::sample::Index),
    /// Adds to a growable vector or an appender, if the one chosen is one.
    Grow(prop::sample::Index, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..15_u8, 0..64_usize, 1..(5 * MIB)).prop_map(|(path, place, bytes)| Step::Make(path, place, bytes)),
        3 => any::<prop::sample::Index>().prop_map(Step::Drop),
        1 => (any::<prop::sample::Index>(), 1..(1_u64 << 19)).prop_map(|(which, more)| Step::Grow(which, more)),
    ]
}

/// The ranges in use by any thread, by their starts: a range is added after it was allocated and removed before it is
/// given back.
#[derive(Default)]
struct InUse(Mutex<BTreeMap<u64, u64>>);

impl InUse {
    fn add(&self, start: u64, bytes: u64) {
        let mut ranges = self.0.lock().unwrap();
        let before = ranges.range(..start + bytes).next_back();
        if let Some((&other, &len)) = before {
            assert!(
                other + len <= start,
                "{start:#x}+{bytes:#x} lies in {other:#x}+{len:#x}"
            );
        }
        ranges.insert(start, bytes);
    }

    fn remove(&self, start: u64) {
        self.0.lock().unwrap().remove(&start).expect("it was added");
    }
}

/// The state that the threads share.
struct World<'a> {
    driver: &'a Driver,
    places: Vec<Location>,
    pools: Vec<Pool>,
    heap: Heap,
    in_use: InUse,
    labels: AtomicU64,
}

impl World<'_> {
    /// Allocates; `None` if this machine has no such path.
    fn make(&self, stream: &Stream, path: u8, place: usize, bytes: u64) -> Option<Live> {
        let location = self.places[place % self.places.len()];
        let gpu = place as i32 % self.driver.device_count().unwrap();
        let live = match path {
            0 => Live::Buffer(
                Buffer::on(location)
                    .bytes(bytes)
                    .allocate(self.driver)
                    .unwrap(),
            ),
            1 => {
                let memory = PhysicalMemory::options(location).create(self.driver, bytes);
                Live::Mapping(memory.unwrap().map().unwrap())
            }
            2 => {
                let pool = &self.pools[place % self.pools.len()];
                Live::Pool(pool.allocate(bytes, stream).unwrap())
            }
            3 => Live::Pinned(PinnedHost::new(self.driver, gpu, bytes).unwrap()),
            4 => Live::Device(DeviceMemory::new(self.driver, gpu, bytes).unwrap()),
            5 => {
                let vector = Growable::on(location).max_len(1 << 20);
                let mut vector = vector.create(self.driver).unwrap();
                vector.extend_unwritten(1 + bytes as usize / 64).unwrap();
                Live::Growable(vector)
            }
            6 => Live::Registered(supported(RegisteredHost::new(
                self.driver,
                gpu,
                bytes,
                PageSize::Base,
            ))?),
            7 => Live::System(supported(SystemMemory::new(
                self.driver,
                bytes,
                PageSize::Base,
            ))?),
            8 => Live::Managed(supported(ManagedMemory::new(self.driver, gpu, bytes))?),
            9..14 => self.make_pieces(path, location, bytes),
            _ => {
                let layout = Layout::from_size_align(bytes as usize / 16 + 1, 8).unwrap();
                Live::Block(self.heap.allocate(layout).unwrap())
            }
        };
        self.note(&live);
        Some(live)
    }

    fn make_pieces(&self, path: u8, location: Location, bytes: u64) -> Live {
        let number = self.labels.fetch_add(1, Ordering::Relaxed);
        let (driver, label) = (self.driver, format!("overlap {number}"));
        match path {
            9 => {
                // The records are mapped twice.
                let ring = Ring::<u64>::on(location).records(bytes as usize / 8 + 1);
                let ring = ring.label(label.clone()).create(driver).unwrap();
                Pieces::live(driver, label, ring, 3)
            }
            10 => {
                let options = Appender::<u64>::on(location).max_len(1 << 20);
                let options = options.ahead(bytes as usize / 64 + 1).label(label.clone());
                let appender = options.create(driver).unwrap();
                Pieces::live(driver, label, appender, 2)
            }
            11 => {
                let data = vec![1_u64; bytes as usize / 64 + 1];
                let options = Replicated::on(self.places.iter().copied()).label(label.clone());
                let replicated = options.create(driver, &data).unwrap();
                Pieces::live(driver, label, replicated, self.places.len())
            }
            12 => Live::Buffer(
                Stripes::over(self.places.iter().copied())
                    .allocate(driver, bytes)
                    .unwrap(),
            ),
            _ => {
                let options = Buffer::on(location).bytes(bytes);
                let options = options.handle_types(HandleTypes::POSIX_FD);
                let shared = Shared::from(options.allocate(driver).unwrap());
                let description = shared.describe(Access::ReadWrite).unwrap();
                let handles = shared.export(HandleType::PosixFd).unwrap();
                let imported = ImportOptions::new().import(driver, &description, handles);
                let imported = imported.unwrap();
                let own = shared.buffer().unwrap();
                let ranges = [own.device_ptr(), imported.device_ptr()];
                Live::Pieces(Pieces {
                    ranges: ranges.map(|start| (start.0, bytes)).into(),
                    label,
                    all: Box::new((shared, imported)),
                })
            }
        }
    }

    fn note(&self, live: &Live) {
        for (start, bytes) in live.ranges() {
            self.in_use.add(start, bytes);
        }
    }

    fn forget(&self, live: &Live) {
        for (start, _) in live.ranges() {
            self.in_use.remove(start);
        }
    }

    fn run(&self, steps: &[Step]) {
        let stream = Stream::new(self.driver, 0).unwrap();
        let mut held: Vec<Live> = Vec::new();
        for step in steps {
            match step {
                Step::Make(path, place, bytes) => {
                    held.extend(self.make(&stream, *path, *place, *bytes));
                }
                Step::Drop(which) if !held.is_empty() => {
                    let live = held.swap_remove(which.index(held.len()));
                    self.forget(&live);
                    drop(live);
                }
                Step::Grow(which, more) if !held.is_empty() => {
                    let at = which.index(held.len());
                    self.forget(&held[at]);
                    held[at].grow(self.driver, *more as usize);
                    self.note(&held[at]);
                }
                _ => {}
            }
            expect_disjoint(&ledger::allocations(self.driver));
        }
        held.iter().for_each(|live| self.forget(live));
    }
}

/// Returns the allocation, unless the machine does not support it.
fn supported<T>(result: egmem::Result<T>) -> Option<T> {
    match result {
        Ok(memory) => Some(memory),
        Err(Error::PlatformUnsupported { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Checks that no two mapped ranges of the ledger have an address in common. Other tests' entries count too.
fn expect_disjoint(entries: &[Allocation]) {
    let mut ranges: Vec<(u64, u64, u64)> = entries
        .iter()
        .flat_map(|entry| {
            entry
                .mapped
                .iter()
                .map(|at| (at.start, at.bytes, entry.number))
        })
        .collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
    }
}

pub fn live_ranges_never_overlap(driver: &Driver) {
    let places = places(driver);
    let nodes: Vec<Location> = places
        .iter()
        .copied()
        .filter(|place| place.is_host())
        .collect();
    let cases = ProptestConfig {
        cases: 16,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let threads = prop::collection::vec(prop::collection::vec(step(), 1..40), 2..4);
    TestRunner::new(cases)
        .run(&threads, |threads| {
            let pool = |&place: &Location| Pool::options(place).create(driver).unwrap();
            let heap = Heap::on(nodes[0]).chunk(2 * MIB).limit(64 * MIB);
            let world = World {
                driver,
                pools: places.iter().map(pool).collect(),
                heap: heap.build(driver).unwrap(),
                places: places.clone(),
                in_use: InUse::default(),
                labels: AtomicU64::new(0),
            };
            thread::scope(|scope| {
                for steps in &threads {
                    scope.spawn(|| world.run(steps));
                }
            });
            let left = world.in_use.0.into_inner().unwrap();
            prop_assert!(left.is_empty());
            Ok(())
        })
        .unwrap();
}
