//! A ring's memory: its counters, and its records mapped twice side by side.

use std::sync::atomic::{AtomicU64, Ordering::Acquire, fence};
use std::sync::{Arc, Mutex};

use egmem_core::per_driver::lock;
use egmem_share::{ImportedParts, Link};

use crate::driver::{Access, AccessDesc, DevicePtr, Driver, HandleTypes, Location};
use crate::memory::{CpuView, Memory};
use crate::pinned::PinnedHost;
use crate::vmm::{Mapping, PhysicalMemory, PhysicalOptions, Reservation};
use crate::{Error, Growth, Result, Stream, counter};

/// The type of records whose size is known only when the program runs: see [`Ring::untyped`](crate::Ring::untyped).
#[derive(Debug)]
pub enum Untyped {}

/// Where the counters and the constants lie, in bytes. `device/egmem_ring.cuh` says the same. Each counter has a cache line
/// of its own, and none that a processor would fetch together with the other's.
pub(super) const HEAD: u64 = 0;
pub(super) const TAIL: u64 = 128;
const CONSTANTS: u64 = 256;

/// "EGMRING2", so that a kernel that gets another address finds it out.
const MAGIC: u64 = u64::from_le_bytes(*b"EGMRING2");

/// The bytes at the start of a part that mean something.
const USED: usize = 512;

/// The memory of a ring. Both sides keep it.
///
/// A ring that cannot be shared has its constants beside its counters. Of one that can, other processes write the counters'
/// part, and kernels trust the constants: these lie in memory of this process alone, in front of the counters.
#[derive(Debug)]
pub(super) struct RingMemory {
    // Unmapped first, then released. In the order of addresses: the constants' part, the counters' unless it is the same,
    // and the records' part twice.
    mappings: Vec<Mapping>,
    /// Where the counters and the records begin, in bytes from the first mapping's start.
    counters: u64,
    records: u64,
    pub(super) parts: Parts,
    _constants: Option<PhysicalMemory>,
    /// The least that the CPU may do with a mapping; it never changes.
    host: Access,
    pub(super) shape: Shape,
    /// The connection to the process that has the other side, if it was sent away or came from there.
    pub(super) peer: Mutex<Option<Link>>,
}

/// The counters' memory and the records'.
#[derive(Debug)]
pub(super) enum Parts {
    Created([Arc<PhysicalMemory>; 2]),
    Imported(ImportedParts),
}

impl Parts {
    fn both(&self) -> [&PhysicalMemory; 2] {
        match self {
            Self::Created([counters, records]) => [counters, records],
            Self::Imported(parts) => [parts.part(0), parts.part(1)],
        }
    }
}

impl RingMemory {
    /// Creates and maps the memory of a new ring. If a step fails, those before it are undone.
    pub(super) fn create(
        driver: &Driver,
        (options, handle_types): (PhysicalOptions, HandleTypes),
        access: &[AccessDesc],
        (capacity, record): (Option<usize>, u64),
    ) -> Result<Arc<Self>> {
        let shareable = options.clone().handle_types(handle_types);
        let granule = shareable.granularity_of(driver)?.bytes();
        let shape = Shape::new(capacity, record, granule)?;
        let constants = match handle_types {
            HandleTypes::NONE => None,
            _ => Some(options.create(driver, granule)?),
        };
        let counters = shareable.clone().create(driver, granule)?;
        let records = shareable.create(driver, shape.bytes)?;
        let parts = Parts::Created([counters, records].map(Arc::new));
        let memory = Self::map(driver, parts, (constants, access), shape)?;
        if memory.counters > 0 {
            memory.write(1, &[0; USED / 8])?;
        }
        Ok(Arc::new(memory))
    }

    /// Maps the parts of a ring, and writes its constants for the kernels of this process.
    ///
    /// The sizes were checked: the counters have one granule, the records what the shape says.
    pub(super) fn map(
        driver: &Driver,
        parts: Parts,
        (constants, access): (Option<PhysicalMemory>, &[AccessDesc]),
        shape: Shape,
    ) -> Result<Self> {
        let [counters, records] = parts.both();
        let in_order = constants.iter().chain([counters, records, records]);
        let bytes = |memory: &PhysicalMemory| memory.size().padded();
        let reservation = Reservation::options().alignment(bytes(counters));
        let reservation = reservation.reserve(driver, in_order.clone().map(bytes).sum())?;
        let reservation = Arc::new(reservation);
        let mut mappings: Vec<Mapping> = Vec::new();
        for physical in in_order {
            let offset = mappings.last().map_or(0, |before| before.range().end);
            let mut mapping = reservation.map(offset, physical)?;
            mapping.set_access(access)?;
            mappings.push(mapping);
        }
        let hosts = mappings.iter().map(Mapping::host);
        let host = hosts.min().unwrap_or(Access::None);
        let before = constants.as_ref().map_or(0, bytes);
        let memory = Self {
            mappings,
            counters: before,
            records: before + bytes(counters),
            parts,
            _constants: constants,
            host,
            shape,
            peer: Mutex::default(),
        };
        // Counters that lie beside the constants begin at 0.
        let mut words = [0_u64; USED / 8];
        let (shape, mask) = (memory.shape, memory.shape.bytes - 1);
        let [records, counters] = [memory.records, memory.counters];
        let constants = [MAGIC, records, shape.capacity, mask, shape.record, counters];
        let first = CONSTANTS as usize / 8;
        words[first..first + constants.len()].copy_from_slice(&constants);
        memory.write(0, &words)?;
        Ok(memory)
    }

    /// Writes the start of a mapping, by the GPU if the CPU may not.
    fn write(&self, mapping: usize, words: &[u64; USED / 8]) -> Result<()> {
        let to = &self.mappings[mapping];
        match (self.host, to.location()) {
            (Access::ReadWrite, _) => to.cpu()?.write_at(0, words),
            (_, Location::Device(gpu)) => {
                let driver = to.driver();
                let from = PinnedHost::new(driver, gpu, USED as u64)?;
                from.cpu().write_at(0, words)?;
                Stream::new(driver, gpu)?.copy(to, 0, &from, 0, USED as u64)
            }
            _ => Err(self.refused()),
        }
    }

    /// Returns whether the other side is gone: dropped, or in a process that has ended. Its writes are seen then.
    pub(super) fn has_one_side(self: &Arc<Self>) -> bool {
        let is_there = |link: &Link| !link.is_cut();
        let is_one =
            Arc::strong_count(self) == 1 && !lock(&self.peer).as_ref().is_some_and(is_there);
        // The count itself is read without an order. Pairs with the release of the side that was dropped.
        fence(Acquire);
        is_one
    }

    fn refused(&self) -> Error {
        Error::not_accessible(Location::Host, self.host, Access::ReadWrite)
    }

    /// Fails unless the CPU may read and write, and in a forked child: the parent has the same sides.
    pub(super) fn expect_cpu(&self) -> Result<()> {
        self.expect_this_process()?;
        if self.is_cpus() {
            return Ok(());
        }
        Err(self.refused())
    }

    /// Returns whether the CPU may read and write the memory.
    pub(super) fn is_cpus(&self) -> bool {
        self.host == Access::ReadWrite
    }

    pub(super) fn expect_this_process(&self) -> Result<()> {
        self.mappings[0].driver().expect_this_process("ring")
    }

    /// Returns the counter at `offset`, which is [`HEAD`] or [`TAIL`].
    pub(super) fn counter(&self, offset: u64) -> Result<&AtomicU64> {
        self.expect_cpu()?;
        let address = self.address().add(self.counters + offset);
        // SAFETY:
        // - Both offsets are multiples of 8 inside the counters' part, which the CPU may read and write, as just checked.
        // - It is mapped so while `self` lives: no function of this type changes its access.
        // - Safe code of this process reaches the word through this function alone.
        Ok(unsafe { counter(address) })
    }

    /// Returns the counters: records committed, and released. The sides may move them on meanwhile; they stay as far apart as
    /// they may be.
    pub(super) fn counts(&self) -> Result<(u64, u64)> {
        // A side that goes on here has stopped, so the other counter alone moves, away from the limit.
        let head = self.counter(HEAD)?.load(Acquire);
        let tail = self.counter(TAIL)?.load(Acquire);
        Ok((head, tail))
    }

    /// Returns the address of the record with this number.
    pub(super) fn record(&self, number: u64) -> DevicePtr {
        self.first_record().add(self.shape.place(number))
    }

    /// Returns the CPU's view of `count` records, at most the ring's room, from the one with this number on.
    pub(super) fn view(&self, number: u64, count: u64) -> Result<CpuView<'_>> {
        self.expect_cpu()?;
        let len = count.min(self.shape.capacity) * self.shape.record;
        // SAFETY:
        // - The place is before the end of the first mapping and the records are no longer than one, so they end before
        //   the second one does. Both mappings are whole pages, and the CPU may read and write them while `self` lives.
        // - Safe code reaches the bytes through such views only. The two mappings are two addresses of the same bytes:
        //   a store through one is, for the other, a store by somebody else, which a view allows at any time. So is a
        //   store by another process.
        Ok(unsafe { CpuView::new(self.record(number), len, true) })
    }

    /// Returns the first address, which kernels take.
    pub(super) fn address(&self) -> DevicePtr {
        self.mappings[0].reservation().start()
    }

    /// Returns the address of the records' first mapping.
    pub(super) fn first_record(&self) -> DevicePtr {
        self.address().add(self.records)
    }
}

/// How many records a ring has, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// The most records at a time.
    pub(super) capacity: u64,
    /// The size of a record in bytes.
    pub(super) record: u64,
    /// The bytes that the records have: a power of two.
    pub(super) bytes: u64,
}

impl Shape {
    /// Returns a shape with room for `capacity` records, or for as many as one granule holds.
    pub(super) fn new(capacity: Option<usize>, record: u64, granule: u64) -> Result<Self> {
        if record == 0 {
            let why = "records of 0 bytes need no memory";
            return Err(Error::invalid("record type", why));
        }
        // A power of two in one physical memory.
        let most = Growth::MAX_CHUNK.next_power_of_two() / 2;
        if record > most {
            let why = format!("one record of {record} bytes exceeds a ring's memory");
            return Err(Error::invalid_of("record type", why, "1 byte to 2 GiB"));
        }
        let valid = || format!("1 to {}", most / record);
        let capacity = match capacity {
            Some(0) => {
                let why = "a ring without room passes nothing on";
                return Err(Error::invalid_of("records", why, valid()));
            }
            Some(records) => records as u64,
            None => (granule / record).max(1),
        };
        let bytes = capacity.checked_mul(record).filter(|&n| n <= most);
        let Some(bytes) = bytes else {
            let why =
                format!("{capacity} records of {record} bytes exceed 2 GiB, the limit of a ring");
            return Err(Error::invalid_of("records", why, valid()));
        };
        Ok(Self {
            capacity,
            record,
            bytes: bytes.next_power_of_two().max(granule),
        })
    }

    /// Returns where the record with this number begins, in bytes from the first mapping's start. As many records as
    /// the ring has room for follow without a gap.
    ///
    /// The bytes are a power of two, so this goes on evenly where the count passes 2^64.
    pub(super) const fn place(&self, number: u64) -> u64 {
        number.wrapping_mul(self.record) & (self.bytes - 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRANULE: u64 = 2 << 20;

    proptest! {
        #[test]
        fn records_follow_each_other_and_stay_inside(
            capacity in 1..100_000_usize,
            record in 1..5_000_u64,
            number in any::<u64>(),
        ) {
            let shape = Shape::new(Some(capacity), record, GRANULE).unwrap();
            prop_assert!(shape.bytes.is_power_of_two() && shape.bytes >= GRANULE);
            prop_assert!(shape.capacity * record <= shape.bytes);
            let place = shape.place(number);
            prop_assert!(place < shape.bytes);
            prop_assert!(place + shape.capacity * record < 2 * shape.bytes);
            // The next record begins where this one ends, also where the count passes 2^64.
            let next = shape.place(number.wrapping_add(1));
            prop_assert_eq!(next, (place + record) & (shape.bytes - 1));
        }
    }

    #[test]
    fn the_count_passes_its_end_without_a_gap() {
        let shape = Shape::new(Some(1000), 48, GRANULE).unwrap();
        let last = shape.place(u64::MAX);
        assert_eq!(shape.place(0), (last + 48) & (shape.bytes - 1));
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        let default = Shape::new(None, 16, GRANULE).unwrap();
        assert_eq!((default.capacity, default.bytes), (131_072, GRANULE));
        let large = Shape::new(None, 3 * GRANULE, GRANULE).unwrap();
        assert_eq!((large.capacity, large.bytes), (1, 4 * GRANULE));
        let most = Shape::new(Some(256 << 20), 8, GRANULE).unwrap();
        assert_eq!(most.bytes, 2 << 30);
        let one = Shape::new(Some(1), 2 << 30, GRANULE).unwrap();
        assert_eq!(one.bytes, 2 << 30);
        for (capacity, record, refused) in [
            (Some(0), 8, "records"),
            (Some((256 << 20) + 1), 8, "records"),
            (Some(2), 2 << 30, "records"),
            (Some(usize::MAX), 8, "records"),
            (None, 0, "record type"),
            (None, (2 << 30) + 1, "record type"),
            (Some(0), u64::MAX, "record type"),
        ] {
            let error = Shape::new(capacity, record, GRANULE).unwrap_err();
            assert!(
                matches!(error, Error::InvalidArgument { what, .. } if what == refused),
                "{error}"
            );
        }
    }
}
