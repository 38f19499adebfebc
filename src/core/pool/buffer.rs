//! One allocation of a pool.

use std::panic::Location as Caller;
use std::sync::Arc;

use super::handle::{Inner, Pool};
use crate::driver::{Access, DevicePtr, Location, StreamHandle};
use crate::explain::explain_pool;
use crate::guard::check_free;
use crate::ledger::{AllocPath, Entry, Label, NewEntry, Party};
use crate::memory::{
    AccessChecks, CpuView, Engine, GrantUse, Memory, impl_cpu_memory, impl_memory,
};
use crate::size::not_empty;
use crate::stream::{Event, Stream, is_capturing};
use crate::teardown::{give_back, log_lost};
use crate::{Error, Result};

/// Memory of a pool, freed in the order of a stream.
///
/// It belongs to the stream it was allocated on. Another stream may use it after [`use_on`](Self::use_on),
/// which orders that stream after the allocation and the free after that stream. Dropping it frees it on its
/// own stream, after the work of all streams that used it.
#[derive(Debug)]
pub struct PoolBuffer {
    pool: Arc<Inner>,
    start: DevicePtr,
    len: u64,
    stream: Stream,
    users: Vec<Stream>,
    entry: Entry,
    freed: bool,
}

impl Pool {
    /// Allocates `bytes`, usable by work submitted to `stream` from now on.
    ///
    /// Source: `cuMemAllocFromPoolAsync`, `cudaMallocFromPoolAsync`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes or another driver's stream; [`Error::NodeTooFull`];
    /// [`Error::OutOfMemory`], also beyond the pool's largest size.
    #[track_caller]
    pub fn allocate(&self, bytes: u64, stream: &Stream) -> Result<PoolBuffer> {
        self.0.driver.expect_same(stream.driver(), "stream")?;
        not_empty(bytes)?;
        if !self.0.overcommit {
            check_free(&self.0.driver, self.0.props.location, bytes, || self.idle())?;
        }
        let calls = self.0.calls()?;
        // SAFETY: `self` and `stream` keep their handles alive.
        let start = unsafe { calls.alloc_from_pool_async(self.0.handle, bytes, stream.handle()) }
            .map_err(|error| explain_pool(&self.0.driver, error, &self.0.props, bytes))?;
        Ok(PoolBuffer::new(Arc::clone(&self.0), start, bytes, stream))
    }
}

impl PoolBuffer {
    #[track_caller]
    pub(super) fn new(pool: Arc<Inner>, start: DevicePtr, len: u64, stream: &Stream) -> Self {
        let new = NewEntry {
            driver: &pool.driver,
            bytes: len,
            location: pool.props.location,
            path: AllocPath::Pool,
            label: pool.label.clone(),
            site: Some(Caller::caller()),
        };
        Self {
            entry: Entry::mapped(new, start, Arc::clone(&pool.grants)),
            pool,
            start,
            len,
            stream: stream.clone(),
            users: Vec::new(),
            freed: false,
        }
    }

    /// Sets the memory's name in the [ledger](crate::ledger); by default its pool's.
    pub fn labelled(self, label: impl Into<Label>) -> Self {
        self.entry.set_label(label.into());
        self
    }

    /// Notes in the [ledger](crate::ledger) a process that may import it.
    pub fn sent_to(&self, party: Party) {
        self.entry.exported(None);
        self.entry.sent_to(party);
    }

    /// Lets work submitted to `stream` from now on use the memory.
    ///
    /// # Errors
    /// The driver's errors, and [`Error::InvalidArgument`] for another driver's stream.
    pub fn use_on(&mut self, stream: &Stream) -> Result<()> {
        self.pool.driver.expect_same(stream.driver(), "stream")?;
        if self.is_user(stream) {
            return Ok(());
        }
        stream.wait_for(&self.stream)?;
        self.users.push(stream.clone());
        Ok(())
    }

    /// Frees the memory after all work submitted so far to `stream` and to every stream that used it.
    ///
    /// Source: `cuMemFreeAsync`, `cudaFreeAsync`.
    ///
    /// # Errors
    /// The driver's errors, after a second try if that is possible. [`Error::InvalidArgument`] for another
    /// driver's stream: the memory is then freed on its own.
    pub fn free_on(mut self, stream: &Stream) -> Result<()> {
        self.pool.driver.expect_same(stream.driver(), "stream")?;
        self.freed = true;
        self.free(stream)
    }

    /// Returns the CPU's view of the bytes, after the work of every stream that uses them.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] if the CPU cannot reach the pool's memory, and the error of earlier work on
    /// the streams.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        if !self.pool.props.location.is_host() {
            let (have, need) = (Access::None, Access::ReadWrite);
            return Err(Error::not_accessible(Location::Host, have, need));
        }
        for stream in std::iter::once(&self.stream).chain(&self.users) {
            stream.synchronize()?;
        }
        // SAFETY: the allocation has happened and lasts until `self` is freed, in units
        // larger than a word; a host pool is readable and writable by the CPU; safe code reaches it
        // through atomic views only.
        Ok(unsafe { CpuView::new(self.start, self.len, true) })
    }

    /// Returns the pool that it was allocated from.
    pub fn pool(&self) -> Pool {
        Pool(Arc::clone(&self.pool))
    }

    /// Returns the stream that the memory was allocated on.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    fn is_user(&self, stream: &Stream) -> bool {
        std::iter::once(&self.stream)
            .chain(&self.users)
            .any(|user| user.handle() == stream.handle())
    }

    /// Frees the memory; called at most once, because the address may be reused afterwards.
    fn free(&self, stream: &Stream) -> Result<()> {
        let mut ordered = Ok(());
        for user in std::iter::once(&self.stream).chain(&self.users) {
            // If an event cannot order a stream, waiting for it does.
            let result = stream.wait_for(user).or_else(|_| user.synchronize());
            ordered = ordered.and(result);
        }
        let mut freed = Ok(());
        self.entry.give_back(&self.pool.driver, || {
            freed = give_back(&self.pool.driver, "a pool's memory", || {
                // SAFETY: owned by `self`, which is being dropped; the free comes after all known work.
                unsafe { self.pool.calls()?.free_async(self.start, stream.handle()) }
            });
            freed.is_err()
        });
        freed.and(ordered)
    }
}

impl_cpu_memory!(PoolBuffer);

// SAFETY: the pool's grants answer, and it is freed when this is dropped.
unsafe impl AccessChecks for PoolBuffer {
    fn gpu_access(&self, gpu: i32, _: Engine, _: u64, _: u64) -> Result<Access> {
        self.pool().access(Location::Device(gpu))
    }

    fn may_be_on_host(&self, _: u64, _: u64) -> bool {
        self.location().is_host()
    }

    fn of_one_mapping(&self, _offset: u64, len: u64) -> Option<u64> {
        Some(len)
    }

    fn hold_grants(&self) -> Option<GrantUse> {
        Some(self.pool.uses.begin())
    }

    unsafe fn ready_on(&self, stream: StreamHandle) -> Result<()> {
        if stream == self.stream.handle() {
            return Ok(());
        }
        // An event of a captured stream would make `stream` part of the capture.
        // SAFETY: the stream is live by the caller's word.
        if self.stream.is_capturing()? && !unsafe { is_capturing(&self.pool.driver, stream)? } {
            let why = "the stream that it was allocated on is being captured into a graph, so work on another stream \
                       cannot wait for the allocation: end the capture first, or use that stream";
            return Err(Error::invalid("pool memory", why));
        }
        let allocated = Event::new(&self.pool.driver, self.stream.device(), false)?;
        allocated.record(&self.stream)?;
        // SAFETY: the caller promises that the stream is live; the event is owned here.
        unsafe {
            self.pool
                .driver
                .stream_wait_event(stream, allocated.handle())
        }
    }
}

impl_memory! { for PoolBuffer, |this| &this.pool.driver, this.start, this.len, this.pool.props.location }

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        // A forked child frees nothing.
        if !self.freed && self.pool.driver.is_of_this_process() {
            log_lost("pool memory", self.free(&self.stream));
        }
    }
}
