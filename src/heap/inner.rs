//! The state that a heap's handles, blocks and threads share.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, Weak};

use super::backing::{Backing, Plan};
use super::cache::{
    Depot, Inbox, Inside, Load, Magazine, Members, Reserved, Shards, Visitor, member,
};
use super::classes::{CLASSES, Class};
use super::core::{Core, GRANULE, Owner, PageMap};
use super::debug::{HeapMemory, Watch};
use super::deferred::Deferred;
use super::grower::Signal;
use super::lifetime::Lifetime;
use super::limits::SoftLimit;
use super::options::HeapOptions;
use super::piece::{Key, Kind, Piece};
use crate::driver::{Access, Driver, Location};
use crate::fork::Generation;
use crate::{Error, Growth, Result};

/// The most full magazines of a class that wait for a thread.
const DEPOT: usize = 4;

/// While threads share the core, each may cache at most this fraction (1/16) of the heap's addresses.
const SHARED_PART: u64 = 16;

/// A value on cache lines of its own, because all threads write to it.
#[repr(align(128))]
pub(super) struct Apart<T>(pub(super) T);

/// The heap's shared state; see the module.
pub(super) struct HeapInner {
    /// For threads and blocks that need to keep the heap alive.
    pub(super) this: Weak<Self>,
    /// Unique in this process, never reused.
    pub(super) id: u64,
    /// The address of offset 0.
    pub(super) start: u64,
    pub(super) limit: u64,
    pub(super) host: Access,
    /// Whether chunks can be exported: importers may write anywhere in them.
    pub(super) exportable: bool,
    /// `None` if the chunks lie in several places.
    pub(super) location: Option<Location>,
    pub(super) driver: Driver,
    pub(super) scrub: bool,
    /// State of the debug mode.
    pub(super) watch: Option<Watch>,
    /// The process that created the heap. A forked child frees nothing.
    pub(super) born: Generation,
    /// The process in which freeing a block needs no scrubbing, checking or lookup.
    pub(super) plain_in: Generation,
    /// A GPU that may write the memory, if any.
    pub(super) gpu: Option<i32>,
    pub(super) soft_limit: Option<SoftLimit>,
    pub(super) thread_cache: u64,
    /// Granules of larger blocks that a thread may cache.
    pub(super) budget: AtomicU64,
    /// The highest value that `budget` ever had.
    pub(super) most_budget: AtomicU64,
    /// The same while several threads use the core, if it is more.
    pub(super) shared_budget: u64,
    /// How often the heap took the caches of all threads.
    pub(super) takings: AtomicU64,
    /// Set once, by [`close`](Self::close).
    pub(super) closed: AtomicBool,
    pub(super) handles: Apart<AtomicUsize>,
    pub(super) core: Reserved<Core>,
    /// The core's table, to look up named blocks.
    #[cfg_attr(
        not(any(feature = "allocator-api2", feature = "nightly")),
        allow(dead_code, reason = "for collections")
    )]
    pages: Arc<PageMap>,
    /// Frees that found the core busy: the next thread that enters the core applies them first.
    pub(super) inbox: Apart<Inbox<Load>>,
    /// Full magazines, from threads that free to threads that allocate.
    pub(super) depots: [Depot<Magazine>; CLASSES],
    pub(super) shards: Shards,
    pub(super) members: Mutex<Members>,
    /// Tracks whether the memory is mapped. Entered before `collecting` and `waiting`, and so before all
    /// locks.
    pub(super) lifetime: Lifetime,
    /// `None` once all memory is given back.
    pub(super) backing: Mutex<Option<Backing>>,
    /// Growth that other threads may wait for has ended.
    pub(super) grown: Condvar,
    pub(super) growth: Growth,
    pub(super) deferred: Mutex<Option<Deferred<Piece>>>,
    /// Held by the thread that collects blocks whose work has finished.
    pub(super) collecting: Mutex<()>,
    /// Held by the thread that waits for all deferred blocks.
    pub(super) waiting: Mutex<()>,
    /// How many blocks the waiting thread has taken out of `deferred`; written with `deferred` locked.
    pub(super) awaited: AtomicUsize,
    pub(super) wait_for_gpu: bool,
    pub(super) grower: Arc<Signal>,
    #[cfg(feature = "share")]
    pub(super) shares: super::share::Shares,
    pub(super) failed: AtomicU64,
    /// Frees of blocks that were not in use, not yet [reported](Self::tell).
    pub(super) strays: AtomicU64,
}

impl HeapInner {
    pub(super) fn new(
        driver: &Driver,
        backing: Backing,
        options: &HeapOptions,
    ) -> Result<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let start = backing.start().0;
        let core = Core::new(start, backing.limit())?;
        let pages = Arc::clone(core.pages());
        let born = Generation::current();
        let host = backing.host_access();
        let gpu = gpu_that_writes(driver, &options.plan);
        let watch = |debug| Watch::new(debug, HeapMemory::new(start, driver, host, gpu));
        let inner = |this: &Weak<Self>| Self {
            pages,
            this: Weak::clone(this),
            id: NEXT.fetch_add(1, Relaxed),
            start,
            limit: backing.limit(),
            host,
            exportable: backing.is_exportable(),
            location: only(&options.plan.nodes),
            driver: driver.clone(),
            scrub: options.scrub_on_free,
            watch: options.debug.clone().map(watch),
            born,
            plain_in: match options.scrub_on_free || options.debug.is_some() {
                true => Generation::NEVER,
                false => born,
            },
            gpu,
            soft_limit: options.soft_limit.clone(),
            thread_cache: options.thread_cache,
            budget: AtomicU64::new(0),
            most_budget: AtomicU64::new(0),
            shared_budget: options.thread_cache.min(backing.limit() / SHARED_PART) / GRANULE,
            takings: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            handles: Apart(AtomicUsize::new(1)),
            core: Reserved::new(core),
            inbox: Apart(Inbox::new()),
            depots: std::array::from_fn(|_| Depot::new(DEPOT)),
            shards: Shards::new(backing.limit()),
            members: Mutex::default(),
            lifetime: Lifetime::new(),
            backing: Mutex::new(Some(backing)),
            grown: Condvar::new(),
            growth: options.plan.growth.unwrap_or_default(),
            deferred: Mutex::new(Some(Deferred::new(driver))),
            collecting: Mutex::default(),
            waiting: Mutex::default(),
            awaited: AtomicUsize::new(0),
            wait_for_gpu: options.wait_for_gpu,
            grower: Arc::new(Signal::new(options.grow_ahead)),
            #[cfg(feature = "share")]
            shares: super::share::Shares::default(),
            failed: AtomicU64::new(0),
            strays: AtomicU64::new(0),
        };
        Ok(Arc::new_cyclic(inner))
    }

    /// Enters the core, after applying the frees in the inbox. Not allowed while a driver call runs. Allowed
    /// after taking a thread's cache, never before.
    pub(super) fn core(&self) -> Inside<'_, Core> {
        let mut core = self.core.lock();
        self.drain(&mut core);
        core
    }

    /// Calls `f` with the core, for a thread with a cache, and updates the background growth's view of free
    /// memory.
    #[inline]
    pub(super) fn with_core<R>(&self, visitor: &mut Visitor, f: impl FnOnce(&mut Core) -> R) -> R {
        self.core.with(visitor, |core| {
            self.drain(core);
            let got = f(core);
            self.grower.look(core);
            got
        })
    }

    /// Calls `f` with the core, for a thread with or without a cache.
    pub(super) fn in_core<R>(&self, f: impl Fn(&mut Core) -> R) -> R {
        member::with(self, |local| Some(self.with_core(&mut local.visitor, &f))).unwrap_or_else(
            || {
                let mut core = self.core();
                let got = f(&mut core);
                self.grower.look(&core);
                got
            },
        )
    }

    #[inline]
    fn drain(&self, core: &mut Core) {
        if !self.inbox.0.is_empty() {
            for load in self.inbox.0.take_all() {
                self.take_in(core, load);
            }
        }
    }

    /// Makes a block findable by its address.
    #[cfg_attr(
        not(any(feature = "allocator-api2", feature = "nightly")),
        allow(dead_code, reason = "for collections")
    )]
    #[inline]
    pub(super) fn name(&self, piece: &Piece) {
        let Kind::Range(node) = piece.key.kind() else {
            return;
        };
        self.pages.set(piece.offset, Owner::Range(node));
    }

    /// Returns the block that begins at an address and was [named](Self::name), for callers that know only
    /// the address.
    #[cfg_attr(
        not(any(feature = "allocator-api2", feature = "nightly")),
        allow(dead_code, reason = "for collections")
    )]
    #[inline]
    pub(super) fn piece_at(&self, address: u64, bytes: u64, align: u64) -> Result<Piece> {
        if let Some(watch) = &self.watch {
            return watch.piece_at(address, bytes, align);
        }
        let offset = address.wrapping_sub(self.start);
        if let Some(class) = Class::of(bytes, align) {
            return Ok(Piece::small(offset, bytes, class));
        }
        let Some(Owner::Range(node)) = self.pages.get(offset) else {
            let why = format!("no block of {bytes} bytes begins at {address:#x}");
            return Err(Error::invalid("address", why));
        };
        let key = Key::range(node, Core::range_granules(bytes) as u32); // no more than the block has
        Ok(Piece { offset, bytes, key })
    }
}

fn only(nodes: &[Location]) -> Option<Location> {
    match *nodes {
        [node] => Some(node),
        _ => None,
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
