//! How a ring is created.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use super::memory::RingMemory;
use super::{Consumer, Producer, Ring};
use crate::driver::Location;
use crate::ledger::{Label, Site};
use crate::placement::{Placement, placement_setters};
use crate::{Driver, Result};

/// Options for a ring; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct RingOptions<T> {
    placement: Placement,
    records: Option<usize>,
    elements: PhantomData<fn() -> T>,
}

impl<T: AnyBitPattern + NoUninit> Ring<T> {
    /// Returns options for a ring at `location`: a node's id, or any [`Location`].
    ///
    /// A ring that the CPU uses lies on a host node. One between GPUs lies best on the consumer's, which then polls its
    /// own memory.
    pub fn on(location: impl Into<Location>) -> RingOptions<T> {
        RingOptions {
            placement: Placement::at(location.into()),
            records: None,
            elements: PhantomData,
        }
    }
}

impl<T: AnyBitPattern + NoUninit> RingOptions<T> {
    /// Sets the most records that the ring holds: at least 1. All records together have at most 2 GiB. By default as many
    /// as one granule of memory has room for, which is 2 MiB on every driver measured so far.
    pub const fn records(mut self, records: usize) -> Self {
        self.records = Some(records);
        self
    }

    placement_setters!();

    /// Creates the ring: one granule for its counters, and a power of two of bytes for its records, mapped twice.
    ///
    /// Source: `cuMemCreate` twice, `cuMemMap` and `cuMemSetAccess` three times.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for records of 0 bytes, for room for none, and for records
    /// of more than 2 GiB, alone or together; those of [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create),
    /// [`Reservation::map`](crate::vmm::Reservation::map) and
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access). Nothing stays behind then.
    #[track_caller]
    pub fn create(self, driver: &Driver) -> Result<Ring<T>> {
        let access = self.placement.grants(driver)?;
        let shape = (self.records, size_of::<T>() as u64);
        let options = self.placement.memory(Site::here());
        let memory = (self.placement.location, options);
        let memory = RingMemory::create(driver, memory, &access, shape)?;
        Ok(Ring {
            producer: Producer::new(Arc::clone(&memory), 0, 0),
            consumer: Consumer::new(memory, 0, 0),
        })
    }
}
