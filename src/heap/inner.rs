//! The state that a heap's handles, blocks and threads share.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use egmem_core::backing::Chosen;

use super::backing::{Backing, Chunk, Plan, Supply};
use super::bytes::ByteAccess;
use super::cache::{Front, Inside, Reserved, Visitor, member};
use super::debug::Watch;
use super::deferred::Deferral;
use super::grower::Signal;
use super::options::{HeapOptions, SoftLimit};
use super::piece::Piece;
use super::ranges::{Core, Stripes};
use super::reports::Reports;
use crate::Result;
use crate::driver::{Access, Driver, Location};
use crate::fork::Generation;

/// A value on cache lines of its own, because all threads write to it.
#[repr(align(128))]
pub(super) struct Apart<T>(pub(super) T);

/// The heap's shared state; see the module.
///
/// Each part's type says which locks it has. Their order: the deferral's turns, the supply's, the front's, a thread's cache,
/// the watch's, the core, the stripes of slabs. The deferral's stand beside these, as it says.
pub(super) struct HeapInner {
    /// For threads and blocks that need to keep the heap alive.
    pub(super) this: Weak<Self>,
    pub(super) facts: Facts,
    /// State of the debug mode.
    pub(super) watch: Option<Watch>,
    /// Set once, by [`close`](Self::close).
    pub(super) closed: AtomicBool,
    pub(super) handles: Apart<AtomicUsize>,
    pub(super) core: Reserved<Core>,
    /// The core's slabs, and the table that finds blocks by their offsets.
    pub(super) slabs: Arc<Stripes>,
    pub(super) front: Front,
    pub(super) supply: Supply,
    pub(super) deferral: Deferral<Piece>,
    pub(super) grower: Arc<Signal>,
    #[cfg(feature = "share")]
    pub(super) shares: super::share::Shares,
    /// Allocations that failed.
    pub(super) failed: AtomicU64,
    /// How often the heap took the caches of all threads.
    pub(super) takings: AtomicU64,
    pub(super) reports: Arc<Reports>,
}

impl HeapInner {
    pub(super) fn new(
        driver: &Driver,
        backing: Backing,
        options: &HeapOptions,
    ) -> Result<Arc<Self>> {
        member::forget_members_in_children();
        let core = Core::new(backing.start().0, backing.limit())?;
        let facts = Facts::new(driver, &backing, options);
        let reports = Arc::clone(backing.reports());
        let watch = |debug| Watch::new(debug, facts.start, facts.bytes(), &reports);
        let watch = options.debug.clone().map(watch);
        let inner = |this: &Weak<Self>| Self {
            this: Weak::clone(this),
            watch,
            closed: AtomicBool::new(false),
            handles: Apart(AtomicUsize::new(1)),
            slabs: Arc::clone(core.slabs()),
            core: Reserved::new(core),
            front: Front::new(options.thread_cache, facts.limit),
            supply: Supply::new(backing, options.plan.growth.unwrap_or_default()),
            deferral: Deferral::new(driver, &reports),
            grower: Arc::new(Signal::new(options.grow_ahead)),
            #[cfg(feature = "share")]
            shares: super::share::Shares::default(),
            failed: AtomicU64::new(0),
            takings: AtomicU64::new(0),
            reports,
            facts,
        };
        Ok(Arc::new_cyclic(inner))
    }

    /// Checks that this process built the heap: in a forked child its locks may be held for ever, and its blocks are the
    /// parent's.
    pub(super) fn expect_this_process(&self) -> Result<()> {
        if self.facts.born.is_current() {
            return Ok(());
        }
        // The driver is no younger than the heap.
        self.facts.driver.expect_this_process("heap")
    }

    /// Calls `f` with the chunk at `offset`, if there is one. Waits while a chunk is created; not in a forked child, where nobody
    /// may be left to release the lock.
    pub(super) fn at_chunk<R>(&self, offset: u64, f: impl FnOnce(&Chunk) -> R) -> Option<R> {
        if !self.facts.born.is_current() {
            return None;
        }
        self.supply.backing().as_ref()?.chunk_at(offset).map(f)
    }

    /// Enters the core, after applying the frees in the inbox. Not allowed while a driver call runs. Allowed
    /// after taking a thread's cache, never before.
    pub(super) fn core(&self) -> Inside<'_, Core> {
        self.drained(self.core.lock())
    }

    /// As [`core`](Self::core), for a thread with a cache.
    #[inline(always)]
    pub(super) fn visit<'a>(&'a self, visitor: &'a mut Visitor) -> Inside<'a, Core> {
        let core = self.core.visit(visitor);
        if self.front.inbox.is_empty() {
            core
        } else {
            self.drained(core)
        }
    }

    /// Calls `f` with the core, for a thread with or without a cache.
    pub(super) fn in_core<R>(&self, f: impl Fn(&mut Core) -> R) -> R {
        member::with(self, |local| Some(f(&mut self.visit(&mut local.visitor))))
            .unwrap_or_else(|| f(&mut self.core()))
    }

    #[cold]
    fn drained<'a>(&self, mut core: Inside<'a, Core>) -> Inside<'a, Core> {
        for ranges in self.front.inbox.take_all() {
            self.give_ranges(&mut core, &ranges);
        }
        core
    }
}

/// Values that never change after the heap is built: read by all threads, without a lock.
pub(super) struct Facts {
    /// Unique in this process, never reused.
    pub(super) id: u64,
    /// The address of offset 0.
    pub(super) start: u64,
    pub(super) limit: u64,
    pub(super) host: Access,
    /// Whether chunks can be exported: importers may write anywhere in them.
    pub(super) exportable: bool,
    /// Whether a block may lie in several chunks.
    pub(super) joins: bool,
    /// What the chunks are made of.
    pub(super) chosen: Chosen,
    /// `None` if the chunks lie in several places.
    pub(super) location: Option<Location>,
    pub(super) driver: Driver,
    pub(super) scrub: bool,
    /// The process that created the heap. A forked child frees nothing.
    pub(super) born: Generation,
    /// The process in which freeing a block needs no scrubbing, checking or lookup.
    pub(super) plain_in: Generation,
    /// A GPU that may write the memory, if any.
    pub(super) gpu: Option<i32>,
    pub(super) soft_limit: Option<SoftLimit>,
    pub(super) wait_for_gpu: bool,
}

impl Facts {
    /// Settles the facts of a new heap, and gives it its number.
    pub(super) fn new(driver: &Driver, backing: &Backing, options: &HeapOptions) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let born = Generation::current();
        Self {
            id: NEXT.fetch_add(1, Relaxed),
            start: backing.start().0,
            limit: backing.limit(),
            host: backing.host_access(),
            exportable: backing.is_exportable(),
            joins: backing.joins(),
            chosen: backing.chosen().clone(),
            location: match options.plan.nodes[..] {
                [node] => Some(node),
                _ => None,
            },
            driver: driver.clone(),
            scrub: options.scrub_on_free,
            born,
            plain_in: if options.scrub_on_free || options.debug.is_some() {
                Generation::NEVER
            } else {
                born
            },
            gpu: gpu_that_writes(driver, &options.plan),
            soft_limit: options.soft_limit.clone(),
            wait_for_gpu: options.wait_for_gpu,
        }
    }

    /// Returns access to the bytes of the memory.
    pub(super) fn bytes(&self) -> ByteAccess {
        ByteAccess::new(&self.driver, self.host, self.gpu)
    }
}

fn gpu_that_writes(driver: &Driver, plan: &Plan) -> Option<i32> {
    let ordinal = |location| match location {
        Location::Device(gpu) => Some(gpu),
        _ => None,
    };
    match &plan.access.gpus {
        Some(gpus) => gpus
            .iter()
            .filter(|desc| desc.access == Access::ReadWrite)
            .find_map(|desc| ordinal(desc.location)),
        None => plan
            .nodes
            .iter()
            .find_map(|&node| ordinal(node))
            .or_else(|| driver.device_count().ok().filter(|&n| n > 0).map(|_| 0)),
    }
}
