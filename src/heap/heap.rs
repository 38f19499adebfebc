//! The public heap type.

use std::alloc::Layout;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use egmem_core::backing::Chosen;

use super::backing::Backing;
use super::debug::{BlockInfo, LeakReport, Watch};
use super::grower::{self, Decay};
use super::inner::HeapInner;
use super::piece::Piece;
use super::{Block, HeapOptions, HeapStats, Occupancy};
use crate::driver::{DevicePtr, Driver, Location};
use crate::topology::Share;
use crate::{Error, Progress, Result};

/// Suballocates blocks of memory on a node, for the CPU and the GPUs, at the cost of a good `malloc`. Clones
/// are handles of the same heap.
///
/// A heap reserves one range of addresses, adds memory to it in chunks as needed, and gives chunks back in
/// [`trim`](Self::trim). Blocks never move. The heap's metadata lies outside that memory, so no write by a
/// GPU can damage it.
///
/// The program's global allocator provides memory for the metadata, sometimes while the heap holds its locks,
/// so a global allocator must not allocate from a heap. The heap's own events (target `egmem_heap`) are logged with
/// no lock held: a `tracing` subscriber may use the heap then. Driver calls and their errors (`egmem_core`,
/// `egmem_driver`) are logged within the calls, some of which the heap makes while it holds locks: a subscriber
/// that uses the heap then may deadlock.
///
/// A child that is forked without `exec` may drop handles and blocks, which frees nothing, and may terminate,
/// also by `exit`. It gets nothing else from a heap of its parent: threads that the child does not have may
/// hold the locks, and CUDA does not work in the child either. Calls that return a `Result` fail there with
/// [`Error::InvalidArgument`], and numbers are 0.
///
/// If a seccomp filter refuses `membarrier(2)` after the heap was built, calls that take other threads'
/// caches ([`stats`](Self::stats), [`trim`](Self::trim), the heap's end) take 50 ms.
///
/// ```
/// use std::alloc::Layout;
/// use egmem::driver::sim::Machine;
/// use egmem::{Driver, Heap, Topology};
///
/// let driver = Driver::simulated(Machine::gh200x4())?; // Driver::open() on a real machine
/// let topology = Topology::discover(&driver)?;
/// let heap = Heap::on(topology.gpu(0)?.host_node()?)
///     .access_by(topology.gpus())
///     .limit(1 << 30)
///     .build(&driver)?;
/// let block = heap.allocate(Layout::from_size_align(64 << 10, 256).unwrap())?;
/// block.write_at(0, &[1.0_f32, 2.0])?; // by the CPU; GPUs use block.device_ptr()
/// assert_eq!(block.get::<f32>(4)?, 2.0);
/// # Ok::<(), egmem::Error>(())
/// ```
pub struct Heap {
    inner: Arc<HeapInner>,
}

impl Heap {
    /// Creates the first handle of a heap.
    pub(super) fn from_inner(inner: Arc<HeapInner>) -> Self {
        Self { inner }
    }

    pub(super) fn inner(&self) -> &Arc<HeapInner> {
        &self.inner
    }

    /// Allocates a block of `layout`'s size, from 1 byte to 1 TiB − 2 MiB, at an address that is a multiple
    /// of its alignment. The bytes are not initialised.
    ///
    /// With the feature `allocator-api2` or `nightly` a heap also implements `Allocator`, whose function of
    /// this name returns a bare pointer. `heap.allocate(layout)` calls this method; the trait's is
    /// `Allocator::allocate(&heap, layout)`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes, for more than the maximum, for an alignment that no such
    /// block can have at the heap's addresses, and in a forked child; [`Error::HeapFull`] if the heap has no room and may not grow,
    /// with the reason; if it has to grow, [`Error::NodeTooFull`], [`Error::NodesTooFull`],
    /// [`Error::OutOfMemory`] or the driver's errors. Requests of 64 MiB or more are checked against the host
    /// nodes' free memory before any memory is created, unless the heap may
    /// [overcommit](super::HeapOptions::overcommit); smaller requests release the new memory if they fail.
    #[inline(always)]
    #[track_caller]
    pub fn allocate(&self, layout: Layout) -> Result<Block> {
        let (bytes, align) = (layout.size() as u64, layout.align() as u64);
        let cached = match bytes {
            0 => None,
            _ => self.inner.allocate_cached(bytes, align),
        };
        let piece = match cached {
            None => self.allocate_slowly(bytes, align, std::panic::Location::caller())?,
            Some(extent) => extent.with(bytes),
        };
        // SAFETY: the piece was just allocated and counted, for this block alone.
        Ok(unsafe { Block::new(&self.inner, piece) })
    }

    #[cold]
    #[inline(never)]
    fn allocate_slowly(
        &self,
        bytes: u64,
        align: u64,
        place: &'static std::panic::Location<'static>,
    ) -> Result<Piece> {
        if bytes == 0 {
            return Err(no_bytes());
        }
        // A forked child always comes here: it finds no cache of its parent's heap.
        self.inner.expect_this_process()?;
        self.inner.allocate_slowly(bytes, align, place)
    }

    /// Allocates like [`allocate`](Self::allocate), with every byte 0. The CPU writes the zeros, or a GPU if
    /// the CPU may not write.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); the driver's errors if a GPU cannot write.
    #[track_caller]
    pub fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        let block = self.allocate(layout)?;
        // SAFETY: the block is new, and only this function uses it.
        unsafe { self.inner.zero(block.piece())? };
        Ok(block)
    }

    /// Returns the heap's statistics. Visits every slab, each with up to 64 KiB of small blocks: a few slabs
    /// take microseconds, and the time grows with their number. Threads that need more than their caches
    /// hold, or free more, wait meanwhile. While the heap is growing, this waits for the driver.
    pub fn stats(&self) -> HeapStats {
        if !self.inner.facts.born.is_current() {
            return HeapStats::default();
        }
        self.inner.stats()
    }

    /// Returns which ranges are used, cached, deferred or backed at this moment, to count or, with the
    /// feature `pictures`, to draw. Blocks that touch form one range. Visits every block while the heap's
    /// threads wait.
    pub fn occupancy(&self) -> Occupancy {
        if !self.inner.facts.born.is_current() {
            return Occupancy::default();
        }
        self.inner.occupancy()
    }

    /// Adds memory until at least `bytes` are free, in as many pieces as necessary. The soft limit does not
    /// apply.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate) for a heap that has to grow. A request beyond the limit, or beyond the
    /// host nodes' free memory unless the heap may [overcommit](super::HeapOptions::overcommit), fails before
    /// any memory is created. If other threads take memory meanwhile, or the driver fails, the memory added
    /// by then stays.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        self.reserve_with(bytes, |_| ControlFlow::Continue(()))
    }

    /// As [`reserve`](Self::reserve), and calls `progress` after each [chunk](super::HeapOptions::chunk), in the calling
    /// thread and with no lock held: it may use the heap. Its total changes if other threads allocate or free meanwhile.
    ///
    /// If it breaks, chunks without a block are given back until about as much is free as before, as by
    /// [`trim_to`](Self::trim_to).
    ///
    /// # Errors
    /// As `reserve`, and [`Error::Cancelled`] after a break.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use egmem::driver::NodeId;
    /// use egmem::{Driver, Error, Heap, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let heap = Heap::on(NodeId(0)).build(&driver)?;
    /// let error = heap.reserve_with(1 << 30, |progress| match progress.done {
    ///     0..0x1000_0000 => ControlFlow::Continue(()),
    ///     _ => ControlFlow::Break(()),
    /// });
    /// assert_eq!(error, Err(Error::Cancelled { done: 256 << 20, total: 1 << 30 }));
    /// assert_eq!(heap.backed(), 0);
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn reserve_with(
        &self,
        bytes: u64,
        mut progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        self.inner.expect_this_process()?;
        let before = self.inner.core().ranges.free_bytes();
        let mut done = 0;
        let added = self.inner.add_memory(bytes, false, |step, left| {
            done += step;
            let total = done + left;
            match progress(Progress::new(done, total)) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(Error::Cancelled { done, total }),
            }
        });
        if let Err(Error::Cancelled { .. }) = added
            && let Err(error) = self.inner.trim(before)
        {
            tracing::warn!(%error, "a cancelled reservation keeps its memory");
        }
        self.inner.tell();
        added
    }

    /// Gives unused memory back in whole chunks; returns the number of bytes. Empties the threads' caches
    /// first.
    ///
    /// # Errors
    /// The driver's errors if nothing could be given back.
    pub fn trim(&self) -> Result<u64> {
        self.trim_to(0)
    }

    /// As [`trim`](Self::trim), but leaves at least `bytes` free if there are as many.
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn trim_to(&self, bytes: u64) -> Result<u64> {
        self.inner.expect_this_process()?;
        let given = self.inner.trim(bytes);
        self.inner.tell();
        given
    }

    /// Collects the blocks that were [freed after](Block::free_after) GPU work that has finished by now;
    /// returns their number. Never waits.
    ///
    /// # Errors
    /// The driver's errors; blocks whose work has finished are collected anyway.
    pub fn collect(&self) -> Result<usize> {
        self.inner.expect_this_process()?;
        self.inner.collect_passed()
    }

    /// In [debug mode](super::debug), checks all guards and all freed blocks in quarantine. Each damage is
    /// reported by one check: the check restores the bytes.
    ///
    /// Guard bytes in the same eight bytes as the last byte of a block in use are checked when it is freed.
    ///
    /// # Errors
    /// [`Error::HeapDamaged`] with all damage found now and since the last check; [`Error::InvalidArgument`]
    /// if the heap is not in debug mode; the driver's errors if a GPU has to read the bytes.
    pub fn check(&self) -> Result<()> {
        self.watch()?.check()
    }

    /// In [debug mode](super::debug), returns the blocks in use, the oldest first, without those freed after
    /// GPU work.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the heap is not in debug mode.
    pub fn live_blocks(&self) -> Result<Vec<BlockInfo>> {
        Ok(self.watch()?.live_blocks())
    }

    /// In [debug mode](super::debug), returns the blocks in use, grouped by where they were allocated.
    /// Dropping the heap's last handle logs the same as a warning.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the heap is not in debug mode.
    pub fn leaks(&self) -> Result<LeakReport> {
        Ok(self.watch()?.leaks())
    }

    fn watch(&self) -> Result<&Watch> {
        self.inner.expect_this_process()?;
        let watch = self.inner.watch.as_ref();
        watch.ok_or_else(|| Error::invalid("heap", "it was built without debug mode"))
    }

    /// Returns the number of bytes that have memory now.
    pub fn backed(&self) -> u64 {
        if !self.inner.facts.born.is_current() {
            return 0;
        }
        self.inner
            .supply
            .backing()
            .as_ref()
            .map_or(0, Backing::backed)
    }

    /// Returns the most bytes that can have memory.
    pub fn limit(&self) -> u64 {
        self.inner.facts.limit
    }

    /// Returns what the heap's chunks are made of, and why; see [`HeapOptions::backing`](super::HeapOptions::backing).
    pub fn backing(&self) -> &Chosen {
        &self.inner.facts.chosen
    }

    /// Returns the heap's first address.
    pub fn device_ptr(&self) -> DevicePtr {
        DevicePtr(self.inner.facts.start)
    }

    /// Returns the heap's driver.
    pub fn driver(&self) -> &Driver {
        &self.inner.facts.driver
    }
}

impl Heap {
    /// Returns options for a heap at `location`: a node's id, or any [`Location`].
    pub fn on(location: impl Into<Location>) -> HeapOptions {
        HeapOptions::on(vec![location.into()])
    }

    /// Returns options for a heap whose chunks are spread over several nodes, such as
    /// [`PlacementRequest::place`](crate::topology::PlacementRequest::place) returns. A node gets at most its
    /// share, rounded down to 2 MiB; once a share is used up, chunks go to the other nodes. The sum of the
    /// shares is the heap's limit; [`limit`](HeapOptions::limit) can only lower it.
    pub fn spread(shares: &[Share]) -> HeapOptions {
        let nodes = shares.iter().map(|share| share.node.into()).collect();
        let bytes = shares.iter().map(|share| share.bytes);
        let mut options = HeapOptions::on(nodes).limit(bytes.clone().fold(0, u64::saturating_add));
        options.plan.shares = bytes.collect();
        options
    }
}

impl HeapOptions {
    /// Reserves the addresses and adds the memory that the heap is to have from the start.
    ///
    /// Source: `cuMemAddressReserve`; for memory `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no node, a limit or shares below 2 MiB or beyond the address space,
    /// chunks of 0 bytes, more reserved than the limit, or debug guards that leave no room for a block;
    /// [`Error::NoSuchNode`], [`Error::NoSuchGpu`]; the reason why memory cannot be shareable as requested;
    /// [`Error::OutOfAddresses`] for a limit that the address space has no room for; the driver's errors.
    /// With memory from the start, also the errors of [`Heap::reserve`]. [`Error::System`] if the kernel has
    /// no addresses for the table of blocks, a 32nd of the limit, or if a thread for [growth
    /// ahead](Self::grow_ahead) or [decay](Self::decay) cannot be started.
    #[track_caller]
    pub fn build(mut self, driver: &Driver) -> Result<Heap> {
        self.plan.site = crate::ledger::Site::here();
        let backing = Backing::new(driver, &self.plan)?;
        let (reserve, limit) = (self.reserve, backing.limit());
        if reserve > limit {
            let why = format!("{reserve} bytes from the start are more than the limit, {limit}");
            return Err(Error::invalid("reserve", why));
        }
        if let Some(debug) = &self.debug {
            debug.check(limit)?;
        }
        // From here on dropping `heap` releases everything.
        let heap = Heap::from_inner(HeapInner::new(driver, backing, &self)?);
        if reserve > 0 {
            heap.reserve(reserve)?;
        }
        let decay = |idle| Decay::new(idle, reserve, self.grow_ahead);
        grower::start(heap.inner(), self.decay.map(decay))?;
        Ok(heap)
    }
}

/// Returns the error of an allocation of 0 bytes.
pub(super) fn no_bytes() -> Error {
    Error::invalid_of("size", "0 bytes cannot be allocated", "1 byte or more")
}

impl Clone for Heap {
    fn clone(&self) -> Self {
        self.inner.handles.0.fetch_add(1, Relaxed);
        Self {
            inner: Arc::clone(&self.inner),
        }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        if !self.inner.facts.born.is_current() {
            // In a forked child: the memory is the parent's and stays as it is.
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        if self.inner.handles.0.fetch_sub(1, AcqRel) == 1 {
            self.inner.close();
        }
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap")
            .field("device_ptr", &self.device_ptr())
            .field("limit", &self.limit())
            .field("backing", &self.backing().backing)
            .finish_non_exhaustive()
    }
}
