//! What the handles, blocks and threads of a heap share: the way of a block from the core to a user
//! and back.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

use super::backing::{Backing, Plan};
use super::cache::{
    Contents, Depot, Inbox, Inside, Local, Magazine, Medium, Reserved, Visitor, member,
};
use super::classes::{CLASSES, Class, FRAME};
use super::core::{Core, Extent, Frames, GRANULE, NodeId, Owner};
use super::deferred::Deferred;
use super::grower::Signal;
use super::life::Members;
use super::limits::SoftLimit;
use crate::driver::{Access, Driver, Location};
use crate::{Error, Result};

/// The largest blocks that threads keep for themselves, in bytes.
const MAX_MEDIUM: u64 = 1 << 20;

/// Full magazines of each class that wait for a thread, at most.
const DEPOT: usize = 4;

/// A block, as the heap knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// In bytes from the heap's start.
    pub(super) offset: u64,
    /// As asked for.
    pub(super) bytes: u64,
    pub(super) key: Key,
}

/// By what the core knows a block: a class or a node, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

/// What a [`Key`] stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Small(Class),
    Range(NodeId),
}

impl Key {
    /// No block's.
    pub(super) const NONE: Self = Self(u64::MAX);
    const SMALL: u64 = 1 << 32;

    #[inline]
    fn small(class: Class) -> Self {
        Self(Self::SMALL | class.index() as u64)
    }

    #[inline]
    fn range(node: NodeId) -> Self {
        Self(node.number().into())
    }

    #[inline]
    pub(super) fn kind(self) -> Kind {
        match self.0 & Self::SMALL {
            0 => Kind::Range(NodeId::from_number(self.0 as u32)),
            _ => Kind::Small(Class::from_index(self.0 as u32 as usize)),
        }
    }
}

/// Blocks on their way back to the core.
#[derive(Debug)]
pub(super) enum Load {
    Small(Box<Magazine>),
    Ranges(Vec<NodeId>),
}

/// On cache lines of its own, since all threads write to it.
#[repr(align(128))]
pub(super) struct Apart<T>(pub(super) T);

/// See the module.
pub(super) struct Shared {
    /// For threads and blocks that come to need it to stay.
    pub(super) this: Weak<Self>,
    /// Never used again in this process.
    pub(super) id: u64,
    /// The address of offset 0.
    pub(super) start: u64,
    pub(super) limit: u64,
    pub(super) host: Access,
    /// None where its chunks lie in several places.
    pub(super) location: Option<Location>,
    pub(super) driver: Driver,
    pub(super) scrub: bool,
    /// Of the debug mode.
    pub(super) watch: Option<super::debug::Watch>,
    /// Whether a block's end takes more than giving it back.
    pub(super) careful: bool,
    /// One that may write, if any.
    pub(super) gpu: Option<i32>,
    pub(super) soft_limit: Option<SoftLimit>,
    pub(super) thread_cache: u64,
    /// Granules of larger blocks that a thread may keep.
    pub(super) budget: AtomicU64,
    /// Set once, by [`close`](Self::close).
    pub(super) closed: AtomicBool,
    pub(super) handles: Apart<AtomicUsize>,
    core: Reserved<Core>,
    /// The core's, to look up what is named there.
    #[cfg_attr(
        not(any(feature = "allocator-api2", feature = "nightly")),
        allow(dead_code, reason = "for collections")
    )]
    frames: Arc<Frames>,
    /// What could not be taken back since the core was busy: whoever has it next takes this back first.
    inbox: Apart<Inbox<Load>>,
    /// Full magazines, from threads that free to threads that allocate.
    depots: [Depot<Magazine>; CLASSES],
    pub(super) members: Mutex<Members>,
    /// None once all memory is given back.
    pub(super) backing: Mutex<Option<Backing>>,
    pub(super) deferred: Mutex<Option<Deferred<Piece>>>,
    /// Held by the thread that waits for all of them.
    pub(super) waiting: Mutex<()>,
    /// How many blocks it has taken out of `deferred`, which it locks to write this.
    pub(super) awaited: AtomicUsize,
    pub(super) wait_for_gpu: bool,
    pub(super) grower: Arc<Signal>,
    #[cfg(feature = "share")]
    pub(super) shares: super::share::Shares,
    pub(super) failed: AtomicU64,
}

impl Shared {
    pub(super) fn new(
        driver: &Driver,
        backing: Backing,
        options: &super::HeapOptions,
    ) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let start = backing.start().0;
        let core = Core::new(start, backing.limit());
        let frames = Arc::clone(core.frames());
        let shared = |this: &Weak<Self>| Self {
            frames,
            this: Weak::clone(this),
            id: NEXT.fetch_add(1, Relaxed),
            start,
            limit: backing.limit(),
            host: backing.host_access(),
            location: match options.plan.nodes[..] {
                [node] => Some(node),
                _ => None,
            },
            driver: driver.clone(),
            scrub: options.scrub_on_free,
            watch: options.debug.clone().map(super::debug::Watch::new),
            careful: options.scrub_on_free || options.debug.is_some(),
            gpu: gpu_that_writes(driver, &options.plan),
            soft_limit: options.soft_limit.clone(),
            thread_cache: options.thread_cache,
            budget: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            handles: Apart(AtomicUsize::new(1)),
            core: Reserved::new(core),
            inbox: Apart(Inbox::new()),
            depots: std::array::from_fn(|_| Depot::new(DEPOT)),
            members: Mutex::default(),
            backing: Mutex::new(Some(backing)),
            deferred: Mutex::new(Some(Deferred::new(driver))),
            waiting: Mutex::default(),
            awaited: AtomicUsize::new(0),
            wait_for_gpu: options.wait_for_gpu,
            grower: Arc::new(Signal::new(options.grow_ahead)),
            #[cfg(feature = "share")]
            shares: super::share::Shares::default(),
            failed: AtomicU64::new(0),
        };
        Arc::new_cyclic(shared)
    }

    /// The core, with all that was sent to it. Never while a driver is called; after a thread's cache,
    /// never before one.
    pub(super) fn core(&self) -> Inside<'_, Core> {
        let mut core = self.core.lock();
        self.drain(&mut core);
        core
    }

    /// What `f` gets from it, for a thread with a cache. Growth ahead of need looks at what is left.
    #[inline]
    fn with_core<R>(&self, visitor: &mut Visitor, f: impl FnOnce(&mut Core) -> R) -> R {
        self.core.with(visitor, |core| {
            self.drain(core);
            let got = f(core);
            self.grower.look(core.free_bytes());
            got
        })
    }

    /// The same, for a thread with a cache or without.
    pub(super) fn in_core<R>(&self, f: impl Fn(&mut Core) -> R) -> R {
        member::with(self, |local| Some(self.with_core(&mut local.visitor, &f))).unwrap_or_else(
            || {
                let mut core = self.core();
                let got = f(&mut core);
                self.grower.look(core.free_bytes());
                got
            },
        )
    }

    #[inline]
    fn drain(&self, core: &mut Core) {
        if !self.inbox.0.is_empty() {
            for load in self.inbox.0.take_all() {
                take_back(core, load);
            }
        }
    }

    /// Gives what leaves a cache back to the core, at once or by whoever has it now.
    fn send_ranges(&self, local: &mut Local) {
        let medium = &mut local.medium;
        let give = |core: &mut Core| take_leaving(core, medium);
        if self.core.try_with(&mut local.visitor, give).is_none() {
            self.send(Load::Ranges(local.medium.take_leaving()));
        }
    }

    /// Leaves blocks for whoever has the core next.
    fn send(&self, load: Load) {
        self.inbox.0.push(load);
    }

    /// Where a block of `bytes`, more than 0, is, at an address that is a multiple of `align`: one that
    /// the thread's cache has, or gets from what feeds it; [`Key::NONE`] where that is not to be had.
    ///
    /// In two words, which come back in registers: a piece would go through memory, written by words and
    /// read by pairs of them, which the processor cannot forward.
    #[inline]
    pub(super) fn allocate_cached(&self, bytes: u64, align: u64) -> (u64, Key) {
        let mut offset = 0;
        let mut key = Key::NONE;
        if let Some(class) = Class::of(bytes, align) {
            member::with(self, |local| {
                let found = match local.small[class.index()].pop() {
                    Some(found) => found,
                    None => self.refill(local, class)?,
                };
                offset = found;
                key = Key::small(class);
                local.tally.allocate(bytes);
                Some(())
            });
        } else {
            member::with(self, |local| {
                let found = if bytes <= MAX_MEDIUM && align <= GRANULE {
                    let size = granules(bytes);
                    match local.medium.pop(size) {
                        Some(found) => found,
                        None => self.fetch(local, size)?,
                    }
                } else {
                    self.carve(local, bytes, align)?
                };
                offset = found.offset;
                key = Key::range(found.node);
                local.tally.allocate(bytes);
                Some(())
            });
        }
        (offset, key)
    }

    /// A small block, from other threads or from the core.
    #[cold]
    #[inline(never)]
    fn refill(&self, local: &mut Local, class: Class) -> Option<u64> {
        let shelf = &mut local.small[class.index()];
        match self.depots[class.index()].take() {
            Some(full) => shelf.load(full),
            None => {
                let mut magazine = shelf.take_empty();
                let grant = local.grants[class.index()].next(class);
                self.with_core(&mut local.visitor, |core| {
                    magazine.fill(grant, |out| core.fill(class, out));
                });
                shelf.load(magazine);
            }
        }
        shelf.pop()
    }

    /// A larger block from the core, and some more of its size where a thread wants many.
    #[cold]
    #[inline(never)]
    fn fetch(&self, local: &mut Local, size: u32) -> Option<Extent> {
        let budget = self.budget.load(Relaxed);
        let Local {
            medium, visitor, ..
        } = local;
        let more = match medium.pays() {
            true => medium.wanted(size, budget) - 1,
            false => 0,
        };
        let bytes = u64::from(size) * GRANULE;
        self.with_core(visitor, |core| {
            take_leaving(core, medium);
            let extent = core.allocate(bytes, 1)?;
            for _ in 0..more {
                let Some(extent) = core.allocate(bytes, 1) else {
                    break;
                };
                medium.push(size, extent);
            }
            Some(extent)
        })
    }

    /// A large block, or one of large alignment, from the core.
    #[inline(never)]
    fn carve(&self, local: &mut Local, bytes: u64, align: u64) -> Option<Extent> {
        let Local {
            medium, visitor, ..
        } = local;
        self.with_core(visitor, |core| {
            take_leaving(core, medium);
            core.allocate(bytes, align)
        })
    }

    /// Straight from the core, and from new memory where there is none left.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_slowly(
        &self,
        bytes: u64,
        align: u64,
        place: &'static std::panic::Location<'static>,
    ) -> Result<Piece> {
        let piece = match &self.watch {
            Some(watch) => watch.allocate(self, bytes, align, place)?,
            None => self.take_new(bytes, align)?,
        };
        let counted = member::with(self, |local| {
            local.tally.allocate(bytes);
            Some(())
        });
        if counted.is_none() {
            self.note_without_member(|tally| tally.allocate(bytes));
        }
        Ok(piece)
    }

    /// The same, not yet counted.
    pub(super) fn take_new(&self, bytes: u64, align: u64) -> Result<Piece> {
        let class = Class::of(bytes, align);
        let attempt = |core: &mut Core| {
            let piece = match class {
                Some(class) => {
                    let mut offset = [0];
                    let filled = core.fill(class, &mut offset);
                    (filled == 1).then(|| Piece::small(offset[0], bytes, class))?
                }
                None => Piece::range(core.allocate(bytes, align)?, bytes),
            };
            self.grower.look(core.free_bytes());
            Some(piece)
        };
        self.with_memory(bytes, align, attempt).inspect_err(|_| {
            self.failed.fetch_add(1, Relaxed);
        })
    }

    /// Takes a block back that its user does not use any more, nor a GPU.
    ///
    /// # Safety
    /// The heap is there, which the block sees to: nothing of the heap is used after the call, unless
    /// a handle is held. The piece is a block's of this heap, and no longer anybody else's.
    #[inline]
    pub(super) unsafe fn free(&self, piece: &Piece) {
        let done = member::with(self, |local| {
            local.tally.free(piece.bytes);
            match piece.key.kind() {
                Kind::Small(class) => {
                    let shelf = &mut local.small[class.index()];
                    if let Some(full) = shelf.push(Magazine::rounds(class), piece.offset) {
                        self.hand_on(&mut local.visitor, class, full);
                    }
                }
                Kind::Range(node) => self.keep(local, piece, node),
            }
            Some(())
        });
        if done.is_none() {
            // SAFETY: the caller's promise.
            unsafe { self.free_without_member(*piece) };
        }
    }

    #[inline]
    fn keep(&self, local: &mut Local, piece: &Piece, node: NodeId) {
        let size = granules(piece.bytes);
        let budget = self.budget.load(Relaxed);
        if piece.bytes > MAX_MEDIUM || u64::from(size) > budget {
            return self.send_large(local, node, size);
        }
        let offset = piece.offset;
        if !local.medium.keeps() {
            let freed = self
                .core
                .if_reserved(&mut local.visitor, |core| core.free(node));
            if freed.is_some() {
                return;
            }
            local.medium.pass_on(size, node);
        } else {
            local.medium.put(size, Extent { offset, node });
        }
        if local.medium.is_over(budget) {
            self.send_ranges(local);
        }
    }

    /// Gives a block back that no cache keeps.
    #[inline]
    fn send_large(&self, local: &mut Local, node: NodeId, size: u32) {
        let freed = self
            .core
            .try_with(&mut local.visitor, |core| core.free(node));
        if freed.is_none() {
            local.medium.pass_on(size, node);
            self.send(Load::Ranges(local.medium.take_leaving()));
        }
    }

    #[cold]
    fn hand_on(&self, visitor: &mut Visitor, class: Class, full: Box<Magazine>) {
        let Err(full) = self.depots[class.index()].put(full) else {
            return;
        };
        let mut full = Some(full);
        let give = |core: &mut Core| {
            let full = full.take();
            full.into_iter()
                .for_each(|full| take_back(core, Load::Small(full)));
        };
        self.core.try_with(visitor, give);
        if let Some(full) = full {
            self.send(Load::Small(full));
        }
    }

    /// Gives a block straight back to the core.
    pub(super) fn take_back(&self, piece: Piece) {
        let mut core = self.core();
        match piece.key.kind() {
            Kind::Small(_) => give(&mut core, piece.offset),
            Kind::Range(node) => core.free(node),
        }
    }

    /// Gives back what a cache had.
    pub(super) fn take_back_all(core: &mut Core, contents: Contents) {
        for magazine in contents.small {
            take_back(core, Load::Small(magazine));
        }
        take_back(core, Load::Ranges(contents.medium));
    }

    /// Gives back what waits in depots.
    pub(super) fn empty_depots(&self, core: &mut Core) {
        for depot in &self.depots {
            while let Some(full) = depot.take() {
                take_back(core, Load::Small(full));
            }
        }
    }

    /// Bytes of what waits between threads.
    pub(super) fn waiting_bytes(&self) -> u64 {
        // Full magazines, all but those that a thread is about to take.
        let depots = Class::all().zip(&self.depots);
        let full = |class| Magazine::rounds(class) as u64 * class.bytes();
        depots
            .map(|(class, depot)| depot.len() as u64 * full(class))
            .sum()
    }

    /// Sees to it that a block is found by its address.
    #[cfg_attr(
        not(any(feature = "allocator-api2", feature = "nightly")),
        allow(dead_code, reason = "for collections")
    )]
    #[inline]
    pub(super) fn name(&self, piece: &Piece) {
        if let Kind::Range(node) = piece.key.kind() {
            self.frames.set(piece.offset, Owner::Range(node));
        }
    }

    /// The block that begins at an address and was [named](Self::name), for who has no more than that.
    #[cfg_attr(
        not(any(feature = "allocator-api2", feature = "nightly")),
        allow(dead_code, reason = "for collections")
    )]
    #[inline]
    pub(super) fn piece_at(&self, address: u64, bytes: u64, align: u64) -> Result<Piece> {
        if let Some(watch) = &self.watch {
            return watch.piece_at(self, address, bytes, align);
        }
        let offset = address.wrapping_sub(self.start);
        if let Some(class) = Class::of(bytes, align) {
            return Ok(Piece::small(offset, bytes, class));
        }
        match self.frames.get(offset) {
            Some(Owner::Range(node)) => Ok(Piece::range(Extent { offset, node }, bytes)),
            _ => Err(Error::invalid(
                "address",
                format!("no block of {bytes} bytes begins at {address:#x}"),
            )),
        }
    }
}

impl Piece {
    #[inline]
    fn small(offset: u64, bytes: u64, class: Class) -> Self {
        let key = Key::small(class);
        Self { offset, bytes, key }
    }

    #[inline]
    pub(super) fn range(extent: Extent, bytes: u64) -> Self {
        Self {
            offset: extent.offset,
            bytes,
            key: Key::range(extent.node),
        }
    }

    /// Where it lies, with what it takes.
    pub(super) fn range_taken(&self) -> std::ops::Range<u64> {
        self.offset..self.offset + self.taken()
    }

    /// What the block takes, in bytes.
    pub(super) fn taken(&self) -> u64 {
        match self.key.kind() {
            Kind::Small(class) => class.bytes(),
            Kind::Range(_) => Core::range_bytes(self.bytes).unwrap_or(self.bytes),
        }
    }
}

/// What a larger block takes.
#[inline]
fn granules(bytes: u64) -> u32 {
    bytes.max(FRAME).div_ceil(GRANULE) as u32
}

fn gpu_that_writes(driver: &Driver, plan: &Plan) -> Option<i32> {
    let ordinal = |location| match location {
        Location::Device(gpu) => Some(gpu),
        _ => None,
    };
    match &plan.gpus {
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

/// Has the core take back what leaves a cache.
#[inline]
fn take_leaving(core: &mut Core, medium: &mut Medium) {
    if !medium.leaving().is_empty() {
        core.free_all(medium.leaving());
        medium.left();
    }
}

fn take_back(core: &mut Core, load: Load) {
    match load {
        Load::Small(full) => full.offsets().iter().for_each(|&at| give(core, at)),
        Load::Ranges(nodes) => core.free_all(&nodes),
    }
}

fn give(core: &mut Core, offset: u64) {
    if !core.give(offset) {
        // Only unsafe code can do this. What is free stays as it is.
        tracing::error!(offset, "a block was given back that is not in use");
    }
}
