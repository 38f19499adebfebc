//! One allocation of a pool.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::Pool;
use crate::driver::{Access, DevicePtr, Driver, Location, PoolCalls, Relaxed, StreamHandle};
use crate::guard::check_free;
use crate::guard::explain_pool;
use crate::ledger::{AllocPath, Entry, Label, NewEntry, Party, Site};
use crate::memory::{
    AccessChecks, CpuView, Engine, GrantUse, Memory, impl_cpu_memory, impl_memory, memory_through,
};
use crate::size::not_empty;
use crate::stream::Stream;
use crate::stream::{after_captures, run_due};
use crate::teardown::{give_back, log_lost};
use crate::{Error, Result};

const POOL_MEMORY: &str = "pool memory";

/// Memory of a pool, freed in the order of a stream.
///
/// It belongs to the stream it was allocated on. Another stream may use it after [`use_on`](Self::use_on),
/// which orders that stream after the allocation and the free after that stream. Dropping it frees it on its
/// own stream, after the work of all streams that used it.
///
/// Memory that is freed while one of these streams is being captured into a CUDA graph is freed after the capture, when a
/// pool of the driver is used next. A graph that uses it must not run after that.
#[derive(Debug)]
pub struct PoolBuffer {
    memory: Arc<Allocation>,
    users: Vec<Stream>,
    freed: bool,
}

/// Memory of a pool of this process or of another. A free that waits for the end of a capture keeps it.
#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) pool: Pool,
    pub(super) start: DevicePtr,
    pub(super) len: u64,
    pub(super) stream: Stream,
    pub(super) entry: Entry,
    /// Whether another process allocated it.
    is_imported: bool,
}

impl Pool {
    /// Allocates `bytes`, usable by work submitted to `stream` from now on.
    ///
    /// Source: `cuMemAllocFromPoolAsync`, `cudaMallocFromPoolAsync`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes, for another driver's stream, and for one that is being captured into a graph,
    /// whose memory the allocation would be; [`Error::NodeTooFull`], [`Error::NodesTooFull`]; [`Error::OutOfMemory`], also beyond the pool's largest
    /// size.
    #[track_caller]
    pub fn allocate(&self, bytes: u64, stream: &Stream) -> Result<PoolBuffer> {
        self.allocate_by(bytes, stream, |calls| {
            // SAFETY: `self` and `stream` keep their handles alive.
            unsafe { calls.alloc_from_pool_async(self.handle(), bytes, stream.handle()) }
        })
    }

    /// Allocates by `call`, which takes memory of this pool.
    #[track_caller]
    pub(super) fn allocate_by(
        &self,
        bytes: u64,
        stream: &Stream,
        call: impl FnOnce(&dyn PoolCalls) -> Result<DevicePtr>,
    ) -> Result<PoolBuffer> {
        let (driver, props) = (self.driver(), self.props());
        driver.expect_same(stream.driver(), "stream")?;
        not_empty(bytes)?;
        stream.expect_no_capture()?;
        run_due(driver);
        if !self.0.overcommit {
            check_free(driver, props.location, bytes, || self.idle())?;
        }
        let _relaxed = Relaxed::new(driver);
        let start = call(self.calls()?);
        let start = start.map_err(|error| explain_pool(driver, error, props, bytes))?;
        let (range, site) = ((start, bytes), Site::here());
        let memory = Allocation::new(self, AllocPath::Pool, range, stream, site);
        Ok(PoolBuffer {
            memory: Arc::new(memory),
            users: Vec::new(),
            freed: false,
        })
    }
}

impl PoolBuffer {
    /// Sets the memory's name in the [ledger](crate::ledger); by default its pool's.
    pub fn labelled(self, label: impl Into<Label>) -> Self {
        self.memory.entry.set_label(label.into());
        self
    }

    /// Notes in the [ledger](crate::ledger) a process that may import it.
    pub fn sent_to(&self, party: Party) {
        self.memory.entry.exported(None);
        self.memory.entry.sent_to(party);
    }

    /// Lets work submitted to `stream` from now on use the memory.
    ///
    /// # Errors
    /// The driver's errors. [`Error::InvalidArgument`] for another driver's stream, and while the memory's stream is being
    /// captured into a graph and `stream` is not. If only `stream` is, the call waits for the memory's stream.
    pub fn use_on(&mut self, stream: &Stream) -> Result<()> {
        self.driver().expect_same(stream.driver(), "stream")?;
        if self.is_user(stream) {
            return Ok(());
        }
        // SAFETY: `stream` keeps its handle alive; the driver is the same.
        unsafe { self.stream().order_use(stream.handle(), POOL_MEMORY)? };
        self.users.push(stream.clone());
        Ok(())
    }

    /// Frees the memory after all work submitted so far to `stream` and to every stream that used it.
    ///
    /// While one of them is being captured into a CUDA graph, the free waits for the end of the capture.
    ///
    /// Source: `cuMemFreeAsync`, `cudaFreeAsync`.
    ///
    /// # Errors
    /// The driver's errors, after a second try if that is possible; if it does not say that the work has ended, the memory
    /// is never freed. [`Error::InvalidArgument`] for another driver's stream: the memory is then freed on its own.
    pub fn free_on(mut self, stream: &Stream) -> Result<()> {
        self.driver().expect_same(stream.driver(), "stream")?;
        self.driver().expect_this_process(POOL_MEMORY)?;
        self.free(stream.clone())
    }

    /// Returns the CPU's view of the bytes, after the work of every stream that uses them.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] if the CPU cannot reach the pool's memory; [`Error::InvalidArgument`] while one of the streams
    /// is being captured into a graph; the error of earlier work on the streams.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        if !self.memory.pool.props().location.is_host() {
            let (have, need) = (Access::None, Access::ReadWrite);
            return Err(Error::not_accessible(Location::Host, have, need));
        }
        for stream in self.streams() {
            stream.expect_no_capture()?;
            stream.synchronize()?;
        }
        // SAFETY: the allocation has happened and lasts until `self` is freed, in units
        // larger than a word; a host pool is readable and writable by the CPU; safe code reaches it
        // through atomic views only.
        Ok(unsafe { CpuView::new(self.memory.start, self.memory.len, true) })
    }

    /// Returns the pool that it was allocated from.
    pub fn pool(&self) -> Pool {
        self.memory.pool.clone()
    }

    /// Returns the stream that the memory was allocated on.
    pub fn stream(&self) -> &Stream {
        &self.memory.stream
    }

    fn driver(&self) -> &Driver {
        self.memory.pool.driver()
    }

    fn streams(&self) -> impl Iterator<Item = &Stream> {
        std::iter::once(self.stream()).chain(&self.users)
    }

    fn is_user(&self, stream: &Stream) -> bool {
        self.streams().any(|user| user.handle() == stream.handle())
    }

    /// Frees the memory on `stream`, the first time that it is called.
    fn free(&mut self, stream: Stream) -> Result<()> {
        if std::mem::replace(&mut self.freed, true) {
            return Ok(());
        }
        let users = self.streams().cloned().collect();
        Arc::clone(&self.memory).free(users, stream)
    }
}

impl Allocation {
    pub(super) fn new(
        pool: &Pool,
        path: AllocPath,
        (start, len): (DevicePtr, u64),
        stream: &Stream,
        site: Site,
    ) -> Self {
        let new = NewEntry {
            driver: pool.driver(),
            bytes: len,
            location: pool.props().location,
            path,
            label: pool.0.label.clone(),
            site,
        };
        Self {
            entry: Entry::mapped(new, start, pool.0.grants.clone()),
            is_imported: path == AllocPath::ImportedPool,
            pool: pool.clone(),
            start,
            len,
            stream: stream.clone(),
        }
    }

    /// Frees the memory on `stream` after the work of `users`, once none of them is being captured. Called once, because the
    /// address may be reused afterwards.
    fn free(self: Arc<Self>, users: Vec<Stream>, stream: Stream) -> Result<()> {
        if users.iter().any(Stream::may_be_captured) || stream.may_be_captured() {
            let streams = users.iter().chain([&stream]).cloned().collect();
            after_captures(streams, move || {
                log_lost(POOL_MEMORY, self.free(users, stream));
            });
            return Ok(());
        }
        run_due(self.pool.driver());
        self.free_after(&users, &stream)
    }

    fn free_after(&self, users: &[Stream], stream: &Stream) -> Result<()> {
        let _relaxed = Relaxed::new(self.pool.driver());
        let mut ordered = Ok(());
        for user in users {
            if stream.wait_for(user).is_ok() {
                continue;
            }
            // If an event cannot order a stream, waiting for it does.
            let waited = user.wait_until_over();
            if !waited.over {
                // A GPU may still use it.
                self.entry.give_back(self.pool.driver(), || true);
                return waited.result;
            }
            ordered = ordered.and(waited.result);
        }
        self.give_back(stream).and(ordered)
    }

    /// Frees the memory on `stream`, after its work. Called once.
    pub(super) fn give_back(&self, stream: &Stream) -> Result<()> {
        let mut freed = Ok(());
        self.entry.give_back(self.pool.driver(), || {
            freed = give_back(self.pool.driver(), "a pool's memory", || {
                // SAFETY: owned by `self`, which frees it once; the free comes after all known work.
                unsafe { self.pool.calls()?.free_async(self.start, stream.handle()) }
            });
            freed.is_err()
        });
        freed
    }
}

impl_cpu_memory!(PoolBuffer);

memory_through!(unsafe impl for PoolBuffer, |this| *this.memory);

// SAFETY: the pool's grants answer. The buffers that lend this free the memory when they are dropped, and not before. Frees that
// wait for a capture's end keep it after that, and lend it to nobody.
unsafe impl AccessChecks for Allocation {
    fn gpu_access(&self, gpu: i32, _: Engine, _: u64, _: u64) -> Result<Access> {
        self.pool.access(Location::Device(gpu))
    }

    fn may_be_on_host(&self, _: u64, _: u64) -> bool {
        // Another process's pool lies where that process says.
        self.is_imported || self.location().is_host()
    }

    fn of_one_mapping(&self, _offset: u64, len: u64) -> Option<u64> {
        Some(len)
    }

    fn hold_grants(&self) -> Option<GrantUse> {
        Some(self.pool.0.uses.begin())
    }

    unsafe fn ready_on(&self, stream: StreamHandle) -> Result<()> {
        if self.is_imported {
            // It was allocated before it was lent.
            return Ok(());
        }
        // SAFETY: the caller promises that the stream is live.
        unsafe { self.stream.order_use(stream, POOL_MEMORY) }
    }
}

impl_memory! { for Allocation, |this| this.pool.driver(), this.start, this.len, this.pool.props().location }

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        // A forked child frees nothing.
        if self.driver().is_of_this_process() {
            let stream = self.stream().clone();
            log_lost(POOL_MEMORY, self.free(stream));
        }
    }
}
