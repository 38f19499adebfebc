//! A range whose parts are created one after the other.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::{MappedRange, Pairs, least};
use crate::backing::Backing;
use crate::driver::{Access, DevicePtr, Driver};
use crate::memory::CpuView;
use crate::vmm::pages::Fork;
use crate::vmm::{Adjacent, Mapping, PhysicalMemory, Reservation};
use crate::{Error, Result};

/// The front of a range, to which one thread adds parts while others use those that are there. Dropped before it is
/// complete, it unmaps and releases its parts.
///
/// Parts are only added, and their access does not change, while it is shared.
#[derive(Debug)]
pub struct GrowingRange {
    /// Locked for moments, and for one query of the driver.
    pairs: RwLock<Pairs<PhysicalMemory>>,
    reservation: OnceLock<Arc<Reservation>>,
    padded: u64,
    /// What the parts are.
    backing: Backing,
    /// What a forked child has of registered parts, if none of them can be shared.
    private: Option<Fork>,
    /// Bytes that have parts, mapped and granted.
    done: AtomicU64,
    /// The flags of the least that the host may do with a part. Stored before `done`.
    host: AtomicU32,
}

impl GrowingRange {
    /// Begins a range of `padded` bytes, for parts of one backing.
    pub const fn new(padded: u64, backing: Backing, private: Option<Fork>) -> Self {
        Self {
            pairs: RwLock::new(Pairs {
                mappings: Vec::new(),
                parts: Vec::new(),
            }),
            reservation: OnceLock::new(),
            padded,
            backing,
            private,
            done: AtomicU64::new(0),
            host: AtomicU32::new(Access::ReadWrite.flags()),
        }
    }

    /// Reserves the range's addresses, unless it has them, and returns them.
    ///
    /// # Errors
    /// Those of [`ReservationOptions::reserve`](crate::vmm::ReservationOptions::reserve).
    pub fn reserve(&self, driver: &Driver) -> Result<&Arc<Reservation>> {
        if let Some(reservation) = self.reservation.get() {
            return Ok(reservation);
        }
        let options = Reservation::options().backing(self.backing);
        let all = options.reserve(driver, self.padded)?;
        if let Some(fork) = self.private {
            all.prepare(fork)?;
        }
        Ok(self.reservation.get_or_init(|| Arc::new(all)))
    }

    /// Returns the bytes that have parts.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Adds a part, which is mapped behind those before it and granted.
    pub fn push(&self, part: PhysicalMemory, mapping: Mapping) {
        let mut pairs = self.pairs.write().unwrap_or_else(PoisonError::into_inner);
        let (done, host) = (mapping.range().end, mapping.host());
        pairs.mappings.push(mapping);
        pairs.parts.push(part);
        self.host.fetch_and(host.flags(), Ordering::Relaxed);
        self.done.store(done, Ordering::Release);
    }

    /// Returns the CPU's view of the first `len` bytes, or of those that have parts if they are fewer. Takes no lock.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read all parts.
    pub fn cpu(&self, len: u64) -> Result<CpuView<'_>> {
        let len = self.done().min(len);
        let start = self
            .reservation
            .get()
            .map_or(DevicePtr(0), |all| all.start());
        // Later parts may allow less than those that are viewed.
        let have = Access::from_flags(self.host.load(Ordering::Relaxed).into());
        // SAFETY: `done` bytes from the start on are mapped side by side, with at least this access. Parts stay, and their
        // access does not change, until `finish` or `drop`, which need `self` itself. Safe code reaches the bytes through
        // atomic views only.
        unsafe { CpuView::granted(start, len, have.unwrap_or(Access::None)) }
    }

    /// Calls `look` with the mappings so far. A thread that adds a part waits meanwhile.
    pub fn look<T>(&self, look: impl FnOnce(Adjacent<'_, Mapping>) -> T) -> T {
        let pairs = self.pairs.read().unwrap_or_else(PoisonError::into_inner);
        look(Adjacent(&pairs.mappings))
    }

    /// Returns the range.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has no part.
    pub fn finish(self) -> Result<MappedRange> {
        let pairs = self.pairs.into_inner();
        let pairs = pairs.unwrap_or_else(PoisonError::into_inner);
        let Some(first) = pairs.mappings.first() else {
            return Err(Error::invalid("parts", "the list is empty"));
        };
        Ok(MappedRange {
            start: first.reservation().start(),
            padded: self.done.into_inner(),
            host: least(&pairs.mappings),
            pairs,
        })
    }
}
