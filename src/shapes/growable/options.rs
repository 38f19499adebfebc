//! How a growable vector is created.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::Backing;
use egmem_core::backing::choose::choose;
use egmem_core::capability::shareable::handle_types_of;

use super::Growable;
use crate::buffer::RequestedAccess;
use crate::driver::{Access, AccessDesc, HandleTypes, Location, NodeId};
use crate::explain::name_missing;
use crate::ledger::{AllocPath, Label, Site};
use crate::size::PaddedSize;
use crate::topology::Topology;
use crate::vmm::{PhysicalMemory, PhysicalOptions, Reservation};
use crate::{Driver, Error, Result};

/// Options for a growable vector; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct GrowableOptions<T> {
    pub(crate) placement: Placement,
    max_len: Option<usize>,
    step: u64,
    overcommit: bool,
    shareable: bool,
    backing: Backing,
    elements: PhantomData<fn() -> T>,
}

impl<T: AnyBitPattern + NoUninit> Growable<T> {
    /// Returns options for a vector at `location`: a node's id, or any [`Location`].
    pub fn on(location: impl Into<Location>) -> GrowableOptions<T> {
        GrowableOptions {
            placement: Placement::at(location.into()),
            max_len: None,
            step: 0,
            overcommit: false,
            shareable: false,
            backing: Backing::Driver,
            elements: PhantomData,
        }
    }
}

impl<T: AnyBitPattern + NoUninit> GrowableOptions<T> {
    /// Sets the most elements that the vector can ever have: at least 1. Their addresses are reserved at once,
    /// which takes no memory. By default as many as the location's memory can hold.
    pub const fn max_len(mut self, elements: usize) -> Self {
        self.max_len = Some(elements);
        self
    }

    /// Sets how many bytes the vector grows by at least; they are rounded up to the granularity. By default an
    /// eighth of its mapped bytes, at least one granule and at most 256 MiB.
    pub const fn step(mut self, bytes: u64) -> Self {
        self.step = bytes;
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

    /// Sets the access of one location; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, who: impl Into<Location>, access: Access) -> Self {
        self.placement.access.set(who.into(), access);
        self
    }

    /// Sets whether to ask the driver for more memory than the node has free.
    pub const fn overcommit(mut self, on: bool) -> Self {
        self.overcommit = on;
        self
    }

    /// Makes the memory shareable as widely as this machine allows: see
    /// [`handle_types_of`](egmem_core::capability::shareable::handle_types_of). By default it is not shareable.
    pub const fn shareable(mut self) -> Self {
        self.shareable = true;
        self
    }

    /// Sets what the memory is. The default is [`Backing::Driver`]. [Registered](Backing::Registered) memory that is
    /// shareable has no fabric handles. A copy by the driver itself, of addresses alone, fails with INVALID_VALUE if it
    /// reaches over a border of two chunks of it.
    pub const fn backing(mut self, backing: Backing) -> Self {
        self.backing = backing;
        self
    }

    /// Reserves the addresses. The vector is empty and has no memory yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for elements of no size, for a length of 0 and for one beyond 64 bits;
    /// [`Error::OutOfAddresses`]; [`Error::NoSuchNode`], [`Error::NoSuchGpu`], or the driver's error; the reason why
    /// it cannot be shareable, or registered.
    #[track_caller]
    pub fn create(self, driver: &Driver) -> Result<Growable<T>> {
        let element = size_of::<T>() as u64;
        if element == 0 {
            let why = "elements of 0 bytes need no memory";
            return Err(Error::invalid("element type", why));
        }
        let location = self.placement.location;
        let memory = self.placement.memory(Site::here());
        let handle_types = match self.shareable {
            false => HandleTypes::NONE,
            true => handle_types_of(driver, location, self.backing)?.handle_types,
        };
        let access = self.placement.grants(driver)?;
        let chosen = choose(driver, self.backing, (location, handle_types), &access)?;
        let backing = chosen.backing;
        let memory = memory
            .overcommit(true) // the vector checks
            .handle_types(handle_types)
            .chosen(chosen);
        let granularity = memory.granularity_of(driver)?;
        let memory = memory.known_granularity(granularity);
        let valid = || format!("1 to {}", i64::MAX as u64 / element);
        if self.max_len == Some(0) {
            let why = "a vector of 0 elements never has one";
            return Err(Error::invalid_of("max_len", why, valid()));
        }
        let max_bytes = match self.max_len {
            Some(elements) => (elements as u64).checked_mul(element).ok_or_else(|| {
                let why = "no addresses can hold that many elements";
                Error::invalid_of("max_len", why, valid())
            })?,
            None => memory_of(driver, location)? / element * element,
        };
        if max_bytes == 0 {
            let why = format!("an element takes {element} bytes, more than {location} has");
            return Err(Error::invalid("element type", why));
        }
        let size = PaddedSize::new(max_bytes, granularity)?;
        let reservation = Reservation::options().backing(backing);
        Ok(Growable {
            chunks: Vec::new(),
            reservation: Arc::new(reservation.reserve(driver, size.padded())?),
            driver: driver.clone(),
            memory,
            location,
            access,
            granularity,
            step: self.step,
            overcommit: self.overcommit,
            unchecked: 0,
            max_len: (max_bytes / element) as usize,
            mapped: 0,
            len: 0,
            beside: None,
            elements: PhantomData,
        })
    }
}

/// Returns the bytes of memory that a location has.
fn memory_of(driver: &Driver, location: Location) -> Result<u64> {
    match location {
        Location::Device(gpu) => driver.device_total_mem(gpu),
        Location::HostNuma(node) => Ok(Topology::of(driver)?.node(NodeId(node))?.memory_total),
        _ => {
            let topology = Topology::of(driver)?;
            Ok(topology.nodes().iter().map(|node| node.memory_total).sum())
        }
    }
}

/// The location of a shape's memory, the access to it, and its name in the ledger.
#[derive(Clone, Debug)]
pub struct Placement {
    pub location: Location,
    pub access: RequestedAccess,
    pub label: Option<Label>,
}

impl Placement {
    pub fn at(location: Location) -> Self {
        Self {
            location,
            access: RequestedAccess::default(),
            label: None,
        }
    }

    /// Returns options for memory of a shape that the call `site` creates.
    pub fn memory(&self, site: Site) -> PhysicalOptions {
        let options = PhysicalMemory::options(self.location);
        options.recorded_as(AllocPath::ShapeChunk, self.label.clone(), site)
    }

    /// Returns the access of all locations to the memory.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`](crate::Error::NoSuchGpu); the driver's, when it is asked which GPUs reach the memory.
    pub fn grants(&self, driver: &Driver) -> Result<Vec<AccessDesc>> {
        let grants = self.access.grants(driver, self.location);
        grants.map_err(|error| name_missing(driver, error, self.location))
    }
}
