//! A node's memory allocated in advance: pinning is slow, handing out pinned memory is fast.
//!
//! Each node has two threads. One creates chunks until the reserve is full, the other zeroes returned memory.
//! Requests take chunks and create only the missing bytes.

mod free_chunks;
mod request;
mod threads;

use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use self::free_chunks::{FreeChunks, Sums};
use super::quota::{Charge, Use};
use super::reuse_policy::{Discard, Past, Reuse};
use crate::backing::Chosen;
use crate::driver::{HandleTypes, NodeId};
use crate::per_driver::lock;
use crate::size::{Granularity, PaddedSize};
use crate::topology::{Overcommit, free_now};
use crate::vmm::{PhysicalMemory, PhysicalOptions};
use crate::{Driver, Error, Growth, Result};

/// The processor that zeroes memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scrubber {
    /// The CPU, in several threads.
    #[default]
    Cpu,
    /// The first GPU, which then has a context of this process: some hundreds of MiB of its memory.
    Gpu,
}

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
    /// Whether the driver is asked even for more than the node has free, or for the headroom.
    pub overcommit: Overcommit,
    /// How long to leave the driver to a client that has just been given memory and imports it.
    pub quiet: Duration,
    /// How long to wait after a failure before filling the reserve again.
    pub retry: Duration,
    pub reuse: Reuse,
    pub scrubber: Scrubber,
    pub scrub_threads: usize,
    /// Counted down when the reserve has been filled for the first time, or has failed to.
    pub unready: Option<Arc<watch::Sender<usize>>>,
}

impl Plan {
    /// Returns the options of the node's chunks.
    fn options(&self) -> PhysicalOptions {
        PhysicalMemory::options(self.node)
            .handle_types(self.handle_types)
            .chosen(self.backing.clone())
    }
}

/// Physical memory, and which peers have seen it.
#[derive(Debug)]
pub(crate) struct Chunk {
    // In this order: the memory is released before its charge ends.
    pub memory: PhysicalMemory,
    /// The charge of the peer that had it, unless the service itself or a name's charge counts the bytes.
    pub charge: Option<Charge>,
    pub past: Past,
}

impl Chunk {
    /// Returns a chunk that no peer has seen.
    const fn fresh(memory: PhysicalMemory) -> Self {
        Self {
            memory,
            charge: None,
            past: Past::Fresh,
        }
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.size().padded()
    }

    /// Changes the use that its bytes are charged for.
    fn turn(&mut self, what: Use) {
        if let Some(charge) = &mut self.charge {
            charge.turn(what);
        }
    }
}

/// Returns the bytes of all chunks.
pub(crate) fn total(chunks: &[Chunk]) -> u64 {
    let bytes = chunks.iter().map(Chunk::bytes);
    bytes.fold(0, u64::saturating_add)
}

/// A reserve's counts since its start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub made_chunks: u64,
    pub made_bytes: u64,
    pub failed_chunks: u64,
    pub taken_warm_bytes: u64,
    pub taken_cold_bytes: u64,
    pub scrubbed_bytes: u64,
    pub scrub_failures: u64,
    pub discarded_tainted_bytes: u64,
    pub discarded_policy_bytes: u64,
    pub evicted_bytes: u64,
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

#[derive(Debug, Default)]
struct ReserveState {
    free_chunks: FreeChunks<Chunk>,
    /// The bytes of the chunk that is being zeroed, and whether it is for one peer.
    scrubbing: Option<(u64, bool)>,
    /// Bytes that the filling thread is creating.
    filling: u64,
    /// Bytes of all chunks that exist or are being created.
    pinned: u64,
    /// Bytes of chunks that are counted out and that the driver is releasing.
    returning: u64,
    /// How often memory has arrived: at the driver, from the fill thread, or zeroed. Starts over after the largest number.
    arrivals: u64,
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
    counts: Counts,
    stop: bool,
}

impl ReserveState {
    /// Returns the bytes that are there, the chunk included that is being zeroed.
    fn sums(&self) -> Sums {
        let mut sums = self.free_chunks.sums();
        if let Some((bytes, for_one)) = self.scrubbing {
            sums.add(bytes, for_one, true);
        }
        sums
    }

    /// Returns the bytes for any peer that exist, or will exist without creating more.
    fn warm_soon(&self) -> u64 {
        let sums = self.sums();
        sums.warm + sums.dirty_warm + self.filling
    }

    /// Returns whether memory is being created ahead or zeroed: requests can evict it once that is done.
    const fn is_busy(&self) -> bool {
        self.filling > 0 || self.scrubbing.is_some()
    }

    /// Notes that memory has arrived, for requests that failed before it did. The caller wakes them.
    const fn arrived(&mut self) {
        self.arrivals = self.arrivals.wrapping_add(1);
    }

    /// Counts out memory that goes back to the driver.
    const fn discard(&mut self, bytes: u64, why: Discard) {
        self.pinned -= bytes;
        match why {
            Discard::Tainted => self.counts.discarded_tainted_bytes += bytes,
            Discard::Policy => self.counts.discarded_policy_bytes += bytes,
        }
    }

    /// Counts out chunks that make room for others.
    fn evict(&mut self, chunks: &[Chunk]) {
        let bytes = total(chunks);
        self.pinned -= bytes;
        self.counts.evicted_bytes += bytes;
    }
}

/// A node's reserve, as its threads see it.
#[derive(Debug)]
pub(crate) struct NodeReserve {
    driver: Driver,
    plan: Plan,
    /// All sizes are multiples of this.
    granule: Granularity,
    state: Mutex<ReserveState>,
    /// Wakes both threads and requests that wait for memory after a change.
    changed: Condvar,
}

impl NodeReserve {
    fn state(&self) -> MutexGuard<'_, ReserveState> {
        lock(&self.state)
    }

    /// Returns `bytes` as they are charged: rounded up to the granularity.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for 0 or more than an address space.
    pub fn padded(&self, bytes: u64) -> Result<u64> {
        Ok(PaddedSize::new(bytes, self.granule)?.padded())
    }

    /// Returns the granularity of all sizes, in bytes.
    pub fn granule(&self) -> u64 {
        self.granule.bytes()
    }

    /// Returns the node.
    pub fn node(&self) -> NodeId {
        self.plan.node
    }

    /// Gives chunks that are counted out back to the driver, without the lock: that may take long. Requests count their
    /// bytes as free meanwhile.
    fn release(&self, mut state: MutexGuard<'_, ReserveState>, chunks: Vec<Chunk>) {
        let bytes = total(&chunks);
        state.returning += bytes;
        drop(state);
        drop(chunks);
        if bytes > 0 {
            let mut state = self.state();
            state.returning -= bytes;
            state.arrived();
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Returns the bytes that the node has free and that limit creations; `None` if the driver alone decides.
    fn free(&self) -> Option<u64> {
        match self.plan.overcommit {
            Overcommit::Refuse => free_now(&self.driver, self.plan.node),
            Overcommit::Allow => None,
        }
    }

    /// Returns the current bytes.
    pub fn levels(&self) -> Levels {
        let state = self.state();
        let sums = state.sums();
        Levels {
            target: self.plan.target,
            warm: sums.warm,
            kept: sums.kept,
            dirty: sums.dirty_warm + sums.dirty_kept,
            pinned: state.pinned,
        }
    }

    /// Returns the counts since the start.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }
}

/// A running reserve; dropping it ends its threads and gives all its memory back.
#[derive(Debug)]
pub(crate) struct Reserve {
    shared: Arc<NodeReserve>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Reserve {
    /// Starts to fill a reserve.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) if a thread cannot be started; the driver's errors.
    pub fn start(driver: &Driver, mut plan: Plan) -> Result<Self> {
        let granule = plan.options().granularity_of(driver)?;
        if plan.target > 0 {
            plan.target = PaddedSize::new(plan.target, granule)?.padded();
        }
        plan.min_chunk = Growth::chunk_in(granule, plan.min_chunk);
        plan.chunk = Growth::chunk_in(granule, plan.chunk.max(plan.min_chunk));
        let state = ReserveState {
            chunk: plan.chunk,
            ..ReserveState::default()
        };
        let shared = Arc::new(NodeReserve {
            driver: driver.clone(),
            granule,
            state: Mutex::new(state),
            plan,
            changed: Condvar::new(),
        });
        let this = Self {
            shared,
            threads: Mutex::default(),
        };
        this.spawn("fill", NodeReserve::fill)?;
        this.spawn("scrub", NodeReserve::scrub)?;
        Ok(this)
    }

    fn spawn(&self, what: &str, work: fn(&NodeReserve)) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(format!("egmem-{what}-{}", self.node()))
            .spawn(move || work(&shared))
            .map_err(|error| Error::system("cannot start a thread", &error))?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    /// Ends the threads and gives everything ready back to the driver, and later everything that is returned.
    /// Blocks until that is done.
    pub fn stop(&self) {
        self.state().stop = true;
        self.changed.notify_all();
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // A thread that panicked has reported it.
            let _ = thread.join();
        }
    }
}

impl Deref for Reserve {
    type Target = NodeReserve;

    fn deref(&self) -> &NodeReserve {
        &self.shared
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests;
