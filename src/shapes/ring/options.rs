//! How a ring is created.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::Backing;
use egmem_core::capability::shareable::handle_types_of;

use super::memory::RingMemory;
use super::{Consumer, Producer, Ring, Untyped};
use crate::driver::{HandleTypes, Location};
use crate::ledger::{Label, Site};
use crate::placement::Placement;
use crate::{Driver, Result};

/// Options for a ring; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct RingOptions<T> {
    placement: Placement,
    /// The size of a record in bytes.
    record: u64,
    records: Option<usize>,
    shareable: bool,
    elements: PhantomData<fn() -> T>,
}

impl<T: AnyBitPattern + NoUninit> Ring<T> {
    /// Returns options for a ring at `location`: a node's id, or any [`Location`].
    ///
    /// A ring that the CPU uses lies on a host node. One between GPUs lies best on the consumer's, which then polls its
    /// own memory.
    pub fn on(location: impl Into<Location>) -> RingOptions<T> {
        RingOptions::new(location.into(), size_of::<T>() as u64)
    }
}

impl Ring<Untyped> {
    /// Returns options for a ring at `location` with records of `bytes` bytes, which the program reads and writes by their
    /// addresses.
    pub fn untyped(location: impl Into<Location>, bytes: u64) -> RingOptions<Untyped> {
        RingOptions::new(location.into(), bytes)
    }
}

impl<T> RingOptions<T> {
    fn new(location: Location, record: u64) -> Self {
        Self {
            placement: Placement::at(location),
            record,
            records: None,
            shareable: false,
            elements: PhantomData,
        }
    }

    /// Sets the most records that the ring holds: at least 1. All records together have at most 2 GiB. By default as many
    /// as one granule of memory has room for, which is 2 MiB on every driver measured so far.
    pub const fn records(mut self, records: usize) -> Self {
        self.records = Some(records);
        self
    }

    /// Sets which locations may read and write besides the host; [`Location::Host`] adds the CPU to memory of a GPU,
    /// where the machine allows that. The default is every GPU that can reach the memory.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.placement.access.set_all(who);
        self
    }

    /// Sets the name of its memory in the [ledger](egmem_core::ledger).
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.placement.label = Some(label.into());
        self
    }

    /// Makes the ring shareable, so that a process can hand one side to another process: see `shapes::sharing`. By default
    /// it is not. It takes one granule more in each process, for what kernels must trust.
    pub const fn shareable(mut self) -> Self {
        self.shareable = true;
        self
    }

    /// Creates the ring: one granule for its counters, and a power of two of bytes for its records, mapped twice.
    ///
    /// Source: `cuMemCreate` twice, `cuMemMap` and `cuMemSetAccess` three times; each once more for a shareable ring.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for records of 0 bytes, for room for none, and for records
    /// of more than 2 GiB, alone or together; those of [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create),
    /// [`Reservation::map`](crate::vmm::Reservation::map) and
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access); the reason why it cannot be shareable. Nothing stays behind
    /// then.
    #[track_caller]
    pub fn create(self, driver: &Driver) -> Result<Ring<T>> {
        let access = self.placement.grants(driver)?;
        let handle_types = match self.shareable {
            false => HandleTypes::NONE,
            true => handle_types_of(driver, self.placement.location, Backing::Driver)?.handle_types,
        };
        let memory = (self.placement.memory(Site::here()), handle_types);
        let shape = (self.records, self.record);
        let memory = RingMemory::create(driver, memory, &access, shape)?;
        Ok(Ring {
            producer: Producer::new(Arc::clone(&memory), 0, 0),
            consumer: Consumer::new(memory, 0, 0),
        })
    }
}
