//! A node's memory allocated in advance: pinning is slow, handing out pinned memory is fast.
//!
//! Each node has two threads. One creates chunks until the reserve is full, the other zeroes returned memory.
//! Requests take chunks and create only the missing bytes.

mod request;
mod threads;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::free_chunks::{FreeChunks, HasBytes};
use super::quota::Charge;
use super::reuse_policy::{Past, Reuse};
use super::scrub::Scrubber;
use crate::backing::Chosen;
use crate::driver::{HandleTypes, NodeId};
use crate::per_driver::lock;
use crate::size::{Granularity, PaddedSize};
use crate::vmm::PhysicalMemory;
use crate::{Driver, Error, Growth, Result};

/// The parameters of a node's reserve.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub node: NodeId,
    pub handle_types: HandleTypes,
    pub backing: Chosen,
    /// Bytes to keep ready for any peer.
    pub target: u64,
    /// The most bytes to keep for peers that used them before. Returned memory for any peer is kept up to the
    /// larger of this and `target`.
    pub keep: u64,
    /// The size of a chunk, and the smallest size that it is halved to when memory is short.
    pub chunk: u64,
    pub min_chunk: u64,
    /// The most bytes that the service pins on the node.
    pub cap: u64,
    /// Bytes that the node is to have free beyond that.
    pub headroom: u64,
    /// How long to leave the driver to a client that has just been given memory and imports it.
    pub quiet: Duration,
    /// How long to wait after a failure before filling the reserve again.
    pub retry: Duration,
    pub reuse: Reuse,
    pub scrubber: Scrubber,
    pub scrub_threads: usize,
}

/// Physical memory, and which peers have seen it.
#[derive(Debug)]
pub(crate) struct Chunk<P> {
    // In this order: the memory is released before its charge ends.
    pub memory: PhysicalMemory,
    /// The charge of the peer that had it, unless the service itself or a name's charge counts the bytes.
    pub charge: Option<Charge>,
    pub past: Past<P>,
}

impl<P> HasBytes for Chunk<P> {
    fn bytes(&self) -> u64 {
        self.memory.size().padded()
    }
}

/// A reserve's counters since its start.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub made_chunks: AtomicU64,
    pub made_bytes: AtomicU64,
    pub failed_chunks: AtomicU64,
    pub taken_warm_bytes: AtomicU64,
    pub taken_cold_bytes: AtomicU64,
    pub scrubbed_bytes: AtomicU64,
    pub scrub_failures: AtomicU64,
    pub discarded_tainted_bytes: AtomicU64,
    pub discarded_policy_bytes: AtomicU64,
    pub evicted_bytes: AtomicU64,
}

/// A reserve's current bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Levels {
    pub target: u64,
    /// Ready for any peer.
    pub warm: u64,
    /// Ready for one peer each.
    pub kept: u64,
    /// Waiting to be zeroed.
    pub dirty: u64,
    /// All that the service has pinned on the node, including memory in use.
    pub pinned: u64,
}

#[derive(Debug)]
struct ReserveState<P> {
    free_chunks: FreeChunks<P, Chunk<P>>,
    dirty: VecDeque<(Chunk<P>, Option<P>)>,
    /// Bytes of `dirty` and of the chunk being zeroed, by future owner.
    dirty_for_anyone: u64,
    dirty_for_owners: u64,
    /// Bytes that the filling thread is creating.
    filling: u64,
    /// Bytes of all chunks that exist or are being created.
    pinned: u64,
    /// The size of the next chunk.
    chunk: u64,
    /// Requests that are creating memory: filling waits for them.
    demands: usize,
    /// When memory was last taken.
    taken: Option<Instant>,
    /// The result of the first filling, once it has ended.
    filled: Option<Result<()>>,
    /// How many tenths of the first filling the log has.
    logged: u64,
    stop: bool,
}

impl<P> ReserveState<P> {
    /// Returns the bytes that wait to be zeroed, or are being zeroed, for this owner.
    const fn dirty(&mut self, owner: Option<&P>) -> &mut u64 {
        match owner {
            None => &mut self.dirty_for_anyone,
            Some(_) => &mut self.dirty_for_owners,
        }
    }

    /// Returns the bytes for any peer that exist, or will exist without creating more.
    fn warm_soon(&self) -> u64
    where
        P: Clone + Eq,
    {
        self.free_chunks.warm() + self.dirty_for_anyone + self.filling
    }

    /// Returns the bytes for single peers that exist, or will exist once zeroed.
    fn kept_soon(&self) -> u64
    where
        P: Clone + Eq,
    {
        self.free_chunks.kept() + self.dirty_for_owners
    }
}

#[derive(Debug)]
struct SharedReserve<P> {
    driver: Driver,
    plan: Plan,
    /// All sizes are multiples of this.
    granule: Granularity,
    state: Mutex<ReserveState<P>>,
    /// Wakes both threads after a change.
    changed: Condvar,
    counters: Counters,
    on_filled: Box<dyn OnFilled>,
}

/// A callback for the end of the first filling.
pub(crate) trait OnFilled: std::fmt::Debug + Send + Sync {
    /// The first filling has ended; called once, by the reserve's thread.
    fn filled(&self, result: &Result<()>);
}

/// A node's reserve; dropping it ends its threads and gives all its memory back.
#[derive(Debug)]
pub(crate) struct Reserve<P: Send + 'static> {
    shared: Arc<SharedReserve<P>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<P: Clone + Eq + Send + 'static> Reserve<P> {
    /// Starts to fill a reserve.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) if a thread cannot be started; the driver's errors.
    pub fn start(driver: &Driver, mut plan: Plan, on_filled: Box<dyn OnFilled>) -> Result<Self> {
        let granule = request::options(&plan).granularity_of(driver)?;
        let whole = |bytes: u64| match bytes {
            0 => Ok(0),
            bytes => PaddedSize::new(bytes, granule).map(PaddedSize::padded),
        };
        plan.target = whole(plan.target)?;
        plan.min_chunk = Growth::chunk_in(granule, plan.min_chunk);
        plan.chunk = Growth::chunk_in(granule, plan.chunk.max(plan.min_chunk));
        let shared = Arc::new(SharedReserve {
            driver: driver.clone(),
            granule,
            state: Mutex::new(ReserveState {
                free_chunks: FreeChunks::default(),
                dirty: VecDeque::new(),
                dirty_for_anyone: 0,
                dirty_for_owners: 0,
                filling: 0,
                pinned: 0,
                chunk: plan.chunk,
                demands: 0,
                taken: None,
                filled: None,
                logged: 0,
                stop: false,
            }),
            plan,
            changed: Condvar::new(),
            counters: Counters::default(),
            on_filled,
        });
        let this = Self {
            shared,
            threads: Mutex::default(),
        };
        this.spawn("fill", SharedReserve::fill)?;
        this.spawn("scrub", SharedReserve::scrub)?;
        Ok(this)
    }

    fn spawn(&self, what: &str, work: fn(&SharedReserve<P>)) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(format!("egmem-{what}-{}", self.node()))
            .spawn(move || work(&shared))
            .map_err(|error| Error::system("cannot start a thread", &error))?;
        self.threads().push(thread);
        Ok(())
    }

    /// Takes chunks of `bytes` together, like [`fill_up`](Self::fill_up); none after an error.
    #[cfg(test)]
    pub fn take(&self, peer: Option<&P>, bytes: u64) -> Result<Vec<Chunk<P>>> {
        let mut taken = Vec::new();
        match self.fill_up(peer, bytes, &mut taken) {
            Ok(()) => Ok(taken),
            Err(error) => {
                self.give_back(taken);
                Err(error)
            }
        }
    }

    /// Adds chunks to `taken` until they have `bytes` together, rounded up to the granularity: first from the
    /// reserve, then created now. Blocks while memory is created. After an error `taken` contains the chunks
    /// taken so far.
    ///
    /// # Errors
    /// [`Error::LimitReached`] beyond the cap or in more than [`MAX_PARTS`](crate::share::MAX_PARTS) pieces;
    /// those of creating memory.
    pub fn fill_up(&self, peer: Option<&P>, bytes: u64, taken: &mut Vec<Chunk<P>>) -> Result<()> {
        let missing = self.padded(bytes)?.saturating_sub(request::total(taken));
        self.shared.take(peer, missing, taken)
    }

    /// Takes chunks of at most `bytes` together that are kept for this peer.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for 0 bytes or more than an address space.
    pub fn take_kept(&self, peer: &P, bytes: u64) -> Result<Vec<Chunk<P>>> {
        let padded = self.padded(bytes)?;
        let (taken, missing) =
            self.shared
                .state()
                .free_chunks
                .take_own(peer, padded, crate::share::MAX_PARTS);
        let counter = &self.shared.counters.taken_warm_bytes;
        counter.fetch_add(padded - missing, Relaxed);
        Ok(taken)
    }

    /// Gives memory that is charged to the same peer, kept or waiting to be zeroed, back to the driver until
    /// `bytes` are free or none is left; returns the bytes.
    pub fn evict_charged(&self, charge: &Charge, bytes: u64) -> u64 {
        self.shared.evict_charged(charge, bytes)
    }

    /// Creates one granule in addition to the chunks already taken. `None` if there is no room for it: no free chunk
    /// is evicted for it. Blocks while it is created.
    pub fn extra(&self) -> Option<Chunk<P>> {
        self.shared.extra()
    }

    /// Takes back the granule from [`extra`](Self::extra): it is never kept, because free chunks of that
    /// size would make later requests slow.
    pub fn discard_extra(&self, chunk: Chunk<P>) {
        let bytes = chunk.bytes();
        let counters = &self.shared.counters;
        match chunk.past {
            Past::Tainted => &counters.discarded_tainted_bytes,
            _ => &counters.discarded_policy_bytes,
        }
        .fetch_add(bytes, Relaxed);
        drop(chunk);
        self.shared.state().pinned -= bytes;
        self.shared.changed.notify_all();
    }

    /// Takes back chunks that no peer holds; each chunk's history decides its next use.
    pub fn give_back(&self, chunks: Vec<Chunk<P>>) {
        self.shared.give_back(chunks);
    }

    /// Notes that memory that was taken will not return: it went to the driver, because a holder may still
    /// have it mapped or other code still uses it.
    pub fn lost(&self, bytes: u64) {
        self.shared.state().pinned -= bytes;
        self.shared
            .counters
            .discarded_tainted_bytes
            .fetch_add(bytes, Relaxed);
        self.shared.changed.notify_all();
    }

    /// Returns `bytes` as they are charged: rounded up to the granularity.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for 0 or more than an address space.
    pub fn padded(&self, bytes: u64) -> Result<u64> {
        Ok(PaddedSize::new(bytes, self.shared.granule)?.padded())
    }

    /// Returns the granularity of all sizes, in bytes.
    pub fn granule(&self) -> u64 {
        self.shared.granule.bytes()
    }

    /// Returns the node.
    pub fn node(&self) -> NodeId {
        self.shared.plan.node
    }

    /// Returns the current bytes.
    pub fn levels(&self) -> Levels {
        let state = self.shared.state();
        Levels {
            target: self.shared.plan.target,
            warm: state.free_chunks.warm(),
            kept: state.free_chunks.kept(),
            dirty: state.dirty_for_anyone + state.dirty_for_owners,
            pinned: state.pinned,
        }
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }
}

impl<P: Send + 'static> Reserve<P> {
    /// Ends the threads and gives everything ready back to the driver, and later everything that is returned.
    /// Blocks until that is done.
    pub fn stop(&self) {
        self.shared.state().stop = true;
        self.shared.changed.notify_all();
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // A thread that panicked has reported it.
            let _ = thread.join();
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        lock(&self.threads)
    }
}

impl<P: Send + 'static> Drop for Reserve<P> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<P> SharedReserve<P> {
    fn state(&self) -> MutexGuard<'_, ReserveState<P>> {
        lock(&self.state)
    }
}

#[cfg(test)]
mod tests;
