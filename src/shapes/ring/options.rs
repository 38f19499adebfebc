//! How a ring is created.

use std::marker::PhantomData;
use std::panic::Location as Caller;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use super::memory::RingMemory;
use super::{Consumer, Producer, Ring};
use crate::buffer::RequestedAccess;
use crate::driver::Location;
use crate::explain::name_missing;
use crate::ledger::{AllocPath, Label};
use crate::vmm::PhysicalMemory;
use crate::{Driver, Result};

/// Options for a ring; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct RingOptions<T> {
    location: Location,
    records: Option<usize>,
    access: RequestedAccess,
    label: Option<Label>,
    elements: PhantomData<fn() -> T>,
}

impl<T: AnyBitPattern + NoUninit> Ring<T> {
    /// Returns options for a ring at `location`: a node's id, or any [`Location`].
    ///
    /// A ring that the CPU uses lies on a host node. One between GPUs lies best on the consumer's, which then polls its
    /// own memory.
    pub fn on(location: impl Into<Location>) -> RingOptions<T> {
        RingOptions {
            location: location.into(),
            records: None,
            access: RequestedAccess::default(),
            label: None,
            elements: PhantomData,
        }
    }
}

impl<T: AnyBitPattern + NoUninit> RingOptions<T> {
    /// Sets the most records that the ring holds: at least 1. By default as many as one granule of memory has room for,
    /// which is 2 MiB on every driver measured so far.
    pub const fn records(mut self, records: usize) -> Self {
        self.records = Some(records);
        self
    }

    /// Sets which locations may read and write besides the host; [`Location::Host`] adds the CPU to a ring in a GPU's
    /// memory, where the machine allows that. The default is every GPU that can reach the memory.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.access.set_all(who);
        self
    }

    /// Sets the name of its memory in the [ledger](egmem_core::ledger).
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Creates the ring: one granule for its counters, and a power of two of bytes for its records, mapped twice.
    ///
    /// Source: `cuMemCreate` twice, `cuMemMap` and `cuMemSetAccess` three times.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for records of no size, for room for none, and for more
    /// than any address space has room for; those of [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create),
    /// [`Reservation::map`](crate::vmm::Reservation::map) and
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access). Nothing stays behind then.
    #[track_caller]
    pub fn create(self, driver: &Driver) -> Result<Ring<T>> {
        let access = self.access.grants(driver, self.location);
        let access = access.map_err(|error| name_missing(driver, error, self.location))?;
        let shape = (self.records, size_of::<T>() as u64);
        let options = PhysicalMemory::options(self.location).recorded_as(
            AllocPath::ShapeChunk,
            self.label,
            Caller::caller(),
        );
        let memory = RingMemory::create(driver, (self.location, options), &access, shape)?;
        Ok(Ring {
            producer: Producer::new(Arc::clone(&memory), 0, 0),
            consumer: Consumer::new(memory, 0, 0),
        })
    }
}
