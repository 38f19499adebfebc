//! Options to build a heap.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use egmem_core::Backing;

use super::backing::Plan;
use super::debug::DebugOptions;
use crate::Growth;
use crate::driver::{Access, HandleTypes, Location};
use crate::ledger::Label;

/// The default limit of a thread's cache, in bytes.
const THREAD_CACHE: u64 = 4 << 20;

/// Options for a heap; [`build`](Self::build) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct HeapOptions {
    pub(super) plan: Plan,
    pub(super) reserve: u64,
    pub(super) grow_ahead: u64,
    pub(super) decay: Option<Duration>,
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
            decay: None,
            soft_limit: None,
            thread_cache: THREAD_CACHE,
            scrub_on_free: false,
            debug: None,
            wait_for_gpu: false,
        }
    }

    /// Sets which locations may read and write besides the host. The default is every GPU that can reach the
    /// memory.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.plan.access.set_all(who);
        self
    }

    /// Sets the access of one location; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, who: impl Into<Location>, access: Access) -> Self {
        self.plan.access.set(who.into(), access);
        self
    }

    /// Sets what chunks are made of; by default [`Backing::Auto`]: one decision for all chunks when the heap is built, which
    /// [`Heap::backing`](super::Heap::backing) returns with its reason. Auto takes registered memory on machines with discrete
    /// GPUs for a heap on host nodes that the CPU and all GPUs may read and write and that is not shared by fabric handles. It
    /// takes the driver's memory everywhere else.
    ///
    /// Each registered chunk is a registration of its own, and the driver copies nothing across two. So a block of such a heap
    /// lies in one chunk, and one copy by the driver can take all of it, but:
    ///
    /// - A block larger than a [chunk](Self::chunk) gets a chunk of its size, beyond [`Growth::MAX_CHUNK`] too unless it can be
    ///   shared: one registration by one driver call, for which calls of other processes wait longer. On an H100 (driver
    ///   580.159.04), 99.9 % of such calls took at most 4.2 to 6.1 ms, by their kind, beside registrations of 64 MiB, and 17.6
    ///   to 19.4 ms beside those of 1 GiB.
    /// - Free bytes of two chunks serve no block together. When a large block finds no room, the heap gives back
    ///   chunks without a block and makes one chunk of them.
    /// - Blocks, also of collections, grow in place within their chunk.
    /// - Whatever gives a chunk back waits for all work of the GPUs: [`Heap::trim`](super::Heap::trim), [`decay`](Self::decay), and
    ///   an allocation that grows the heap where idle chunks must make room. Beside a kernel that waits for the CPU that is
    ///   a deadlock: take [`Backing::Driver`] there.
    ///
    /// [`build`](Self::build) fails with [`Error::InvalidArgument`](crate::Error::InvalidArgument) for
    /// [`Backing::Registered`] where it cannot be, with the reason.
    ///
    /// ```
    /// # use egmem::{Backing, Driver, Heap, Machine, driver::NodeId};
    /// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
    /// let heap = Heap::on(NodeId(0)).limit(1 << 30).build(&driver)?;
    /// assert_eq!(heap.backing().backing, Backing::Registered);
    /// let heap = Heap::on(NodeId(0)).limit(1 << 30).backing(Backing::Driver).build(&driver)?;
    /// assert_eq!(heap.backing().to_string(), "driver: the program asked for it");
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub const fn backing(mut self, backing: Backing) -> Self {
        self.plan.backing = backing;
        self
    }

    /// Sets the name of the heap's chunks in the [ledger](crate::ledger). Blocks have no entries.
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.plan.label = Some(label.into());
        self
    }

    /// Sets the most memory the heap may have, in bytes: at least 2 MiB, rounded down to a multiple of 2 MiB.
    /// The heap reserves as many addresses at once. The default is the nodes' memory; for
    /// [`Heap::spread`](super::Heap::spread) it is the sum of the shares, which is also the maximum.
    pub const fn limit(mut self, bytes: u64) -> Self {
        self.plan.limit = Some(bytes);
        self
    }

    /// Sets how much memory the heap adds at a time, in bytes: at least 1, rounded up to a multiple of 2 MiB;
    /// by default 64 MiB, or a 16,384th of a limit above 1 TiB, because Linux allows a process 65,530 mappings by default. A
    /// chunk has at most [`Growth::MAX_CHUNK`] bytes, and so has a block that can be shared. Larger
    /// chunks need fewer driver calls; smaller ones can be given back sooner. The heap uses smaller chunks if memory is short
    /// or a limit is near.
    pub const fn chunk(mut self, bytes: u64) -> Self {
        self.plan.chunk = Some(bytes);
        self
    }

    /// Sets the size of chunks, unless [`chunk`](Self::chunk) does, and the rest after each but the last that a request
    /// needs. By default a heap does not rest. While it rests, other threads may allocate and grow the heap. A
    /// [`Heap::reserve`](super::Heap::reserve) and background growth rest too.
    ///
    /// ```
    /// # use egmem::{Driver, Growth, Heap, Machine, driver::NodeId};
    /// # let driver = Driver::simulated(Machine::gh200())?;
    /// let heap = Heap::on(NodeId(0)).growth(Growth::gentle()).build(&driver)?;
    /// heap.reserve(64 << 20)?;
    /// assert_eq!(heap.stats().driver.create, 4); // of 16 MiB each
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub const fn growth(mut self, growth: Growth) -> Self {
        self.plan.growth = Some(growth);
        self
    }

    /// Sets how much memory the heap has from the start, in bytes; by default none.
    pub const fn reserve(mut self, bytes: u64) -> Self {
        self.reserve = bytes;
        self
    }

    /// Sets how many bytes the heap keeps free in advance: a background thread adds memory, so that an
    /// allocation need not wait for the driver. By default 0: memory is added when it is needed.
    ///
    /// The thread stops at the limit and at the [soft limit](Self::soft_limit). After an error from the
    /// driver it resumes at the latest with the next allocation. It also adds memory again
    /// that [`Heap::trim`](super::Heap::trim) gave back, at the latest then.
    pub const fn grow_ahead(mut self, bytes: u64) -> Self {
        self.grow_ahead = bytes;
        self
    }

    /// Has memory go back to the machine that was not needed for `idle`, at the latest after twice as long, as by
    /// [`Heap::trim_to`](super::Heap::trim_to): in whole chunks without a block. By default no memory goes back by itself.
    ///
    /// A background thread looks eight times in `idle` how much was in use at most, and once a millisecond at most: a time below
    /// 8 ms counts as 8 ms. It leaves the memory that the heap
    /// had [from the start](Self::reserve), and the bytes that it [keeps free](Self::grow_ahead). Between two chunks it lets threads
    /// that need memory go first, and rests as [`growth`](Self::growth) says. It does nothing in [debug
    /// mode](super::debug).
    pub const fn decay(mut self, idle: Duration) -> Self {
        self.decay = Some(idle);
        self
    }

    /// Sets a soft limit: before the heap grows beyond `bytes`, it calls `relieve`, which may free blocks, of
    /// this heap too, and have the allocation retried. Below the soft limit the heap adds smaller chunks
    /// rather than exceed it; once `relieve` allows growth, it adds whole chunks again.
    ///
    /// The allocating thread calls `relieve` with no lock of the heap held, and several threads may call it
    /// at once. Locks of the allocating code are still held: a `relieve` that takes the same lock (a cache's
    /// mutex, under which the cache allocates) deadlocks. Use `try_lock` there, and otherwise answer
    /// [`Relief::Grow`] or [`Relief::Refuse`]. Background growth stops at `bytes` and never calls `relieve`;
    /// [`Heap::reserve`](super::Heap::reserve) ignores the soft limit. A `relieve` that owns handles or
    /// blocks of this heap keeps the heap from ending: give it a [`Weak`](std::sync::Weak) reference to the
    /// blocks that it frees.
    pub fn soft_limit(
        mut self,
        bytes: u64,
        relieve: impl Fn(&Pressure) -> Relief + Send + Sync + 'static,
    ) -> Self {
        self.soft_limit = Some(SoftLimit {
            bytes,
            relieve: Callback(Arc::new(relieve)),
        });
        self
    }

    /// Sets how chunks may be shared; by default not at all. In a heap that can be shared, a block lies in
    /// one chunk and is at most as large as a chunk can be. Collections cannot allocate from such a heap, as
    /// `Heap::check_collections` says.
    pub const fn handle_types(mut self, handle_types: HandleTypes) -> Self {
        self.plan.handle_types = handle_types;
        self
    }

    /// Makes chunks shareable as widely as this machine allows:
    /// [`handle_types_of`](crate::capability::shareable::handle_types_of). Collections need a heap
    /// without this: `Heap::check_collections`.
    pub const fn shareable(mut self) -> Self {
        self.plan.shareable = true;
        self
    }

    /// Sets whether to ask the driver for more memory than a node has free. Pinned memory cannot be swapped
    /// out, so the kernel may kill processes to provide it.
    pub const fn overcommit(mut self, on: bool) -> Self {
        self.plan.overcommit = on;
        self
    }

    /// Sets how many bytes of blocks above 2 KiB each thread may cache; by default 4 MiB. A thread that uses
    /// the heap alone caches blocks up to 1 MiB, at most a 512th of the heap's memory, or 128 KiB if that is
    /// more. While several threads allocate such blocks, each caches blocks up to 4 MiB, at most a 16th of the
    /// heap's limit, and takes memory for blocks up to 1 MiB, or 2 MiB once it has 64 MiB, in segments of
    /// 4 MiB, or less if this is less or no free range is that large; threads that use more take larger ones, up to
    /// an eighth of the bytes that they use.
    /// With less than 2 MiB there are none. With 0 a thread caches only small blocks, at most 64 KiB of each of
    /// their 40 size classes, which this setting does not change.
    ///
    /// [`HeapStats::cached`](super::HeapStats::cached) counts the cached bytes. No allocation fails because
    /// of them: when memory is short, the heap empties all threads' caches first.
    pub const fn thread_cache(mut self, bytes: u64) -> Self {
        self.thread_cache = bytes;
        self
    }

    /// Sets whether blocks are overwritten with zeros when they are freed, for memory that changes owners.
    /// The CPU writes the zeros, or a GPU if the CPU has no access.
    pub const fn scrub_on_free(mut self, on: bool) -> Self {
        self.scrub_on_free = on;
        self
    }

    /// Turns the [debug mode](super::debug) on: it finds writes beside blocks and to freed blocks, and
    /// records where each block was allocated. For tests: it is slow, and blocks take more memory.
    pub fn debug(mut self, options: DebugOptions) -> Self {
        self.debug = Some(options);
        self
    }

    /// Sets whether an allocation that would fail for lack of memory first waits for the GPU work that blocks
    /// were [freed after](super::Block::free_after), and collects those blocks, as
    /// [`Heap::collect_all`](super::Heap::collect_all) does; see there for the dangers of such a wait. By
    /// default an allocation collects only blocks whose work has finished, and fails if they do not suffice.
    ///
    /// [`Heap::reserve`](super::Heap::reserve) and background growth never wait.
    pub const fn wait_for_gpu(mut self, on: bool) -> Self {
        self.wait_for_gpu = on;
        self
    }
}

/// The state of the heap when it asks for [relief](Relief).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pressure {
    /// Bytes of the allocation that found no room.
    pub requested: u64,
    /// Bytes of memory that the heap has.
    pub backed: u64,
    /// The soft limit in bytes.
    pub soft_limit: u64,
    /// How often this allocation has called the callback before.
    pub asked: u32,
}

/// The callback's answer when an allocation would grow the heap beyond its soft limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// The callback freed blocks: retry, and call it again if that fails. A callback that always answers
    /// `Retry` makes the allocation spin forever, so answer it only after freeing something, or check
    /// [`Pressure::asked`].
    Retry,
    /// Grow beyond the soft limit.
    Grow,
    /// Fail with [`Error::HeapFull`](crate::Error::HeapFull).
    Refuse,
}

/// A heap's soft limit and its callback.
#[derive(Clone, Debug)]
pub(super) struct SoftLimit {
    pub(super) bytes: u64,
    pub(super) relieve: Callback<dyn Fn(&Pressure) -> Relief + Send + Sync>,
}

/// A function of the program.
pub(crate) struct Callback<F: ?Sized>(pub(crate) Arc<F>);

impl<F: ?Sized> Clone for Callback<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F: ?Sized> fmt::Debug for Callback<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}
