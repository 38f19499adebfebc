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
use std::time::Instant;

use tokio::sync::watch;

use self::free_chunks::FreeChunks;
use super::config::{NodeConfig, ReserveConfig, ReuseConfig};
use super::quota::Charge;
use super::reuse_policy::{Discard, Past};
use crate::backing::Chosen;
use crate::driver::{HandleTypes, NodeId};
use crate::per_driver::lock;
use crate::size::{Granularity, PaddedSize};
use crate::topology::{Overcommit, free_now};
use crate::vmm::{PhysicalMemory, PhysicalOptions};
use crate::{Driver, Error, Growth, Result};

pub(crate) use self::free_chunks::Levels;

/// The parameters of a node's reserve.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub handle_types: HandleTypes,
    pub backing: Chosen,
    /// The node, the bytes to keep ready for any peer, and the sizes of chunks.
    pub reserve: ReserveConfig,
    pub limits: NodeConfig,
    /// Returned memory for any peer is kept up to the larger of [`ReuseConfig::keep`] and the reserve.
    pub reuse: ReuseConfig,
    /// Whether the driver is asked even for more than the node has free, or for the headroom.
    pub overcommit: Overcommit,
    /// Counted down when the reserve has been filled for the first time, or has failed to.
    pub unready: Option<Arc<watch::Sender<usize>>>,
}

impl Plan {
    /// Returns the options of the node's chunks.
    fn options(&self) -> PhysicalOptions {
        PhysicalMemory::options(self.reserve.node)
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
    /// Returns a chunk that is not charged.
    const fn new(memory: PhysicalMemory, past: Past) -> Self {
        Self {
            memory,
            charge: None,
            past,
        }
    }

    /// Returns chunks of these memories.
    pub fn all(memories: Vec<PhysicalMemory>, pasts: Vec<Past>) -> Vec<Self> {
        let parts = memories.into_iter().zip(pasts);
        parts
            .map(|(memory, past)| Self::new(memory, past))
            .collect()
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.size().padded()
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
    fn levels(&self) -> Levels {
        let mut levels = self.free_chunks.levels();
        if let Some((bytes, for_one)) = self.scrubbing {
            levels.add(bytes, for_one, true);
        }
        levels
    }

    /// Returns the bytes for any peer that exist, or will exist without creating more.
    fn warm_soon(&self) -> u64 {
        let levels = self.levels();
        levels.warm + levels.dirty_warm + self.filling
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

    /// Evicts free chunks and counts them out.
    fn evict(&mut self, some: impl FnOnce(&mut FreeChunks<Chunk>) -> Vec<Chunk>) -> Vec<Chunk> {
        let evicted = some(&mut self.free_chunks);
        let bytes = total(&evicted);
        self.pinned -= bytes;
        self.counts.evicted_bytes += bytes;
        evicted
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
        self.plan.reserve.node
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
        let is_limited = self.plan.overcommit == Overcommit::Refuse;
        let free = is_limited.then(|| free_now(&self.driver, self.node()));
        free.flatten()
    }

    /// Returns the current bytes.
    pub fn levels(&self) -> Levels {
        let state = self.state();
        Levels {
            target: self.plan.reserve.bytes,
            pinned: state.pinned,
            ..state.levels()
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
        let reserve = &mut plan.reserve;
        if reserve.bytes > 0 {
            reserve.bytes = PaddedSize::new(reserve.bytes, granule)?.padded();
            // A small reserve is one small chunk.
            reserve.min_chunk = reserve.min_chunk.min(reserve.bytes);
        }
        reserve.min_chunk = Growth::chunk_in(granule, reserve.min_chunk);
        reserve.chunk = Growth::chunk_in(granule, reserve.chunk.max(reserve.min_chunk));
        let state = ReserveState {
            chunk: reserve.chunk,
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
