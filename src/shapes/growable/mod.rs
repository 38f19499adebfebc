//! Vectors that grow in place.

mod memory;

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::driver::{AccessDesc, DevicePtr, Location};
use crate::guard::{WORTH_ASKING, check_free_now};
use crate::memory::{CpuView, check_range};
use crate::size::Granularity;
use crate::vmm::{Mapped, MappedPart, PhysicalOptions, Reservation};
use crate::{Driver, Error, Growth, Result};

pub use memory::{GrowableOptions, Prefix};

/// A vector of `T` whose address never changes, for the CPU and the GPUs.
///
/// Its addresses are reserved once. Physical memory is added behind the elements as they come, and given back from
/// the end, so no element is ever copied, and a GPU may read the present elements while others are added: through a
/// [`Prefix`], which keeps them mapped.
///
/// The CPU writes whole words of 8 bytes at once, so a GPU that reads elements while others in the same word are
/// added sees either. The message that tells a GPU the count of elements must order the two: a kernel or a copy that
/// is submitted after the elements were written sees them.
///
/// Before it is dropped, GPU work that uses it must have finished: a GPU that accesses unmapped addresses loses its
/// context.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::shapes::Growable;
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let mut tokens = Growable::<u32>::on(NodeId(0)).max_len(1 << 30).create(&driver)?;
/// let start = tokens.device_ptr();
/// tokens.push(7)?;
/// let first = tokens.prefix(); // for a GPU, which reads it while more are added
/// tokens.extend_from_slice(&vec![1; 1 << 20])?;
/// assert_eq!((tokens.len(), tokens.device_ptr()), ((1 << 20) + 1, start));
/// assert_eq!(first.get(0)?, 7);
/// # Ok::<(), egmem::Error>(())
/// ```
pub struct Growable<T> {
    // In the order of addresses and without gaps. Before the reservation: unmapped first.
    chunks: Vec<Arc<MappedPart>>,
    reservation: Arc<Reservation>,
    driver: Driver,
    memory: PhysicalOptions,
    location: Location,
    access: Vec<AccessDesc>,
    granularity: Granularity,
    /// The least bytes to grow by; 0 for the default.
    step: u64,
    overcommit: bool,
    /// The bytes that may be created before the node's free memory is checked again.
    unchecked: u64,
    max_len: usize,
    /// The chunks' bytes.
    mapped: u64,
    len: usize,
    /// Other memory that kernels use along with the elements: dropped last.
    beside: Option<Arc<dyn Any + Send + Sync>>,
    elements: PhantomData<fn() -> T>,
}

impl<T: AnyBitPattern + NoUninit> Growable<T> {
    const ELEMENT: u64 = size_of::<T>() as u64;

    /// Appends one element.
    ///
    /// # Errors
    /// Those of [`reserve`](Self::reserve), and [`Error::NotAccessible`] unless the CPU may write there. The elements
    /// are unchanged then; memory may have been added.
    pub fn push(&mut self, element: T) -> Result<()> {
        self.extend_from_slice(&[element])
    }

    /// Appends copies of `elements`.
    ///
    /// # Errors
    /// As [`push`](Self::push): none of them is appended then.
    pub fn extend_from_slice(&mut self, elements: &[T]) -> Result<()> {
        self.reserve(elements.len())?;
        let place = (self.bytes(), size_of_val(elements) as u64);
        self.view(place)?.write_at(0, elements)?;
        self.len += elements.len();
        Ok(())
    }

    /// Appends `additional` elements that others will write: a GPU, or the CPU through [`cpu`](Self::cpu). Their
    /// bytes are the memory's: zero where it is new, former elements after [`truncate`](Self::truncate).
    ///
    /// # Errors
    /// Those of [`reserve`](Self::reserve).
    pub fn extend_unwritten(&mut self, additional: usize) -> Result<()> {
        self.reserve(additional)?;
        self.len += additional;
        Ok(())
    }

    /// Adds memory until `additional` more elements have room. Nothing is copied, and no address changes.
    ///
    /// Source: `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`: once each for at most [`Growth::MAX_CHUNK`] bytes, and for fewer bytes
    /// again where the first try found no room.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] beyond [`max_len`](Self::max_len); those of
    /// [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create) and
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access). The elements are unchanged then. The added memory is
    /// given back. A chunk that the driver refuses to unmap stays for later elements; if it has refused the chunk's
    /// access before, the vector cannot grow beyond that chunk's address.
    pub fn reserve(&mut self, additional: usize) -> Result<()> {
        let end = self.len.checked_add(additional);
        let Some(end) = end.filter(|&end| end <= self.max_len) else {
            return Err(Error::OutOfRange {
                offset: self.bytes(),
                len: (additional as u64).saturating_mul(Self::ELEMENT),
                size: self.max_len as u64 * Self::ELEMENT,
            });
        };
        let end = end as u64 * Self::ELEMENT;
        match end > self.mapped {
            true => self.grow(end - self.mapped),
            false => Ok(()),
        }
    }

    /// Maps at least `need` bytes more.
    fn grow(&mut self, need: u64) -> Result<()> {
        self.driver.expect_this_process("growable memory")?;
        let need = need.next_multiple_of(self.granularity.bytes());
        let room = self.reservation.size() - self.mapped;
        let bytes = growth((self.mapped, need, room), self.step, self.granularity);
        let end = self.mapped + need;
        match self.map(bytes) {
            // The smaller size that is needed may still fit.
            Err(error) if bytes > need => {
                let need = end.saturating_sub(self.mapped);
                self.map(need).map_err(|_| error)
            }
            mapped => mapped,
        }
    }

    /// Maps `bytes` more. After an error it removes the chunks that it added.
    fn map(&mut self, bytes: u64) -> Result<()> {
        self.unchecked = self.check_room(bytes)?;
        let before = self.chunks.len();
        let added = self.add_chunks(self.mapped + bytes);
        if added.is_err() {
            self.unchecked = 0;
            self.remove_behind(before);
        }
        added
    }

    /// Removes the chunks behind the first `kept`, up to one that the driver does not unmap.
    fn remove_behind(&mut self, kept: usize) {
        while self.chunks.len() > kept {
            let chunks = self.chunks.len();
            // The caller has an error already.
            let _ = self.remove_last();
            if self.chunks.len() == chunks {
                break;
            }
        }
    }

    /// Adds chunks of the largest size, and a smaller last one, until `end` bytes are mapped.
    fn add_chunks(&mut self, end: u64) -> Result<()> {
        let most = Growth::chunk_in(self.granularity, Growth::MAX_CHUNK);
        while self.mapped < end {
            let bytes = most.min(end - self.mapped);
            let memory = self.memory.clone().create(&self.driver, bytes)?;
            let chunk = MappedPart::map(&self.reservation, self.mapped, memory, &self.access)?;
            self.mapped += bytes;
            self.chunks.push(Arc::new(chunk));
        }
        Ok(())
    }

    /// Returns how many more bytes may be created after `bytes` before the node is asked for its free memory again: small
    /// chunks add up.
    fn check_room(&self, bytes: u64) -> Result<u64> {
        Ok(match self.unchecked {
            _ if self.overcommit => WORTH_ASKING,
            known if bytes <= known => known - bytes,
            _ => {
                let free = check_free_now(&self.driver, self.location, bytes, || 0)?;
                // The less is free, the more often it is checked.
                let left = free.map_or(WORTH_ASKING, |free| WORTH_ASKING.min(free / 2));
                left.saturating_sub(bytes)
            }
        })
    }

    /// Removes all elements behind the first `len`. Their memory stays: see [`shrink_to_fit`](Self::shrink_to_fit).
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Gives the memory behind the last element back, in the chunks that it came in. Returns the bytes given back.
    /// Chunks that a [`Prefix`] keeps, and those before them, stay.
    ///
    /// GPU work that uses the addresses behind the last element must have finished.
    ///
    /// # Errors
    /// The driver's error; chunks that could not be given back stay.
    pub fn shrink_to_fit(&mut self) -> Result<u64> {
        let before = self.mapped;
        while let Some(last) = self.chunks.last() {
            let bytes = last.mapping().size().padded();
            if self.mapped - bytes < self.bytes() || !self.remove_last()? {
                break;
            }
        }
        Ok(before - self.mapped)
    }

    /// Unmaps and releases the last chunk. Returns `false` if there is none, or a [`Prefix`] keeps it.
    ///
    /// # Errors
    /// The driver's error. A chunk that it does not unmap stays.
    fn remove_last(&mut self) -> Result<bool> {
        let Some(last) = self.chunks.pop() else {
            return Ok(false);
        };
        let bytes = last.mapping().size().padded();
        let chunk = match Arc::try_unwrap(last) {
            Ok(chunk) => chunk,
            Err(shared) => {
                self.chunks.push(shared);
                return Ok(false);
            }
        };
        match chunk.unmap() {
            Ok(memory) => {
                self.mapped -= bytes;
                memory.release()?;
                Ok(true)
            }
            Err(refused) => {
                let (chunk, error) = *refused;
                self.chunks.push(Arc::new(chunk));
                Err(error)
            }
        }
    }

    /// Returns the element at `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::NotAccessible`].
    pub fn get(&self, index: usize) -> Result<T> {
        self.element(index)?.get(0)
    }

    /// Replaces the element at `index`.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn set(&mut self, index: usize, element: T) -> Result<()> {
        self.element(index)?.put(0, element)
    }

    fn element(&self, index: usize) -> Result<CpuView<'_>> {
        let offset = (index as u64).saturating_mul(Self::ELEMENT);
        check_range(offset, Self::ELEMENT, self.bytes())?;
        self.view((offset, Self::ELEMENT))
    }

    /// Returns the present elements, kept mapped for a GPU or another thread while this vector grows.
    pub fn prefix(&self) -> Prefix<T> {
        Prefix {
            chunks: self.all().holding(0, self.bytes()).into(),
            driver: self.driver.clone(),
            location: self.location,
            start: self.device_ptr(),
            len: self.len,
            elements: PhantomData,
        }
    }
}

impl<T> Growable<T> {
    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the most elements that it can ever have.
    pub const fn max_len(&self) -> usize {
        self.max_len
    }

    /// Returns the number of elements that have memory, at most [`max_len`](Self::max_len).
    pub fn capacity(&self) -> usize {
        let elements = (self.mapped / size_of::<T>() as u64) as usize;
        elements.min(self.max_len)
    }

    /// Returns the bytes of memory that it has.
    pub const fn mapped_bytes(&self) -> u64 {
        self.mapped
    }

    /// Returns the number of pieces of physical memory: each took three calls of the driver.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Returns the address of the first element, which never changes.
    pub fn device_ptr(&self) -> DevicePtr {
        self.reservation.start()
    }

    /// Keeps `beside` for as long as this vector.
    pub(crate) fn keep(&mut self, beside: Arc<dyn Any + Send + Sync>) {
        self.beside = Some(beside);
    }

    /// Returns the chunks, which stay mapped while the result has them.
    pub(crate) fn chunk_list(&self) -> Vec<Arc<MappedPart>> {
        self.chunks.clone()
    }

    fn bytes(&self) -> u64 {
        self.len as u64 * size_of::<T>() as u64
    }

    /// Returns the CPU's view of the elements.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        self.view((0, self.bytes()))
    }

    /// Returns the CPU's view of bytes that have memory: from an offset on, so many.
    fn view(&self, (offset, bytes): (u64, u64)) -> Result<CpuView<'_>> {
        // SAFETY: the chunks are adjacent from the reservation's start on, have these bytes, and are mapped with this
        // host access until one is removed or its access changes, which needs `self` exclusively. Safe code reaches
        // the bytes through atomic views only.
        unsafe { self.all().cpu(self.device_ptr(), offset, bytes) }
    }
}

impl<T> fmt::Debug for Growable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Growable")
            .field("location", &self.location)
            .field("start", &self.device_ptr())
            .field("len", &self.len)
            .field("max_len", &self.max_len)
            .field("mapped_bytes", &self.mapped)
            .finish_non_exhaustive()
    }
}

/// The most that a vector grows by at a time without being asked for more, in bytes.
const LARGEST_STEP: u64 = 256 << 20;

/// Returns how many bytes the vector that has `mapped` bytes should grow by if it needs `need` more and has addresses
/// for `room`: a multiple of the granularity. `need` and `room` are such multiples, and `need` is at most `room`.
fn growth((mapped, need, room): (u64, u64, u64), step: u64, granularity: Granularity) -> u64 {
    let step = match step {
        0 => (mapped / 8).min(LARGEST_STEP),
        step => step,
    };
    let units = step.div_ceil(granularity.bytes()).max(1);
    units.saturating_mul(granularity.bytes()).clamp(need, room)
}

#[cfg(test)]
mod tests;
