//! One version of the data, in every copy, and a reader's hold on it in the copy near to it.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64, fence};
use std::sync::{Arc, Mutex};

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::per_driver::lock;
use egmem_core::teardown::{log_lost, wait_for_all_gpus};

use crate::driver::{Access, DevicePtr, Driver, Location, Relaxed as RelaxedCaptures};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory, check_range, impl_memory};
use crate::{Buffer, Error, Event, Result, Stream};

/// Events of this many uses are kept before those that have passed are looked for.
const MANY: usize = 16;

/// A buffer in each place, and its readers: replicas have clones of its `Arc`, GPU work that outlives its replica an
/// event.
#[derive(Debug)]
pub(super) struct Version<B = Arc<Buffer>> {
    pub(super) buffers: Vec<B>,
    driver: Driver,
    /// Changes while there are no readers.
    pub(super) epoch: AtomicU64,
    /// Behind GPU work that may still read.
    pending: Mutex<Vec<Event>>,
    /// A copy into it may still run, as far as the driver says: it is not used again.
    pub(super) is_lost: AtomicBool,
}

impl<B> Version<B> {
    pub(super) fn new(driver: &Driver, buffers: Vec<B>) -> Self {
        Self {
            buffers,
            driver: driver.clone(),
            epoch: AtomicU64::new(0),
            pending: Mutex::default(),
            is_lost: AtomicBool::new(false),
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    /// Fails if a copy into it may still run, as far as the driver says: it is never written again.
    pub(super) fn expect_not_lost(&self) -> Result<()> {
        match self.is_lost.load(Relaxed) {
            true => Err(Self::still_held(vec![
                "a copy whose end the driver does not tell: create the data anew".into(),
            ])),
            false => Ok(()),
        }
    }

    /// Counts everything submitted to `stream` so far as reading this version until it has run.
    pub(super) fn read_by(&self, stream: &Stream) -> Result<()> {
        stream.expect_no_capture()?;
        let event = Event::new(&self.driver, stream.device(), false)?;
        event.record(stream)?;
        let mut pending = lock(&self.pending);
        if pending.len() >= MANY {
            // One that cannot be asked is kept, and asked again.
            let _captures = RelaxedCaptures::new(&self.driver);
            pending.retain(|event| event.is_done() != Ok(true));
        }
        pending.push(event);
        Ok(())
    }

    /// Returns the readers of this version, which `local` no longer returns. If there are none, it can be written.
    pub(super) fn holders(self: &Arc<Self>) -> Result<Vec<String>> {
        let mut holders = Vec::new();
        let replicas = Arc::strong_count(self) - 1;
        // Orders the readers' accesses before they dropped their replicas, and the events that they left, before all
        // that follows.
        fence(Acquire);
        if replicas > 0 {
            holders.push(format!("replicas of epoch {}: {replicas}", self.epoch()));
        }
        let pending = self.pending_work()?;
        if pending > 0 {
            holders.push(format!("GPU work on epoch {}: {pending}", self.epoch()));
        }
        Ok(holders)
    }

    /// Returns how many uses by GPU work, of those that outlive their replicas, have not passed. A lost GPU reads nothing any
    /// more, but where there are others, its stream may have waited for theirs, which goes on.
    pub(super) fn pending_work(&self) -> Result<usize> {
        let mut pending = lock(&self.pending);
        if pending.is_empty() {
            return Ok(0);
        }
        let _captures = RelaxedCaptures::new(&self.driver);
        let mut index = 0;
        while let Some(event) = pending.get(index) {
            let is_over = match event.is_done() {
                Err(Error::ContextLost { .. }) => self.driver.device_count()? == 1,
                done => done?,
            };
            if is_over {
                drop(pending.swap_remove(index));
            } else {
                index += 1;
            }
        }
        Ok(pending.len())
    }

    pub(super) fn still_held(holders: Vec<String>) -> Error {
        Error::StillHeld {
            name: "the copies for the next version".into(),
            holders,
        }
    }
}

/// A version that replicas read.
pub(super) trait Source: Debug + Send + Sync {
    /// Returns its number.
    fn epoch(&self) -> u64;
    /// Returns the copy in a place.
    fn copy(&self, place: usize) -> &dyn Copy;
    /// Counts everything submitted to `stream` so far as reading it until it has run.
    fn read_by(&self, stream: &Stream) -> Result<()>;
}

/// Memory that a copy is.
pub(super) trait Copy: Memory + CpuMemory {}
impl<M: Memory + CpuMemory> Copy for M {}

impl Source for Version {
    fn epoch(&self) -> u64 {
        Self::epoch(self)
    }
    fn copy(&self, place: usize) -> &dyn Copy {
        &*self.buffers[place]
    }
    fn read_by(&self, stream: &Stream) -> Result<()> {
        Self::read_by(self, stream)
    }
}

impl<B> Version<B> {
    /// Waits for GPU work that reads it. Where the driver does not say that the work has ended, the memory is not
    /// unmapped. Returns whether that is so.
    pub(super) fn end(&mut self) -> bool {
        let pending = std::mem::take(
            self.pending
                .get_mut()
                .unwrap_or_else(|lost| lost.into_inner()),
        );
        if pending.is_empty() || !self.driver.is_of_this_process() {
            return false;
        }
        let _captures = RelaxedCaptures::new(&self.driver);
        let ended = pending.iter().try_fold(false, |is_lost, event| {
            // A refusal that may pass is tried once more.
            match event.synchronize().or_else(|_| event.synchronize()) {
                Ok(()) => Ok(is_lost),
                Err(Error::ContextLost { .. }) => Ok(true),
                Err(error) => Err(error),
            }
        });
        let ended = match ended {
            Ok(false) => return false,
            Ok(true) => wait_for_all_gpus(&self.driver),
            Err(error) => Err(error),
        };
        let is_leaked = ended.is_err();
        if is_leaked {
            std::mem::forget(std::mem::take(&mut self.buffers));
            log_lost("copies that GPU work may still read", ended);
        }
        is_leaked
    }
}

impl<B> Drop for Version<B> {
    fn drop(&mut self) {
        self.end();
    }
}

/// A copy of one version of the data, whose bytes do not change while this lives.
///
/// It is memory that can be read: in kernels by its address, in [`Stream::copy`] and tickets, and, on a host node, by the CPU.
/// Safe calls refuse to write it.
///
/// # GPU work
/// Work that reads the address must have been submitted while this lives, and this must live until the work has run: a
/// ticket ([`Stream::start_copy`]) owns it that long, and [`release_after`](Self::release_after) keeps the version for
/// the work of a stream without waiting. Otherwise the next but one version may overwrite the memory
/// that the work reads.
pub struct Replica<T> {
    version: Arc<dyn Source>,
    place: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T> Clone for Replica<T> {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.version), self.place)
    }
}

impl<T> Replica<T> {
    pub(super) const fn new(version: Arc<dyn Source>, place: usize) -> Self {
        Self {
            version,
            place,
            elements: PhantomData,
        }
    }

    fn buffer(&self) -> &dyn Copy {
        self.version.copy(self.place)
    }

    /// Returns the version's number: 1 is the first.
    pub fn epoch(&self) -> u64 {
        self.version.epoch()
    }

    /// Returns the number of elements: at least 1.
    pub fn len(&self) -> usize {
        self.buffer().len() as usize / size_of::<T>()
    }

    /// Returns `false`: there is at least one element.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the address of the first element.
    pub fn device_ptr(&self) -> DevicePtr {
        self.buffer().device_ptr()
    }

    /// Returns the copy's location.
    pub fn location(&self) -> Location {
        self.buffer().location()
    }

    /// Returns the CPU's view of the elements, which can only read.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] for a copy in a GPU's memory.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        let view = self.buffer().cpu()?;
        // SAFETY: the bytes are those of a view that borrows the same memory.
        Ok(unsafe { CpuView::new(self.device_ptr(), view.len(), false) })
    }

    /// Drops this once the work submitted to `stream` so far has run, without waiting: the version is kept until then.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream and for one that is being captured; the driver's errors. The
    /// error has the replica.
    pub fn release_after(self, stream: &Stream) -> Result<(), Box<(Self, Error)>> {
        match self.version.read_by(stream) {
            Ok(()) => Ok(()),
            Err(error) => Err(Box::new((self, error))),
        }
    }
}

impl<T: AnyBitPattern + NoUninit> Replica<T> {
    /// Returns the element at `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; otherwise as [`cpu`](Self::cpu).
    pub fn get(&self, index: usize) -> Result<T> {
        let offset = (index as u64).saturating_mul(size_of::<T>() as u64);
        check_range(offset, size_of::<T>() as u64, self.buffer().len())?;
        self.cpu()?.get(offset)
    }
}

impl<T> std::fmt::Debug for Replica<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica")
            .field("epoch", &self.epoch())
            .field("location", &self.location())
            .finish_non_exhaustive()
    }
}

impl<T> CpuMemory for Replica<T> {
    fn cpu(&self) -> Result<CpuView<'_>> {
        Self::cpu(self)
    }
}

// SAFETY: the buffer answers for its range, which is mapped while the version lives, and whose grants never change; the
// answers allow no writing.
unsafe impl<T> AccessChecks for Replica<T> {
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access> {
        let access = self.buffer().gpu_access(gpu, engine, offset, len)?;
        Ok(access.min(Access::Read))
    }

    fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
        self.buffer().may_be_on_host(offset, len)
    }

    fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
        self.buffer().of_one_copy(offset, len)
    }

    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        self.buffer().of_one_mapping(offset, len)
    }

    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        self.may_be_on_host(offset, len)
    }
}

impl_memory! {
    [T] for Replica<T>, |this| this.buffer().driver(), this.buffer().device_ptr(), this.buffer().len(), this.buffer().location()
}
