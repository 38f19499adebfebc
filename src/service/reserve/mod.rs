//! A node's memory made ahead of need: pinning takes long, giving out what is pinned does not.
//!
//! Two threads look after each node. One makes chunks until the reserve is full, the other zeroes
//! what comes back. Requests take chunks and make only what is missing.

mod keeper;
mod request;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::hygiene::{Past, Reuse};
use super::quota::Charge;
use super::scrub::Scrubber;
use super::stock::{HasBytes, Stock};
use crate::driver::{HandleTypes, NodeId};
use crate::size::{Granularity, PaddedSize};
use crate::vmm::PhysicalMemory;
use crate::{Driver, Error, Result};

/// What a node's reserve is to be.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub node: NodeId,
    pub handle_types: HandleTypes,
    /// Bytes to make ready for anybody.
    pub target: u64,
    /// Bytes to keep at most for peers that used them before. What comes back for anybody is kept up to the
    /// larger of this and `target`.
    pub keep: u64,
    /// The size of a chunk, and the least that it is halved to when memory is short.
    pub chunk: u64,
    pub min_chunk: u64,
    /// The most bytes that the service pins on the node.
    pub cap: u64,
    /// Bytes that the node is to have free besides.
    pub headroom: u64,
    /// How long to leave the driver to a client that has just been given memory and imports it.
    pub quiet: Duration,
    /// How long to wait after a failure before trying to fill the reserve again.
    pub retry: Duration,
    pub reuse: Reuse,
    pub scrubber: Scrubber,
    pub scrub_threads: usize,
}

/// Physical memory, and who has seen it.
#[derive(Debug)]
pub(crate) struct Chunk<P> {
    // In this order: released first, then counted no more.
    pub memory: PhysicalMemory,
    /// Its bytes in the account of the peer that had it, unless the service itself or a name's charge
    /// counts them.
    pub charge: Option<Charge>,
    pub past: Past<P>,
}

impl<P> HasBytes for Chunk<P> {
    fn bytes(&self) -> u64 {
        self.memory.size().padded()
    }
}

/// What a reserve has done since it began.
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

/// What a reserve has now, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Levels {
    pub target: u64,
    /// Ready for anybody.
    pub warm: u64,
    /// Ready for one peer each.
    pub kept: u64,
    /// Waiting to be zeroed.
    pub dirty: u64,
    /// All that the service has pinned on the node, what is lent out too.
    pub pinned: u64,
}

#[derive(Debug)]
struct State<P> {
    stock: Stock<P, Chunk<P>>,
    dirty: VecDeque<(Chunk<P>, Option<P>)>,
    /// Bytes of `dirty` and of the chunk that is being zeroed, by whom they are for.
    dirty_for_anyone: u64,
    dirty_for_owners: u64,
    /// Bytes that the thread that fills the reserve is making.
    filling: u64,
    /// Bytes of all chunks that there are or that are being made.
    pinned: u64,
    /// The size that the next chunk is made in.
    chunk: u64,
    /// Requests that are making memory: the reserve waits for them.
    demands: usize,
    /// When something was taken last.
    taken: Option<Instant>,
    /// Whether the first filling has come to an end, and how.
    filled: Option<Result<()>>,
    stop: bool,
}

impl<P> State<P> {
    /// Bytes that wait to be zeroed, or are being zeroed, for the same use.
    const fn dirty(&mut self, owner: Option<&P>) -> &mut u64 {
        match owner {
            None => &mut self.dirty_for_anyone,
            Some(_) => &mut self.dirty_for_owners,
        }
    }

    /// Bytes that are there for anybody, or will be without anything more being made.
    fn warm_soon(&self) -> u64
    where
        P: Clone + Eq,
    {
        self.stock.warm() + self.dirty_for_anyone + self.filling
    }

    /// Bytes that are there for single peers, or will be once they are zeroed.
    fn kept_soon(&self) -> u64
    where
        P: Clone + Eq,
    {
        self.stock.kept() + self.dirty_for_owners
    }
}

#[derive(Debug)]
struct Shared<P> {
    driver: Driver,
    plan: Plan,
    /// What all sizes are multiples of.
    granule: Granularity,
    state: Mutex<State<P>>,
    /// Something has changed: for both threads.
    changed: Condvar,
    counters: Counters,
    on_filled: Box<dyn OnFilled>,
}

/// Hears when the first filling has ended.
pub(crate) trait OnFilled: std::fmt::Debug + Send + Sync {
    /// It has; called once, by the reserve's thread.
    fn filled(&self, result: &Result<()>);
}

/// A node's reserve; ends its threads and gives all its memory back when dropped.
#[derive(Debug)]
pub(crate) struct Reserve<P: Send + 'static> {
    shared: Arc<Shared<P>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<P: Clone + Eq + Send + 'static> Reserve<P> {
    /// Starts to fill a reserve.
    ///
    /// # Errors
    /// [`Error::System`] where no thread can be started; the driver's.
    pub fn start(driver: &Driver, mut plan: Plan, on_filled: Box<dyn OnFilled>) -> Result<Self> {
        let granule = request::options(&plan).granularity_of(driver)?;
        let whole = |bytes: u64| match bytes {
            0 => Ok(0),
            bytes => PaddedSize::new(bytes, granule).map(PaddedSize::padded),
        };
        plan.target = whole(plan.target)?;
        plan.min_chunk = whole(plan.min_chunk.max(1))?;
        plan.chunk = whole(plan.chunk.max(1))?.max(plan.min_chunk);
        let shared = Arc::new(Shared {
            driver: driver.clone(),
            granule,
            state: Mutex::new(State {
                stock: Stock::default(),
                dirty: VecDeque::new(),
                dirty_for_anyone: 0,
                dirty_for_owners: 0,
                filling: 0,
                pinned: 0,
                chunk: plan.chunk,
                demands: 0,
                taken: None,
                filled: None,
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
        this.spawn("fill", Shared::fill)?;
        this.spawn("scrub", Shared::scrub)?;
        Ok(this)
    }

    fn spawn(&self, what: &str, work: fn(&Shared<P>)) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(format!("egmem-{what}-{}", self.node()))
            .spawn(move || work(&shared))
            .map_err(|error| Error::system("cannot start a thread", &error))?;
        self.threads().push(thread);
        Ok(())
    }

    /// Chunks of `bytes` together, as [`fill_up`](Self::fill_up) takes them; none after an error.
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

    /// Adds chunks to `taken` until these have `bytes` together, rounded up to the granularity: from the
    /// reserve as far as it goes, made now beyond. Blocks while memory is made. After an error `taken` has
    /// the chunks that were taken so far.
    ///
    /// # Errors
    /// [`Error::LimitReached`] beyond the cap or in more than [`MAX_PARTS`](crate::share::MAX_PARTS) pieces;
    /// those of creating memory.
    pub fn fill_up(&self, peer: Option<&P>, bytes: u64, taken: &mut Vec<Chunk<P>>) -> Result<()> {
        let missing = self.padded(bytes)?.saturating_sub(request::total(taken));
        self.shared.take(peer, missing, taken)
    }

    /// Chunks of at most `bytes` together that are kept for this peer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes or more than an address space.
    pub fn take_kept(&self, peer: &P, bytes: u64) -> Result<Vec<Chunk<P>>> {
        let padded = self.padded(bytes)?;
        let (taken, missing) =
            self.shared
                .state()
                .stock
                .take_own(peer, padded, crate::share::MAX_PARTS);
        let counter = &self.shared.counters.taken_warm_bytes;
        counter.fetch_add(padded - missing, Relaxed);
        Ok(taken)
    }

    /// Gives memory that is charged to the same peer, kept or waiting to be zeroed, back to the driver
    /// until `bytes` are free or none is left; returns the bytes.
    pub fn evict_charged(&self, charge: &Charge, bytes: u64) -> u64 {
        self.shared.evict_charged(charge, bytes)
    }

    /// One granule more, beside what was taken, made now. `None` where there is no room for it, since
    /// nothing in stock gives way to it. Blocks while it is made.
    pub fn extra(&self) -> Option<Chunk<P>> {
        self.shared.extra()
    }

    /// Takes back what [`extra`](Self::extra) made: it is never kept, since stock in such small
    /// pieces would make later requests slow.
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

    /// Takes back what nobody holds any more; each chunk's past decides what becomes of it.
    pub fn give_back(&self, chunks: Vec<Chunk<P>>) {
        self.shared.give_back(chunks);
    }

    /// Memory that was taken is not coming back: it went to the driver, since a holder may still
    /// have it mapped or somebody else has a hand on it.
    pub fn lost(&self, bytes: u64) {
        self.shared.state().pinned -= bytes;
        self.shared
            .counters
            .discarded_tainted_bytes
            .fetch_add(bytes, Relaxed);
        self.shared.changed.notify_all();
    }

    /// `bytes` as they are charged: rounded up to the granularity.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 or more than an address space.
    pub fn padded(&self, bytes: u64) -> Result<u64> {
        Ok(PaddedSize::new(bytes, self.shared.granule)?.padded())
    }

    /// What all sizes are multiples of, in bytes.
    pub fn granule(&self) -> u64 {
        self.shared.granule.bytes()
    }

    /// The node.
    pub fn node(&self) -> NodeId {
        self.shared.plan.node
    }

    /// What there is.
    pub fn levels(&self) -> Levels {
        let state = self.shared.state();
        Levels {
            target: self.shared.plan.target,
            warm: state.stock.warm(),
            kept: state.stock.kept(),
            dirty: state.dirty_for_anyone + state.dirty_for_owners,
            pinned: state.pinned,
        }
    }

    /// What was done.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }
}

impl<P: Send + 'static> Reserve<P> {
    /// Ends the threads and gives all that is ready back to the driver, and from now on what comes
    /// back too. Blocks while that lasts.
    pub fn stop(&self) {
        self.shared.state().stop = true;
        self.shared.changed.notify_all();
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: Send + 'static> Drop for Reserve<P> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<P> Shared<P> {
    fn state(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
