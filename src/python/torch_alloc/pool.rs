//! A heap's blocks in the order of streams.
//!
//! A freed block stays with its stream, which may have it again at once: the work of the new user runs after that of
//! the old one. Other streams get it from the heap, after an event. A block that other streams were recorded for goes
//! back to the heap after all of them. PyTorch tells of a recorded stream no GPU, so a default stream may be that of each
//! GPU that this process uses. The per-thread default stream is another one in each thread: its blocks wait for all work.
//!
//! A block that was allocated while its stream was captured into a CUDA graph belongs to the graph: each replay uses
//! it. It is reused within captures into the same graph's pool, and freed when PyTorch releases that pool and the
//! GPUs have done all work: a replay may still run, on any stream. If other streams were recorded for it, it is not
//! reused: nothing in the graph orders a new user after their work.

use std::alloc::Layout;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use egmem::driver::{Access, Driver, Location, StreamHandle};
use egmem::memory::{AccessChecks, Engine};
use egmem::{Block, Error, Heap, Stream};

use super::graphs::{Graphs, Idle, PoolId, Table};
use crate::frees::{free_after_gpus, free_deferred_of, free_later};
use crate::interpreter::{detached, has_gil, lock};

/// Sizes are multiples of this, as PyTorch's are: similar requests find each other's blocks.
const ROUND: u64 = 512;

/// A block in use.
struct Live {
    block: Block,
    /// The GPU that it was allocated for.
    gpu: i32,
    /// Other streams that use it.
    recorded: Vec<u64>,
    user: User,
}

/// Which work uses a block.
enum User {
    /// Work of its streams.
    Streams,
    /// Replays of graphs with these pools; `shared` if it was allocated for several.
    Graphs { pools: Vec<PoolId>, shared: bool },
    /// Replays of graphs whose pools were released, that had begun by then, on any stream.
    Replays,
}

/// The lock of PyTorch's that the calling thread has. It may have the GIL too, which GPU work may need, such as a
/// host function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// None: the thread gives up the GIL while it waits.
    WithoutLock,
    /// That of the caching allocator. The thread must keep the GIL: another thread could take it, wait for that lock,
    /// and keep this one from taking the GIL again.
    WithLock,
}

#[derive(Default)]
struct State {
    live: Table<u64, Live>,
    idle: Idle,
    graphs: Graphs,
    /// Why the last allocation failed.
    last_error: Option<Error>,
}

impl State {
    /// Returns the user of a block that is allocated for graphs with these pools.
    fn user_of(&self, pools: Vec<PoolId>) -> User {
        let shared = pools.len() > 1;
        let pools = self.graphs.without_released(pools);
        match pools.is_empty() {
            true => User::Replays,
            false => User::Graphs { pools, shared },
        }
    }
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
    /// The GPUs that are known to have access to the heap's memory: a bit for each of the first 64.
    reached_by: AtomicU64,
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
            reached_by: AtomicU64::new(0),
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
    /// A caller with a lock and the GIL waits with both, as for `cudaMalloc`, if the heap has no room otherwise.
    ///
    /// # Errors
    /// As [`Heap::allocate`], after idle blocks and blocks that wait for GPU work were given back; `NotAccessible` for
    /// a GPU that has no access to the heap's memory, and would lose its context by using it.
    pub fn allocate(&self, bytes: u64, stream: StreamHandle, caller: Caller) -> Result<u64, Error> {
        self.driver().expect_this_process("heap")?;
        let size = bytes
            .max(1)
            .checked_next_multiple_of(ROUND)
            .unwrap_or(u64::MAX);
        let graphs = self.graphs_of(stream);
        let mut state = lock(&self.state);
        let idle = match graphs.is_empty() {
            true => state.idle.take(stream, size),
            false => state.graphs.reuse(&graphs, stream, size),
        };
        let block = match idle {
            Some(block) => block,
            None => {
                // Growing takes the driver's time, which other threads need not wait for.
                drop(state);
                let allocated = self.allocate_for(caller, size).and_then(|block| {
                    self.expect_access(&block, stream.device)?;
                    Ok(block)
                });
                state = lock(&self.state);
                allocated.inspect_err(|error| state.last_error = Some(error.clone()))?
            }
        };
        let address = block.device_ptr().0;
        let user = match graphs.is_empty() {
            true => User::Streams,
            false => state.user_of(graphs),
        };
        let live = Live {
            block,
            gpu: stream.device,
            recorded: Vec::new(),
            user,
        };
        state.live.insert(address, live);
        self.allocated.fetch_add(size, Relaxed);
        Ok(address)
    }

    fn expect_access(&self, block: &Block, gpu: i32) -> Result<(), Error> {
        let bit = 1_u64.checked_shl(gpu as u32).unwrap_or(0);
        if self.reached_by.load(Relaxed) & bit != 0 {
            return Ok(());
        }
        match block.gpu_access(gpu, Engine::Kernel, 0, block.len())? {
            Access::ReadWrite => {
                self.reached_by.fetch_or(bit, Relaxed);
                Ok(())
            }
            have => {
                let who = Location::Device(gpu);
                Err(Error::not_accessible(who, have, Access::ReadWrite))
            }
        }
    }

    fn allocate_for(&self, caller: Caller, size: u64) -> Result<Block, Error> {
        if caller == Caller::WithoutLock {
            let mut allocated = None;
            detached(|| allocated = Some(self.allocate_from_heap(size)));
            return allocated.unwrap_or_else(|| self.allocate_from_heap(size));
        }
        // Blocks that `free_segment` kept are reused before the heap grows.
        if self.captures.load(Relaxed) == 0 && !has_gil() {
            free_deferred_of(self.driver());
        }
        self.allocate_from_heap(size)
    }

    fn allocate_from_heap(&self, size: u64) -> Result<Block, Error> {
        let layout = Layout::from_size_align(size as usize, ROUND as usize)
            .map_err(|_| Error::invalid("size", format!("{size} bytes are too many")))?;
        self.heap.allocate(layout).or_else(|_| {
            self.give_back_idle();
            self.heap.collect_all().ok();
            free_deferred_of(self.driver());
            self.heap.allocate(layout)
        })
    }

    /// Frees the block at `address` in the order of `stream`. An address that is not a live block's is ignored, and
    /// logged. The caller has no lock of PyTorch's.
    pub fn free(&self, address: u64, stream: StreamHandle) {
        let Some((mut state, live)) = self.take(address) else {
            return;
        };
        let Live {
            block,
            gpu,
            recorded,
            user,
        } = live;
        let per_thread = StreamHandle::PER_THREAD;
        let is_per_thread = stream.raw == per_thread || recorded.contains(&per_thread);
        match user {
            User::Graphs { pools, shared } => {
                let reusable = recorded.is_empty() && !shared && !is_per_thread;
                state.graphs.put(pools, block, stream, reusable);
            }
            _ if is_per_thread => {
                drop(state);
                detached(|| self.free_after_gpus(vec![block]));
            }
            User::Replays => {
                drop(state);
                detached(|| self.free_after_gpus(vec![block]));
            }
            User::Streams if recorded.is_empty() && block.len() <= self.keep / 4 => {
                state.idle.put(stream, block);
                if state.idle.bytes() > self.keep {
                    drop(state);
                    detached(|| self.give_back_idle());
                }
            }
            User::Streams => {
                drop(state);
                detached(|| self.free_after_all(block, stream, (gpu, &recorded)));
            }
        }
    }

    /// Frees the block at `address` after all work of all GPUs, as `cudaFree` does. An address that is not a live
    /// block's is ignored, and logged. The caller may have PyTorch's lock: with the GIL too, it waits for nothing,
    /// and a later call frees the block.
    pub fn free_segment(&self, address: u64) {
        if let Some((state, Live { block, .. })) = self.take(address) {
            drop(state);
            match has_gil() {
                true => free_later(self.driver(), block.len(), block),
                false => self.free_after_gpus(vec![block]),
            }
        }
    }

    fn take(&self, address: u64) -> Option<(MutexGuard<'_, State>, Live)> {
        if !self.driver().is_of_this_process() {
            return None;
        }
        let mut state = lock(&self.state);
        let Some(live) = state.live.remove(&address) else {
            drop(state);
            tracing::error!("{address:#x} is freed, which is no block of this heap");
            return None;
        };
        self.allocated.fetch_sub(live.block.len(), Relaxed);
        Some((state, live))
    }

    /// Notes that work of another stream uses the block.
    pub fn record(&self, address: u64, raw: u64) {
        let mut state = lock(&self.state);
        if let Some(live) = state.live.get_mut(&address)
            && !live.recorded.contains(&raw)
        {
            live.recorded.push(raw);
        }
    }

    /// Returns the streams that were recorded for a block of a GPU, and the default streams of the other GPUs for a default
    /// one.
    fn recorded_of(&self, (gpu, recorded): (i32, &[u64])) -> Result<Vec<StreamHandle>, Error> {
        let mut streams = Vec::new();
        for raw in recorded {
            let own = StreamHandle {
                device: gpu,
                raw: *raw,
            };
            streams.push(own);
            if own.is_default() {
                let driver = self.driver();
                let others = (0..driver.device_count()?).filter(|other| *other != gpu);
                let used = others.filter(|other| driver.has_context(*other) != Some(false));
                streams.extend(used.map(|device| StreamHandle { device, ..own }));
            }
        }
        Ok(streams)
    }

    /// Returns the graphs' pools that a captured stream's memory belongs to; none for other streams.
    fn graphs_of(&self, stream: StreamHandle) -> Vec<PoolId> {
        if self.captures.load(Relaxed) == 0 {
            return Vec::new();
        }
        let pools = lock(&self.state).graphs.of_capture(stream.device);
        match pools.is_empty() || self.borrowed(stream).is_capturing() == Ok(false) {
            true => Vec::new(),
            false => pools,
        }
    }

    /// Notes that a capture into a graph's pool begins on a GPU.
    pub fn begin_capture(&self, gpu: i32, pool: PoolId) {
        lock(&self.state).graphs.begin(gpu, pool);
        self.captures.fetch_add(1, Relaxed);
    }

    /// Notes that it has ended.
    pub fn end_capture(&self, gpu: i32, pool: PoolId) {
        if lock(&self.state).graphs.end(gpu, pool) {
            self.captures.fetch_sub(1, Relaxed);
        }
    }

    /// Notes that a graph gives up its pool. After the last, the pool's blocks are freed when the GPUs have done
    /// their work, those in use when they are freed. The caller has no lock of PyTorch's.
    pub fn release_graph(&self, pool: PoolId) {
        let unused = {
            let mut state = lock(&self.state);
            let Some(unused) = state.graphs.release(pool) else {
                return;
            };
            for live in state.live.values_mut() {
                if let User::Graphs { pools, .. } = &mut live.user {
                    pools.retain(|other| *other != pool);
                    if pools.is_empty() {
                        live.user = User::Replays;
                    }
                }
            }
            unused
        };
        if !unused.is_empty() {
            detached(|| self.free_after_gpus(unused));
        }
    }

    /// Frees blocks after all work of all GPUs: after the captures that are under way. The caller has no GIL.
    fn free_after_gpus(&self, blocks: Vec<Block>) {
        let bytes = blocks.iter().map(Block::len).sum();
        match self.captures.load(Relaxed) {
            0 => free_after_gpus(self.driver(), bytes, blocks),
            _ => free_later(self.driver(), bytes, blocks),
        }
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

    /// Frees a block after the work of several streams: one, and those that were recorded for a block of a GPU.
    fn free_after_all(&self, block: Block, stream: StreamHandle, recorded: (i32, &[u64])) {
        let Ok(recorded) = self.recorded_of(recorded) else {
            return self.free_after_gpus(vec![block]);
        };
        let mut streams = recorded.iter().chain([&stream]);
        if streams.any(|stream| self.borrowed(*stream).is_capturing() != Ok(false)) {
            // A stream that is joined to a captured one is captured too, and the capture could not end.
            return free_later(self.driver(), block.len(), block);
        }
        let freed = match self.joined(stream, &recorded) {
            Ok(joined) => block
                .free_after(&joined)
                .map_err(|refused| (refused.error, refused.block)),
            Err(error) => Err((Box::new(error), block)),
        };
        if let Err((error, block)) = freed {
            tracing::debug!(%error, "a block waits for its GPUs, because no event can order it");
            self.free_after_gpus(vec![block]);
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
        // SAFETY: PyTorch's streams live as long as the process, and this is used within one call. A stream of the
        // program's own lives as long, as docs/pytorch.md demands: idle blocks are kept with it.
        unsafe { Stream::borrowed(self.driver(), stream) }
    }
}
