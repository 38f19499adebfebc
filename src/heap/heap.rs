//! The heap as its users see it.

use std::alloc::Layout;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use super::backing::Backing;
use super::debug::{BlockInfo, LeakReport, Watch};
use super::piece::{Key, Piece};
use super::shared::Shared;
use super::{Block, HeapOptions, HeapStats, Occupancy, grower};
use crate::driver::{DevicePtr, Driver, Location};
use crate::per_driver::lock;
use crate::topology::Share;
use crate::{Error, Result};

/// Blocks of memory on a node, for the CPU and the GPUs, at the cost of a good `malloc`. Clones are
/// handles of the same heap.
///
/// A range of addresses is reserved once; memory is added to it in chunks as it is needed, and given
/// back by [`trim`](Self::trim). Addresses never move. What is where is known outside of the memory
/// itself: nothing that a GPU writes can damage it.
///
/// Those books are allocated by the program's global allocator, sometimes under the heap's locks, so a
/// global allocator must not draw from a heap. Some of the driver's refusals are logged under them too, so
/// a subscriber of `tracing` must not use the heap in whose call it is told: the two may wait for each other for
/// ever.
///
/// A child that is forked without `exec` may drop handles and blocks, which gives nothing back, and may end,
/// by `exit` too. It may do nothing else with a heap of its parent's: locks may be held by threads that the
/// child does not have, and CUDA does not work there either.
///
/// Where a filter of system calls refuses `membarrier(2)` after the heap was built, calls that take threads'
/// caches ([`stats`](Self::stats), [`trim`](Self::trim), the heap's end) take milliseconds, at most some 50 and one
/// for each CPU, and move their thread from CPU to CPU meanwhile.
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
    shared: Arc<Shared>,
}

impl Heap {
    /// Options for a heap at `location`: a node's id, or any [`Location`].
    pub fn on(location: impl Into<Location>) -> HeapOptions {
        HeapOptions::on(vec![location.into()])
    }

    /// Options for a heap whose chunks lie on several nodes in turn: what
    /// [`PlacementRequest::place`](crate::topology::PlacementRequest::place) gives. None has more than
    /// its share, rounded down to 2 MiB: once that is used up, chunks lie on the others. The shares' bytes
    /// together are the heap's limit; [another](HeapOptions::limit) may only be lower.
    pub fn spread(shares: &[Share]) -> HeapOptions {
        let nodes = shares.iter().map(|share| share.node.into()).collect();
        let bytes = shares.iter().map(|share| share.bytes);
        let mut options = HeapOptions::on(nodes).limit(bytes.clone().fold(0, u64::saturating_add));
        options.plan.shares = bytes.collect();
        options
    }

    pub(super) fn new(driver: &Driver, options: HeapOptions) -> Result<Self> {
        let backing = Backing::new(driver, &options.plan)?;
        let reserve = options.reserve;
        if reserve > backing.limit() {
            let limit = backing.limit();
            let why = format!("{reserve} bytes from the start are more than the limit, {limit}");
            return Err(Error::invalid("reserve", why));
        }
        if let Some(debug) = &options.debug {
            debug.check(backing.limit())?;
        }
        let shared = Shared::new(driver, backing, &options)?;
        shared.set_budget(0);
        // From here on dropping it gives everything back.
        let heap = Self { shared };
        if reserve > 0 {
            heap.reserve(reserve)?;
        }
        grower::start(&heap.shared)?;
        Ok(heap)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// A block of `layout`'s size, from 1 byte to 1 TiB − 2 MiB, at an address that is a multiple of
    /// its alignment. Its bytes are whatever they were.
    ///
    /// With the feature `allocator-api2` or `nightly` a heap also is an `Allocator`, whose function of this
    /// name gives a bare pointer. `heap.allocate(layout)` is this one; the trait's takes its own name,
    /// `Allocator::allocate(&heap, layout)`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes, for more than that, and for an alignment that no such
    /// block can have at the heap's addresses; [`Error::HeapFull`] where it has no room and may not grow,
    /// which says why; where it has to grow, [`Error::NodeTooFull`], [`Error::NodesTooFull`],
    /// [`Error::OutOfMemory`] or the driver's. What memory of host nodes it lacks it finds out without
    /// making any, from 64 MiB on and unless they may be [overcommitted](HeapOptions::overcommit); else
    /// what was made is given back.
    #[inline(always)]
    #[track_caller]
    pub fn allocate(&self, layout: Layout) -> Result<Block> {
        let (bytes, align) = (layout.size() as u64, layout.align() as u64);
        let (offset, key) = match bytes {
            0 => (0, Key::NONE),
            _ => self.shared.allocate_cached(bytes, align),
        };
        let piece = match key {
            Key::NONE => self.allocate_slowly(bytes, align, std::panic::Location::caller())?,
            key => Piece { offset, bytes, key },
        };
        // SAFETY: just allocated and counted, for this block.
        Ok(unsafe { Block::new(&self.shared, piece) })
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
            return Err(Error::invalid_of(
                "size",
                "0 bytes cannot be allocated",
                "1 byte or more",
            ));
        }
        self.shared.allocate_slowly(bytes, align, place)
    }

    /// As [`allocate`](Self::allocate), with every byte 0: written by the CPU, or by a GPU where the CPU
    /// may not write.
    ///
    /// # Errors
    /// As there; the driver's, where a GPU cannot write.
    #[track_caller]
    pub fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        let block = self.allocate(layout)?;
        // SAFETY: the block is new, and this function's alone.
        unsafe { self.shared.zero(block.piece())? };
        Ok(block)
    }

    /// The heap's numbers. Goes through all slabs, of up to 64 KiB of small blocks each: that takes
    /// microseconds where these are few, and longer in proportion. Threads that need more than they keep
    /// wait meanwhile. While the heap is growing, it waits for the driver.
    pub fn stats(&self) -> HeapStats {
        self.shared.stats()
    }

    /// What lies where at this moment, to count or [to draw](Occupancy::to_svg). Blocks that touch are
    /// one range. Takes as long as it takes to go through all blocks, while the heap's threads wait.
    pub fn occupancy(&self) -> Occupancy {
        self.shared.occupancy()
    }

    /// Adds memory until at least `bytes` are free, in as many pieces as may be. The soft limit does
    /// not count here.
    ///
    /// # Errors
    /// As where [`allocate`](Self::allocate) has to grow. More than the limit leaves, or than host nodes have
    /// free unless they may be [overcommitted](HeapOptions::overcommit), is refused before any memory is made.
    /// Otherwise, where others take memory meanwhile, or the driver fails, what was added by then stays.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let added = self.shared.add_memory(bytes, false);
        self.shared.tell();
        added
    }

    /// Gives memory back that is in no use, in whole chunks; how many bytes. What threads keep to give
    /// out again is taken from them first.
    ///
    /// # Errors
    /// The driver's, where nothing could be given back.
    pub fn trim(&self) -> Result<u64> {
        self.trim_to(0)
    }

    /// As [`trim`](Self::trim), but leaves at least `bytes` free, if there are.
    ///
    /// # Errors
    /// As there.
    pub fn trim_to(&self, bytes: u64) -> Result<u64> {
        let given = self.shared.trim(bytes);
        self.shared.tell();
        given
    }

    /// Takes back the blocks that were [freed after](Block::free_after) work that has run by now; how
    /// many. Never waits.
    ///
    /// # Errors
    /// The driver's; what has passed is taken back all the same.
    pub fn collect(&self) -> Result<usize> {
        self.shared.collect_passed()
    }

    /// In [debug mode](super::debug), looks at all guards and at all freed blocks in quarantine.
    /// Each damage is reported by one check: its bytes are put right then.
    ///
    /// Of a block in use, guarded bytes in the same eight as its last are looked at when it is freed.
    ///
    /// # Errors
    /// [`Error::HeapDamaged`] with all that is found now and was found since the last check;
    /// [`Error::InvalidArgument`] where the heap is not in debug mode; the driver's, where a GPU has to
    /// look.
    pub fn check(&self) -> Result<()> {
        self.watch()?.check(&self.shared)
    }

    /// In [debug mode](super::debug), the blocks that users have, the oldest first: those freed after
    /// GPU work are not among them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the heap is not in debug mode.
    pub fn live_blocks(&self) -> Result<Vec<BlockInfo>> {
        Ok(self.watch()?.live_blocks())
    }

    /// In [debug mode](super::debug), the blocks that users have, by where they were allocated. The same
    /// is warned of when the heap's last handle goes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the heap is not in debug mode.
    pub fn leaks(&self) -> Result<LeakReport> {
        Ok(self.watch()?.leaks())
    }

    fn watch(&self) -> Result<&Watch> {
        let watch = self.shared.watch.as_ref();
        watch.ok_or_else(|| Error::invalid("heap", "it was built without `debug`"))
    }

    /// How many bytes have memory now.
    pub fn backed(&self) -> u64 {
        lock(&self.shared.backing)
            .as_ref()
            .map_or(0, Backing::backed)
    }

    /// The most bytes that can have memory.
    pub fn limit(&self) -> u64 {
        self.shared.limit
    }

    /// The first address.
    pub fn device_ptr(&self) -> DevicePtr {
        DevicePtr(self.shared.start)
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.shared.driver
    }
}

impl Clone for Heap {
    fn clone(&self) -> Self {
        self.shared.handles.0.fetch_add(1, Relaxed);
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        if !self.shared.born.is_current() {
            // A forked child: the memory is the parent's, and stays as it is here.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        if self.shared.handles.0.fetch_sub(1, AcqRel) == 1 {
            self.shared.close();
        }
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap")
            .field("device_ptr", &self.device_ptr())
            .field("limit", &self.limit())
            .finish_non_exhaustive()
    }
}
