//! What a heap is to be.

use std::fmt;
use std::sync::Arc;

use super::Heap;
use super::backing::Plan;
use super::debug::DebugOptions;
use super::limits::{Pressure, Relief, SoftLimit};
use crate::driver::{Access, AccessDesc, Driver, HandleTypes, Location};
use crate::{Error, Result};

/// What a thread's cache may keep at most, in bytes, by default.
const THREAD_CACHE: u64 = 4 << 20;

/// What a heap is to be; [`build`](Self::build) makes it.
#[derive(Clone)]
#[must_use = "options do nothing until `build`"]
pub struct HeapOptions {
    pub(super) plan: Plan,
    pub(super) reserve: u64,
    pub(super) grow_ahead: u64,
    pub(super) soft_limit: Option<SoftLimit>,
    pub(super) thread_cache: u64,
    pub(super) scrub_on_free: bool,
    pub(super) debug: Option<DebugOptions>,
    pub(super) wait_for_gpu: bool,
}

impl HeapOptions {
    pub(super) fn on(nodes: Vec<Location>) -> Self {
        let mut plan = Plan::on(Location::Host);
        plan.nodes = nodes;
        Self {
            plan,
            reserve: 0,
            grow_ahead: 0,
            soft_limit: None,
            thread_cache: THREAD_CACHE,
            scrub_on_free: false,
            debug: None,
            wait_for_gpu: false,
        }
    }

    /// Who may read and write besides the host. Without this, every GPU that can reach the memory.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        for location in who {
            self = self.access(location, Access::ReadWrite);
        }
        self.plan.gpus.get_or_insert_default();
        self
    }

    /// What one location may do; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, who: impl Into<Location>, access: Access) -> Self {
        let location = who.into();
        if location.is_host() {
            self.plan.host = Some(access);
        } else {
            let gpus = self.plan.gpus.get_or_insert_default();
            gpus.retain(|desc| desc.location != location);
            gpus.push(AccessDesc { location, access });
        }
        self
    }

    /// The most memory the heap may have, in bytes, at least 2 MiB and rounded down to that; so many
    /// addresses are reserved at once. By default what the nodes have; for [`Heap::spread`] the shares, and
    /// never more than those.
    pub const fn limit(mut self, bytes: u64) -> Self {
        self.plan.limit = Some(bytes);
        self
    }

    /// How much memory is added at a time, in bytes, at least 1 and rounded up to 2 MiB; by default 64 MiB.
    /// Chunks have no more than 1 TiB − 2 MiB.
    /// Larger chunks are added less often; smaller ones are given back sooner. Chunks are smaller where
    /// memory is short, or a limit near.
    pub const fn chunk(mut self, bytes: u64) -> Self {
        self.plan.chunk = Some(bytes);
        self
    }

    /// How much memory the heap has from the start, in bytes; by default none.
    pub const fn reserve(mut self, bytes: u64) -> Self {
        self.reserve = bytes;
        self
    }

    /// How much memory to have free ahead of need, in bytes: a thread of the heap adds it in the
    /// background, so that an allocation need not wait for the driver. By default 0: memory is added
    /// when it is needed.
    ///
    /// It stops at the limit and at the [soft limit](Self::soft_limit), and goes on after a refusal of
    /// the driver's when blocks are allocated next. What [`Heap::trim`] takes away it adds again, at
    /// the latest then.
    pub const fn grow_ahead(mut self, bytes: u64) -> Self {
        self.grow_ahead = bytes;
        self
    }

    /// Where the heap would have to grow beyond `bytes`, `relieve` is asked first: it may free blocks, of
    /// this heap too, and have the allocation tried once more. Below them the heap grows by smaller chunks
    /// rather than beyond; where `relieve` lets it grow, again by whole ones.
    ///
    /// It is called by the thread that allocates, with no lock of the heap held, and by several
    /// threads at once. Whatever the allocating code has locked is locked still: a `relieve` that locks the
    /// same (a cache's mutex, from under which the cache allocates) waits for itself for ever; let it
    /// `try_lock` and else say [`Relief::Grow`] or [`Relief::Refuse`]. Growth ahead of need stops at `bytes`; [`Heap::reserve`] does not. A `relieve`
    /// that has handles or blocks of this heap keeps the heap from ending: let it have a
    /// [`Weak`](std::sync::Weak) reference to what it frees.
    pub fn soft_limit(
        mut self,
        bytes: u64,
        relieve: impl Fn(&Pressure) -> Relief + Send + Sync + 'static,
    ) -> Self {
        self.soft_limit = Some(SoftLimit {
            bytes,
            relieve: Arc::new(relieve),
        });
        self
    }

    /// How chunks may be shared; by default not at all. In a heap that can be shared, a block is at
    /// most as large as a chunk can be, and lies in one chunk; such a heap is no allocator of collections, as
    /// `Heap::check_collections` says.
    pub const fn handle_types(mut self, handle_types: HandleTypes) -> Self {
        self.plan.handle_types = handle_types;
        self
    }

    /// Makes chunks shareable as widely as this machine allows:
    /// [`best_handle_types`](crate::share::best_handle_types). Collections need a heap without this:
    /// `Heap::check_collections`.
    #[cfg(feature = "share")]
    pub const fn shareable(mut self) -> Self {
        self.plan.shareable = true;
        self
    }

    /// Whether to ask the driver even for more than a node has free. Pinned memory cannot be swapped
    /// out, so the kernel may kill processes to provide it.
    pub const fn overcommit(mut self, on: bool) -> Self {
        self.plan.overcommit = on;
        self
    }

    /// The most bytes of blocks above 2 KiB that each thread may keep to give out again; by default
    /// 4 MiB. Of blocks up to 1 MiB, a thread keeps at most a 512th of the heap's memory, or 128 KiB if that is
    /// more. While several threads allocate large blocks, a thread also keeps its last four blocks up to 4 MiB
    /// that are beyond this: together at most so many bytes, and at most a 16th of the heap's limit. With 0, a
    /// thread keeps only small blocks: whatever is set here, at most 64 KiB of each of their 40 size classes.
    ///
    /// What is kept is in [`HeapStats::cached`](super::HeapStats::cached). No allocation fails for it:
    /// where memory is short, it is taken from all threads first.
    pub const fn thread_cache(mut self, bytes: u64) -> Self {
        self.thread_cache = bytes;
        self
    }

    /// Whether blocks are overwritten with zeros when they are freed: for memory that changes owners.
    /// By the CPU, or by a GPU where the CPU has no access.
    pub const fn scrub_on_free(mut self, on: bool) -> Self {
        self.scrub_on_free = on;
        self
    }

    /// Turns the [debug mode](super::debug) on: writes beside blocks and to freed blocks are found, and
    /// where each block was allocated is known. For tests; slow, and blocks take more memory.
    pub fn debug(mut self, options: DebugOptions) -> Self {
        self.debug = Some(options);
        self
    }

    /// Whether an allocation that would fail for want of memory waits first for the GPU work that blocks
    /// were [freed after](super::Block::free_after), and takes those blocks: as
    /// [`Heap::collect_all`], which says what such a wait may wait for. By default it does not wait: it
    /// takes what has passed and fails where that is not enough.
    ///
    /// Memory reserved or added ahead of need never waits so.
    pub const fn wait_for_gpu(mut self, on: bool) -> Self {
        self.wait_for_gpu = on;
        self
    }

    /// Reserves the addresses, and adds what memory is to be there from the start.
    ///
    /// Source: `cuMemAddressReserve`; for memory `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no node, a limit or shares below 2 MiB or above what an address space
    /// has, chunks of 0 bytes, more reserved than the limit, or debug guards that leave no room for
    /// a block;
    /// [`Error::NoSuchNode`], [`Error::NoSuchGpu`]; why memory that is to be shareable cannot be;
    /// [`Error::OutOfAddresses`] for a limit that the address space has no room for; the driver's. Where memory
    /// is to be there from the start, those of [`Heap::reserve`]. [`Error::System`] if the kernel has no
    /// addresses for the table of blocks, a 32nd of the limit, or, with [growth ahead](Self::grow_ahead), if
    /// its thread cannot be started.
    pub fn build(self, driver: &Driver) -> Result<Heap> {
        if self.plan.nodes.is_empty() {
            return Err(Error::invalid("nodes", "there are none"));
        }
        Heap::new(driver, self)
    }
}

impl fmt::Debug for HeapOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapOptions")
            .field("plan", &self.plan)
            .field("reserve", &self.reserve)
            .field("grow_ahead", &self.grow_ahead)
            .field(
                "soft_limit",
                &self.soft_limit.as_ref().map(|soft| soft.bytes),
            )
            .field("thread_cache", &self.thread_cache)
            .field("scrub_on_free", &self.scrub_on_free)
            .field("debug", &self.debug)
            .field("wait_for_gpu", &self.wait_for_gpu)
            .finish()
    }
}
