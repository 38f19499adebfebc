//! A node's memory made ahead of need: pinning takes long, giving out what is pinned does not.
//!
//! Two threads look after each node. One makes chunks until the reserve is full, the other zeroes
//! what comes back. Requests take chunks and make only what is missing.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::hygiene::{Discard, Past, Reuse, Verdict};
use super::scrub::{Scrubber, scrub};
use super::stock::{HasBytes, Stock};
use crate::driver::{HandleTypes, NodeId};
use crate::share::MAX_PARTS;
use crate::size::{Granularity, PaddedSize};
use crate::topology::free_now;
use crate::vmm::{PhysicalMemory, PhysicalOptions};
use crate::{Driver, Error, Result};

/// What a node's reserve is to be.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub node: NodeId,
    pub handle_types: HandleTypes,
    /// Bytes to keep ready for anybody.
    pub target: u64,
    /// Bytes to keep at most for peers that used them before.
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
    pub memory: PhysicalMemory,
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
    dirty_bytes: u64,
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
        let granule = options(&plan).granularity_of(driver)?;
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
                dirty_bytes: 0,
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

    /// Chunks of `bytes` together, rounded up to the granularity: from the reserve as far as it
    /// goes, made now beyond. Blocks while memory is made.
    ///
    /// # Errors
    /// [`Error::LimitReached`] beyond the cap or in more than [`MAX_PARTS`] pieces; those of
    /// creating memory. Nothing is taken then.
    pub fn take(&self, peer: Option<&P>, bytes: u64) -> Result<Vec<Chunk<P>>> {
        let padded = PaddedSize::new(bytes, self.shared.granule)?.padded();
        let mut taken = Vec::new();
        let result = self.shared.take(peer, padded, &mut taken);
        match result {
            Ok(()) => Ok(taken),
            Err(error) => {
                self.give_back(taken);
                Err(error)
            }
        }
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
            dirty: state.dirty_bytes,
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

    /// Waits so long, or until the end.
    fn pause<'a>(&self, mut state: MutexGuard<'a, State<P>>) -> MutexGuard<'a, State<P>> {
        let until = Instant::now() + self.plan.retry;
        while !state.stop {
            match until.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => state = self.wait(state, left),
                _ => break,
            }
        }
        state
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State<P>>,
        at_most: Duration,
    ) -> MutexGuard<'a, State<P>> {
        self.changed
            .wait_timeout(state, at_most)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }
}

/// Longer than anything lasts: waits end by being woken.
const LONG: Duration = Duration::from_secs(3600);

impl<P: Clone + Eq> Shared<P> {
    /// Adds chunks of `padded` bytes to `taken`; what was taken so far stays there after an error.
    fn take(&self, peer: Option<&P>, padded: u64, taken: &mut Vec<Chunk<P>>) -> Result<()> {
        let (warm, mut missing) = {
            let mut state = self.state();
            if state.stop {
                return Err(Error::invalid("request", "the reserve has ended"));
            }
            state.taken = Some(Instant::now());
            state.stock.take(peer, padded, MAX_PARTS)
        };
        taken.extend(warm);
        self.counters
            .taken_warm_bytes
            .fetch_add(padded - missing, Relaxed);
        self.changed.notify_all();
        if missing == 0 {
            return Ok(());
        }
        self.state().demands += 1;
        let result = loop {
            if missing == 0 {
                break Ok(());
            }
            if taken.len() >= MAX_PARTS {
                break Err(Error::LimitReached {
                    what: "parts of one buffer",
                    limit: MAX_PARTS as u64,
                });
            }
            match self.make_for(peer, missing) {
                Ok(chunk) => {
                    missing -= chunk.bytes();
                    self.counters
                        .taken_cold_bytes
                        .fetch_add(chunk.bytes(), Relaxed);
                    taken.push(chunk);
                }
                Err(error) => break Err(error),
            }
        };
        self.state().demands -= 1;
        self.changed.notify_all();
        result
    }

    /// One chunk of at most `missing` bytes, made now; gives up what is in stock where that helps.
    fn make_for(&self, peer: Option<&P>, missing: u64) -> Result<Chunk<P>> {
        let mut bytes = missing.min(self.plan.chunk);
        loop {
            let evicted = {
                let mut state = self.state();
                let need = state.pinned.saturating_add(bytes);
                let evicted = match need.checked_sub(self.plan.cap) {
                    None | Some(0) => Vec::new(),
                    Some(over) => state.stock.evict(peer, over),
                };
                state.pinned -= total(&evicted);
                if state.pinned.saturating_add(bytes) > self.plan.cap {
                    drop(state);
                    self.evicted(evicted);
                    return Err(Error::LimitReached {
                        what: "bytes on the node",
                        limit: self.plan.cap,
                    });
                }
                state.pinned += bytes;
                evicted
            };
            self.evicted(evicted);
            let error = match self.create(bytes) {
                Ok(memory) => {
                    return Ok(Chunk {
                        memory,
                        past: Past::Fresh,
                    });
                }
                Err(error) => error,
            };
            let mut state = self.state();
            state.pinned -= bytes;
            if !is_shortage(&error) {
                return Err(error);
            }
            // What lies in stock is of use to nobody as long as a request cannot be served.
            let evicted = state.stock.evict(peer, bytes);
            state.pinned -= total(&evicted);
            drop(state);
            if !evicted.is_empty() {
                self.evicted(evicted);
            } else if bytes > self.plan.min_chunk {
                bytes = self.halved(bytes);
            } else {
                return Err(error);
            }
        }
    }

    /// Physical memory of `bytes`, if the node keeps its headroom.
    fn create(&self, bytes: u64) -> Result<PhysicalMemory> {
        let made = self
            .room_for(bytes)
            .and_then(|()| options(&self.plan).create(&self.driver, bytes));
        match &made {
            Ok(_) => {
                self.counters.made_chunks.fetch_add(1, Relaxed);
                self.counters.made_bytes.fetch_add(bytes, Relaxed);
            }
            Err(_) => {
                self.counters.failed_chunks.fetch_add(1, Relaxed);
            }
        }
        made
    }

    fn room_for(&self, bytes: u64) -> Result<()> {
        let node = self.plan.node;
        match free_now(&self.driver, node) {
            Some(free) if free < bytes.saturating_add(self.plan.headroom) => {
                Err(Error::NodeTooFull {
                    node,
                    requested: bytes,
                    free: free.saturating_sub(self.plan.headroom),
                })
            }
            _ => Ok(()),
        }
    }

    /// Half, in whole granules, and no less than the smallest chunk.
    fn halved(&self, bytes: u64) -> u64 {
        (bytes / 2)
            .next_multiple_of(self.granule.bytes())
            .max(self.plan.min_chunk)
    }

    fn evicted(&self, chunks: Vec<Chunk<P>>) {
        self.counters
            .evicted_bytes
            .fetch_add(total(&chunks), Relaxed);
        // Released here, outside the lock.
        drop(chunks);
    }

    fn give_back(&self, chunks: Vec<Chunk<P>>) {
        let plan = &self.plan;
        let mut discarded = Vec::new();
        {
            let mut state = self.state();
            for chunk in chunks {
                let bytes = chunk.bytes();
                let verdict = match (chunk.past.verdict(plan.reuse), state.stop) {
                    (Verdict::Discard(why), _) => Verdict::Discard(why),
                    (_, true) => Verdict::Discard(Discard::Policy),
                    (verdict, false) => verdict,
                };
                let queued = |owned: bool| {
                    let queue = state
                        .dirty
                        .iter()
                        .filter(|(_, owner)| owner.is_some() == owned);
                    queue.fold(0_u64, |sum, (chunk, _)| sum + chunk.bytes())
                };
                let discard = match verdict {
                    Verdict::AsItIs => {
                        state.stock.put(chunk, None);
                        continue;
                    }
                    Verdict::ScrubFor(owner)
                        if state.stock.kept() + queued(true) + bytes <= plan.keep =>
                    {
                        state.dirty.push_back((chunk, Some(owner)));
                        state.dirty_bytes += bytes;
                        continue;
                    }
                    Verdict::ScrubForAnyone
                        if state.stock.warm() + queued(false) + bytes
                            <= plan.target.max(plan.keep) =>
                    {
                        state.dirty.push_back((chunk, None));
                        state.dirty_bytes += bytes;
                        continue;
                    }
                    Verdict::Discard(why) => why,
                    // There is enough of it.
                    Verdict::ScrubFor(_) | Verdict::ScrubForAnyone => Discard::Policy,
                };
                match discard {
                    Discard::Tainted => &self.counters.discarded_tainted_bytes,
                    Discard::Policy => &self.counters.discarded_policy_bytes,
                }
                .fetch_add(bytes, Relaxed);
                state.pinned -= bytes;
                discarded.push(chunk);
            }
        }
        drop(discarded);
        self.changed.notify_all();
    }

    /// The work of the first thread: keeps the reserve full.
    fn fill(&self) {
        let mut state = self.state();
        loop {
            if state.stop {
                let stock = state.stock.drain();
                state.pinned -= total(&stock);
                drop(state);
                drop(stock);
                return;
            }
            let lacking = self.plan.target.saturating_sub(state.stock.warm());
            // Chunks made ahead are whole: a rest smaller than the smallest is left.
            let bytes = state.chunk.min(lacking);
            if lacking < self.plan.min_chunk {
                state = match state.filled {
                    // The lock was let go: everything may be otherwise now.
                    None => self.first_filled(state, Ok(())),
                    Some(_) => self.wait(state, LONG),
                };
                continue;
            }
            if state.demands > 0 {
                state = self.wait(state, LONG);
                continue;
            }
            // The driver does one thing at a time: filling would slow the client's import.
            let quiet = state
                .taken
                .and_then(|taken| self.plan.quiet.checked_sub(taken.elapsed()));
            if let Some(quiet) = quiet.filter(|quiet| !quiet.is_zero()) {
                state = self.wait(state, quiet);
                continue;
            }
            if state.pinned.saturating_add(bytes) > self.plan.cap {
                let error = Error::LimitReached {
                    what: "bytes on the node",
                    limit: self.plan.cap,
                };
                state = self.first_filled(state, Err(error));
                state = self.pause(state);
                continue;
            }
            state.pinned += bytes;
            drop(state);
            let made = self.create(bytes);
            state = self.state();
            match made {
                Ok(memory) => state.stock.put(
                    Chunk {
                        memory,
                        past: Past::Fresh,
                    },
                    None,
                ),
                Err(error) => {
                    state.pinned -= bytes;
                    if is_shortage(&error) && bytes > self.plan.min_chunk {
                        state.chunk = self.halved(bytes);
                        continue;
                    }
                    let node = self.plan.node;
                    tracing::warn!(%node, %error, "the reserve cannot be filled for now");
                    state = self.first_filled(state, Err(error));
                    state = self.pause(state);
                    // Perhaps there is room for whole chunks again.
                    state.chunk = self.plan.chunk;
                }
            }
        }
    }

    fn first_filled<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<P>>,
        result: Result<()>,
    ) -> MutexGuard<'a, State<P>> {
        if state.filled.is_some() {
            return state;
        }
        state.filled = Some(result.clone());
        drop(state);
        self.on_filled.filled(&result);
        self.state()
    }

    /// The work of the second thread: zeroes what comes back.
    fn scrub(&self) {
        let mut state = self.state();
        loop {
            if state.stop {
                let dirty = std::mem::take(&mut state.dirty);
                state.pinned -= std::mem::take(&mut state.dirty_bytes);
                drop(state);
                drop(dirty);
                return;
            }
            let Some((chunk, owner)) = state.dirty.pop_front() else {
                state = self.wait(state, LONG);
                continue;
            };
            drop(state);
            let bytes = chunk.bytes();
            let result = scrub(&chunk.memory, self.plan.scrubber, self.plan.scrub_threads);
            state = self.state();
            state.dirty_bytes -= bytes;
            match result {
                Ok(()) => {
                    // Importers' caches must not take it for what it was.
                    chunk.memory.renew_identity();
                    self.counters.scrubbed_bytes.fetch_add(bytes, Relaxed);
                    state.stock.put(chunk, owner);
                }
                Err(error) => {
                    let node = self.plan.node;
                    tracing::warn!(%node, %error, "cannot zero memory: it goes back to the driver");
                    self.counters.scrub_failures.fetch_add(1, Relaxed);
                    state.pinned -= bytes;
                    drop(state);
                    drop(chunk);
                    state = self.state();
                }
            }
            self.changed.notify_all();
        }
    }
}

fn total<P>(chunks: &[Chunk<P>]) -> u64 {
    chunks
        .iter()
        .fold(0, |sum, chunk| sum.saturating_add(chunk.bytes()))
}

/// Whether less may be had where so much was not.
fn is_shortage(error: &Error) -> bool {
    matches!(error, Error::OutOfMemory { .. } | Error::NodeTooFull { .. })
        || error.code() == Some(crate::driver::Code::OUT_OF_MEMORY)
}

fn options(plan: &Plan) -> PhysicalOptions {
    PhysicalMemory::options(plan.node).handle_types(plan.handle_types)
}

#[cfg(test)]
#[path = "reserve_tests.rs"]
mod tests;
