//! How a growable vector is created, the access to its memory, and its prefixes.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::Backing;
use egmem_core::backing::choose::choose;
use egmem_core::capability::shareable::handle_types_of;

use super::Growable;
use crate::driver::{
    Access, AccessDesc, DevicePtr, Driver, HandleTypes, Location, NodeId, setters,
};
use crate::ledger::{Label, Site};
use crate::memory::{CpuMemory, CpuView, access_checks, check_range, impl_memory};
use crate::size::PaddedSize;
use crate::topology::Topology;
use crate::vmm::{Adjacent, Mapped, MappedPart, Reservation};
use crate::{Error, Placement, Result};

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
    setters! {
        /// Sets the most elements that the vector can ever have: at least 1. Their addresses are reserved at once,
        /// which takes no memory. By default as many as the location's memory can hold.
        max_len(elements: usize) => max_len = Some(elements);
        /// Sets how many bytes the vector grows by at least; they are rounded up to the granularity. By default an
        /// eighth of its mapped bytes, at least one granule and at most 256 MiB.
        step(bytes: u64) => step = bytes;
        /// Sets whether to ask the driver for more memory than the node has free.
        overcommit(on: bool) => overcommit = on;
        /// Makes the memory shareable as widely as this machine allows: see
        /// [`handle_types_of`](egmem_core::capability::shareable::handle_types_of). By default it is not shareable.
        shareable() => shareable = true;
        /// Sets what the memory is. The default is [`Backing::Driver`]. [Registered](Backing::Registered) memory that is
        /// shareable has no fabric handles. A copy by the driver itself, of addresses alone, fails with INVALID_VALUE if it
        /// reaches over a border of two chunks of it.
        backing(backing: Backing) => backing = backing;
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

/// Implements the interfaces that all memory has, for a type with `chunks`, `driver`, `location` and `bytes()`.
macro_rules! impl_checks {
    ($name:ident) => {
        impl<T> CpuMemory for $name<T> {
            fn cpu(&self) -> Result<CpuView<'_>> {
                $name::cpu(self)
            }
        }

        impl<T> $name<T> {
            pub(super) fn all(&self) -> Adjacent<'_, Arc<MappedPart>> {
                // SAFETY: each chunk is mapped behind those before it, and only the last ones are removed.
                unsafe { Adjacent::new(&self.chunks) }
            }
        }

        // SAFETY:
        // - The chunks answer for themselves. They stay mapped at their addresses while the value lives, and for ever if
        //   it is forgotten; taking access away needs each exclusively. No slices are lent.
        // - They begin at the value's first byte. The last one may be longer than the elements: the length is checked.
        access_checks!(unsafe impl [T] for $name<T>, |this| this.all(), this.bytes());

        impl_memory! {
            [T] for $name<T>, |this| &this.driver, $name::device_ptr(this), this.bytes(), this.location
        }
    };
}

impl_checks!(Growable);
impl_checks!(Prefix);

impl<T> Growable<T> {
    /// Changes the access of locations to all of the memory, present and future. See
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access).
    ///
    /// # Errors
    /// [`Error::StillHeld`] while a [`Prefix`] or an export exists; as `Mapping::set_access`. All chunks have
    /// their access from before then, as memory that is added later, unless the driver refuses that too.
    pub fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        set_all(self.chunks.iter_mut(), access)?;
        for new in access {
            self.access.retain(|old| old.location != new.location);
            self.access.push(*new);
        }
        Ok(())
    }

    /// Changes the access of locations to all chunks that hold some of these elements. Returns the range of elements that
    /// lie in them, at least in part. The options' [`step`](super::GrowableOptions::step) decides how large chunks are. An empty
    /// range changes nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that ends before it begins; [`Error::OutOfRange`] where some have no memory;
    /// otherwise as [`set_access`](Self::set_access).
    pub fn set_access_of(
        &mut self,
        elements: std::ops::Range<usize>,
        access: &[AccessDesc],
    ) -> Result<std::ops::Range<usize>> {
        if elements.end < elements.start {
            let why = format!("elements {elements:?}");
            return Err(Error::invalid_of(
                "range",
                why,
                "an end at or after the start",
            ));
        }
        let element = size_of::<T>() as u64;
        let offset = (elements.start as u64).saturating_mul(element);
        let len = (elements.len() as u64).saturating_mul(element);
        check_range(offset, len, self.mapped)?;
        if len == 0 {
            return Ok(elements);
        }
        let is_touched = |chunk: &&mut Arc<MappedPart>| {
            let range = chunk.mapping().range();
            range.start < offset + len && offset < range.end
        };
        let chunks = set_all(self.chunks.iter_mut().filter(is_touched), access)?;
        Ok(match (chunks.first(), chunks.last()) {
            (Some(first), Some(last)) => {
                let end = last.mapping().range().end.div_ceil(element);
                (first.mapping().range().start / element) as usize..end as usize
            }
            _ => elements.start..elements.start,
        })
    }
}

/// Changes the access to all chunks, and returns them. After an error they have the access that they had before.
///
/// # Errors
/// [`Error::StillHeld`] if one is shared; the driver's.
fn set_all<'a>(
    chunks: impl Iterator<Item = &'a mut Arc<MappedPart>>,
    access: &[AccessDesc],
) -> Result<Vec<&'a mut MappedPart>> {
    let held = || Error::StillHeld {
        name: "a growable vector".into(),
        holders: vec!["a prefix or an export of it".into()],
    };
    let own = chunks.map(|chunk| Arc::get_mut(chunk).ok_or_else(held));
    let mut chunks = own.collect::<Result<Vec<_>>>()?;
    let mut before = Vec::with_capacity(chunks.len());
    for chunk in &chunks {
        let mapping = chunk.mapping();
        let has = |desc: &AccessDesc| {
            let has = mapping.access(desc.location)?;
            Ok(AccessDesc::new(desc.location, has))
        };
        before.push(access.iter().map(has).collect::<Result<Vec<_>>>()?);
    }
    for index in 0..chunks.len() {
        let Err(error) = chunks[index].mapping_mut().set_access(access) else {
            continue;
        };
        // Also that of the refused chunk: CUDA does not document its access after a failed call.
        for (chunk, before) in chunks.iter_mut().zip(&before).take(index + 1) {
            // The first error has the reason.
            let _ = chunk.mapping_mut().set_access(before);
        }
        return Err(error);
    }
    Ok(chunks)
}

/// The elements that a [`Growable`](super::Growable) had when [`prefix`](super::Growable::prefix) was called, at the
/// same addresses.
///
/// It keeps their memory mapped, also after the vector is dropped; clones share it. It is the same memory, not a
/// copy: elements that the vector changes, or truncates and appends again, change here too.
pub struct Prefix<T> {
    pub(super) chunks: Arc<[Arc<MappedPart>]>,
    pub(super) driver: Driver,
    pub(super) location: Location,
    pub(super) start: DevicePtr,
    pub(super) len: usize,
    pub(super) elements: PhantomData<fn() -> T>,
}

impl<T> Clone for Prefix<T> {
    fn clone(&self) -> Self {
        Self {
            chunks: Arc::clone(&self.chunks),
            driver: self.driver.clone(),
            ..*self
        }
    }
}

impl<T> Prefix<T> {
    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first element.
    pub const fn device_ptr(&self) -> DevicePtr {
        self.start
    }

    /// Returns the CPU's view of the elements.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible) unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        // SAFETY: the chunks are the vector's first ones, and this keeps them; the access of a chunk that is shared
        // does not change.
        unsafe { self.all().cpu(self.start, 0, self.bytes()) }
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.len as u64 * size_of::<T>() as u64
    }
}

impl<T: AnyBitPattern + NoUninit> Prefix<T> {
    /// Returns the element at `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), [`Error::NotAccessible`](crate::Error::NotAccessible).
    pub fn get(&self, index: usize) -> Result<T> {
        let element = size_of::<T>() as u64;
        let offset = (index as u64).saturating_mul(element);
        check_range(offset, element, self.bytes())?;
        // SAFETY: as in `cpu`; the range is inside the elements.
        unsafe { self.all().cpu(self.start, offset, element)? }.get(0)
    }
}

impl<T> fmt::Debug for Prefix<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefix")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
