//! A heap's blocks in the order of streams.
//!
//! A freed block stays with its stream, which may have it again at once: the work of the new user runs after that of the
//! old one. Other streams get it from the heap, after an event. A block that other streams were recorded for goes back to the
//! heap after all of them.
//!
//! A block that was allocated while its stream was captured into a CUDA graph belongs to the graph: each replay uses it. It is
//! reused within captures into the same graph's pool, and freed when PyTorch releases that pool. If other streams were recorded
//! for it, it is not reused: nothing in the graph orders a new user after their work.

use std::alloc::Layout;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use egmem::driver::{Driver, StreamHandle};
use egmem::{Block, Error, Heap, Stream};

use super::idle::{Idle, Table};
use crate::contexts::wait_for_gpus;
use crate::region::lock;

/// PyTorch's name of a graph's pool of memory.
pub type PoolId = [u64; 2];

/// Sizes are multiples of this, as PyTorch's are: similar requests find each other's blocks.
const ROUND: u64 = 512;

/// A block in use.
struct Live {
    block: Block,
    /// The GPU that it was allocated for.
    gpu: i32,
    /// Other streams that use it.
    recorded: Vec<StreamHandle>,
    /// The graph's pool that it belongs to.
    graph: Option<PoolId>,
}

/// What a graph's pool has besides the blocks in use.
#[derive(Default)]
struct GraphBlocks {
    idle: Idle,
    /// Blocks that other streams were recorded for.
    kept: Vec<Block>,
}

#[derive(Default)]
struct State {
    live: Table<u64, Live>,
    idle: Idle,
    graphs: Table<PoolId, GraphBlocks>,
    /// The pool of the capture that has begun on each GPU.
    capturing: Table<i32, PoolId>,
    /// Why the last allocation failed.
    last_error: Option<Error>,
}

/// A heap's blocks in the order of streams. Any thread may call it, with the GIL or without.
pub struct StreamPool {
    heap: Heap,
    /// The most bytes of idle blocks; more go back to the heap.
    keep: u64,
    state: Mutex<State>,
    /// How many captures have begun: without one, no stream is asked whether it is captured.
    captures: AtomicU32,
    allocated: AtomicU64,
}

impl StreamPool {
    /// Creates a pool that keeps at most `keep` bytes of idle blocks.
    pub fn new(heap: Heap, keep: u64) -> Self {
        Self {
            heap,
            keep,
            state: Mutex::default(),
            captures: AtomicU32::new(0),
            allocated: AtomicU64::new(0),
        }
    }

    /// Returns the heap.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Returns the bytes in use and the bytes idle.
    pub fn bytes(&self) -> (u64, u64) {
        (self.allocated.load(Relaxed), lock(&self.state).idle.bytes())
    }

    /// Returns why the last allocation failed.
    pub fn last_error(&self) -> Option<Error> {
        lock(&self.state).last_error.clone()
    }

    fn driver(&self) -> &Driver {
        self.heap.driver()
    }

    /// Returns the address of `bytes` bytes for work on `stream`.
    ///
    /// # Errors
    /// As [`Heap::allocate`], after idle blocks and blocks that wait for GPU work were given back.
    pub fn allocate(&self, bytes: u64, stream: StreamHandle) -> Result<u64, Error> {
        self.driver().expect_this_process("heap")?;
        let size = bytes
            .max(1)
            .checked_next_multiple_of(ROUND)
            .unwrap_or(u64::MAX);
        let graph = self.graph_of(stream);
        let mut state = lock(&self.state);
        let idle = match graph {
            None => Some(&mut state.idle),
            Some(graph) => state.graphs.get_mut(&graph).map(|of| &mut of.idle),
        };
        let block = match idle.and_then(|idle| idle.take(stream, size)) {
            Some(block) => block,
            None => {
                // Growing takes the driver's time, which other threads need not wait for.
                drop(state);
                let allocated = self.allocate_from_heap(size);
                state = lock(&self.state);
                allocated.inspect_err(|error| state.last_error = Some(error.clone()))?
            }
        };
        let address = block.device_ptr().0;
        let recorded = Vec::new();
        let gpu = stream.device;
        state.live.insert(
            address,
            Live {
                block,
                gpu,
                recorded,
                graph,
            },
        );
        self.allocated.fetch_add(size, Relaxed);
        Ok(address)
    }

    fn allocate_from_heap(&self, size: u64) -> Result<Block, Error> {
        let layout = Layout::from_size_align(size as usize, ROUND as usize)
            .map_err(|_| Error::invalid("size", format!("{size} bytes are too many")))?;
        self.heap.allocate(layout).or_else(|_| {
            self.give_back_idle();
            self.heap.collect_all().ok();
            self.heap.allocate(layout)
        })
    }

    /// Frees the block at `address` in the order of `stream`. An address that is not a live block's is ignored, and logged.
    pub fn free(&self, address: u64, stream: StreamHandle) {
        if !self.driver().is_of_this_process() {
            return;
        }
        let mut state = lock(&self.state);
        let Some(Live {
            block,
            recorded,
            graph,
            ..
        }) = state.live.remove(&address)
        else {
            drop(state);
            tracing::error!("PyTorch frees {address:#x}, which is no block of this heap");
            return;
        };
        let size = block.len();
        self.allocated.fetch_sub(size, Relaxed);
        if let Some(graph) = graph {
            let of_graph = state.graphs.entry(graph).or_default();
            match recorded.is_empty() {
                true => of_graph.idle.put(stream, block),
                false => of_graph.kept.push(block),
            }
            return;
        }
        if recorded.is_empty() && size <= self.keep / 4 {
            state.idle.put(stream, block);
            if state.idle.bytes() <= self.keep {
                return;
            }
            drop(state);
            return self.give_back_idle();
        }
        drop(state);
        self.free_after_all(block, stream, &recorded);
    }

    /// Notes that work of another stream, of the GPU that the block was allocated for, uses it.
    pub fn record(&self, address: u64, raw: u64) {
        let mut state = lock(&self.state);
        if let Some(live) = state.live.get_mut(&address) {
            let stream = StreamHandle {
                device: live.gpu,
                raw,
            };
            if !live.recorded.contains(&stream) {
                live.recorded.push(stream);
            }
        }
    }

    /// Returns the graph's pool that a captured stream's memory belongs to.
    fn graph_of(&self, stream: StreamHandle) -> Option<PoolId> {
        if self.captures.load(Relaxed) == 0 {
            return None;
        }
        let pool = *lock(&self.state).capturing.get(&stream.device)?;
        let captured = self.borrowed(stream).is_capturing();
        captured.unwrap_or(false).then_some(pool)
    }

    /// Notes that a capture into a graph's pool begins on a GPU.
    pub fn begin_capture(&self, gpu: i32, pool: PoolId) {
        if lock(&self.state).capturing.insert(gpu, pool).is_none() {
            self.captures.fetch_add(1, Relaxed);
        }
    }

    /// Notes that it has ended.
    pub fn end_capture(&self, gpu: i32, pool: PoolId) {
        let mut state = lock(&self.state);
        if state.capturing.get(&gpu) == Some(&pool) {
            state.capturing.remove(&gpu);
            self.captures.fetch_sub(1, Relaxed);
        }
    }

    /// Frees the blocks of a graph's pool that are not in use. Those in use are freed as others are from now on.
    pub fn release_graph(&self, pool: PoolId) {
        let unused = {
            let mut state = lock(&self.state);
            let of_pool = state
                .live
                .values_mut()
                .filter(|live| live.graph == Some(pool));
            of_pool.for_each(|live| live.graph = None);
            state.graphs.remove(&pool)
        };
        if unused.is_some() {
            // A replay may still run, on any stream.
            wait_for_gpus(self.driver());
        }
        drop(unused);
    }

    /// Gives idle blocks back to the heap, each after its stream's work so far.
    pub fn give_back_idle(&self) {
        let all = lock(&self.state).idle.take_all();
        for (stream, blocks) in all {
            let freed = self.heap.free_all_after(blocks, &self.borrowed(stream));
            if let Err(refused) = freed {
                // The stream is captured, or its GPU is lost: its blocks stay with it.
                let mut state = lock(&self.state);
                for block in refused.blocks {
                    state.idle.put(stream, block);
                }
            }
        }
    }

    /// Frees a block after the work of several streams.
    fn free_after_all(&self, block: Block, stream: StreamHandle, recorded: &[StreamHandle]) {
        let freed = match self.joined(stream, recorded) {
            Ok(joined) => block
                .free_after(&joined)
                .map_err(|refused| (refused.error, refused.block)),
            Err(error) => Err((Box::new(error), block)),
        };
        if let Err((error, block)) = freed {
            tracing::warn!(%error, "a block waits for its GPUs, because no event can order it");
            wait_for_gpus(self.driver());
            drop(block);
        }
    }

    /// Returns a stream that follows all of these: the first one if there is no other, else one of its own.
    fn joined(&self, stream: StreamHandle, recorded: &[StreamHandle]) -> Result<Stream, Error> {
        if recorded.is_empty() {
            return Ok(self.borrowed(stream));
        }
        let joined = Stream::new(self.driver(), stream.device)?;
        joined.wait_for(&self.borrowed(stream))?;
        recorded
            .iter()
            .try_for_each(|other| joined.wait_for(&self.borrowed(*other)))?;
        Ok(joined)
    }

    fn borrowed(&self, stream: StreamHandle) -> Stream {
        // SAFETY: PyTorch's streams live as long as the process, and this is used within one call. A stream of the program's
        // own must outlive the tensors that were used on it, as PyTorch demands of `ExternalStream`.
        unsafe { Stream::borrowed(self.driver(), stream) }
    }
}
