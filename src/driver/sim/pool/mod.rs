//! Stream-ordered memory pools.
//!
//! A pool has one memfd that grows; its chunks are mapped at separate addresses and divided among
//! allocations. Memory is freed when the stream reaches the free; later work in the same stream may reuse it
//! before that.

mod calls;
mod grow;
mod order;
mod settings;
mod share;

use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) use calls::Face;

use super::capacity::Charge;
use super::memory::{Memory, Purpose};
use super::ranges::FreeRanges;
use super::space::Range;
use super::state::{Answer, State, fail};
use super::stream::Point;
use crate::{Access, Code, CudaVersion, HandleTypes, Location, PoolHandle, PoolProps};

/// Allocations are aligned to, and a multiple of, this many bytes.
const UNIT: u64 = 512;

#[derive(Debug)]
pub(super) struct Pool {
    pub(super) location: Location,
    pub(super) handle_types: HandleTypes,
    pub(super) memory: Arc<Memory>,
    pub(super) imported: bool,
    /// How often it was imported and not destroyed again: all imports have one handle.
    pub(super) imports: u32,
    /// Whether it was exported: only then can pointers of it be.
    pub(super) exported: bool,
    /// A device's own pool, which cannot be destroyed.
    pub(super) is_default: bool,
    /// Its handle was destroyed; the pool lives until its last allocation is freed.
    pub(super) destroyed: bool,
    host: Access,
    pub(super) devices: Box<[Access]>,
    max_size: u64,
    pub(super) chunks: BTreeMap<u64, Chunk>,
    /// Unused parts of the file, and the file's end.
    holes: FreeRanges,
    end: u64,
    /// Live allocations by address: chunk and length.
    pub(super) live: BTreeMap<u64, Allocation>,
    /// Frees that their streams have not reached.
    freed: Vec<Freed>,
    /// Follow events, opportunistic, internal dependencies.
    reuse: [u64; 3],
    release_threshold: u64,
    reserved: Level,
    used: Level,
}

/// A count and its maximum so far.
#[derive(Debug, Default)]
struct Level {
    current: u64,
    high: u64,
}

/// Part of a pool's memory at an address.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) range: Range,
    /// Its start in the pool's file.
    pub(super) offset: u64,
    /// Free addresses; an imported allocation's chunk has none.
    free: FreeRanges,
    _charge: Option<Charge>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    pub(super) chunk: u64,
    /// The bytes it takes in the chunk.
    pub(super) len: u64,
    /// The bytes requested.
    pub(super) size: u64,
}

#[derive(Clone, Copy, Debug)]
struct Freed {
    start: u64,
    allocation: Allocation,
    point: Point,
}

impl Level {
    fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.high = self.high.max(self.current);
    }
}

impl Pool {
    pub(super) fn new(
        memory: Arc<Memory>,
        max_size: u64,
        devices: Box<[Access]>,
        imported: bool,
    ) -> Self {
        let location = memory.label.location;
        let mut pool = Self {
            location,
            handle_types: memory.label.handle_types,
            memory,
            imported,
            imports: u32::from(imported),
            exported: false,
            is_default: false,
            destroyed: false,
            host: match location {
                Location::Device(_) => Access::None,
                _ => Access::ReadWrite,
            },
            devices,
            max_size,
            chunks: BTreeMap::new(),
            holes: FreeRanges::default(),
            end: 0,
            live: BTreeMap::new(),
            freed: Vec::new(),
            reuse: [1; 3],
            release_threshold: 0,
            reserved: Level::default(),
            used: Level::default(),
        };
        if let Location::Device(device) = location
            && let Some(own) = pool.devices.get_mut(device as usize)
        {
            *own = Access::ReadWrite;
        }
        pool
    }

    /// Returns the live allocation that contains an address: start and length.
    pub(super) fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, allocation) = self.live.range(..=address).next_back()?;
        (address - start < allocation.size).then_some((start, allocation.size))
    }

    /// Returns whether a whole range lies in one live allocation.
    pub(super) fn is_live(&self, start: u64, len: u64) -> bool {
        let fits = |(at, size): (u64, u64)| len <= size - (start - at);
        self.allocation(start).is_some_and(fits)
    }

    /// Records an allocation.
    pub(super) fn hold(&mut self, start: u64, allocation: Allocation) {
        self.live.insert(start, allocation);
        self.used.add(allocation.size);
    }

    /// Records an imported allocation's chunk.
    pub(super) fn add_imported(&mut self, range: Range, offset: u64) {
        self.chunks.insert(
            range.start(),
            Chunk {
                range,
                offset,
                free: FreeRanges::default(),
                _charge: None,
            },
        );
    }

    /// Returns whether an import of the allocation at `offset` in the file is still alive.
    pub(super) fn has_imported(&self, offset: u64) -> bool {
        let freed = self
            .freed
            .iter()
            .map(|freed| (freed.start, freed.allocation));
        let live = self
            .live
            .iter()
            .map(|(&start, &allocation)| (start, allocation));
        self.imported
            && live.chain(freed).any(|(start, allocation)| {
                let chunk = self.chunks.get(&allocation.chunk);
                chunk.is_some_and(|it| it.offset + (start - allocation.chunk) == offset)
            })
    }

    /// Takes the smallest free range that is large enough; never-used memory comes last.
    fn take_free(&mut self, size: u64) -> Option<(u64, Allocation)> {
        let len = size.checked_next_multiple_of(UNIT)?;
        let parts = self.chunks.iter().flat_map(|(&chunk, it)| {
            let end = chunk + it.range.len();
            let part = move |(start, have)| (start + have == end, have, start, chunk);
            it.free.fitting(len).map(part)
        });
        let (_, _, start, chunk) = parts.min()?;
        let free = &mut self.chunks.get_mut(&chunk)?.free;
        let allocation = Allocation { chunk, len, size };
        free.take_at(start, len).then_some((start, allocation))
    }

    /// Takes memory that was freed earlier in the same order.
    fn take_freed(
        &mut self,
        size: u64,
        is_ordered: impl Fn(Point) -> bool,
    ) -> Option<(u64, Allocation)> {
        let len = size.checked_next_multiple_of(UNIT)?;
        let fits = |freed: &Freed| freed.allocation.len >= len && is_ordered(freed.point);
        let index = self.freed.iter().rposition(fits)?;
        let freed = &mut self.freed[index];
        let (start, chunk) = (freed.start, freed.allocation.chunk);
        freed.start += len;
        freed.allocation.len -= len;
        if freed.allocation.len == 0 {
            self.freed.swap_remove(index);
        }
        Some((start, Allocation { chunk, len, size }))
    }

    fn give_back(&mut self, start: u64, allocation: Allocation) {
        if self.imported {
            self.chunks.remove(&allocation.chunk);
        } else if let Some(chunk) = self.chunks.get_mut(&allocation.chunk) {
            chunk.free.give(start, allocation.len);
        }
    }

    /// Returns the chunks that can be given back to the system until at most `keep` bytes are held.
    fn releasable(&self, keep: u64) -> Vec<u64> {
        let mut held = self.reserved.current;
        let mut chunks = Vec::new();
        for (&start, chunk) in &self.chunks {
            if held <= keep {
                break;
            }
            if chunk.free.is_whole(start, chunk.range.len()) {
                held -= chunk.range.len();
                chunks.push(start);
            }
        }
        chunks
    }
}

impl State {
    pub(super) fn pool_create(&mut self, props: &PoolProps) -> Answer<PoolHandle> {
        if self
            .check_location(props.location, props.handle_types)
            .is_err()
        {
            return fail(Code::INVALID_VALUE);
        }
        if props.location == Location::Host && props.handle_types != HandleTypes::NONE {
            return fail(Code::INVALID_VALUE);
        }
        let max_size = match self.machine.driver_version {
            CudaVersion(12020..) => props.max_size,
            _ => 0,
        };
        let memory = self.new_memory(Purpose::Pool, props.location, props.handle_types, 0)?;
        let pool = Pool::new(memory, max_size, self.nobody(), false);
        Ok(self.add_pool(pool))
    }

    pub(super) fn add_pool(&mut self, pool: Pool) -> PoolHandle {
        let handle = self.number();
        self.pools.insert(handle, pool);
        PoolHandle(handle)
    }

    pub(super) fn pool(&mut self, handle: PoolHandle) -> Answer<&mut Pool> {
        match self.pools.get_mut(&handle.0) {
            Some(pool) if !pool.destroyed => Ok(pool),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    pub(super) fn pool_destroy(&mut self, handle: PoolHandle) -> Answer<()> {
        let pool = self.pool(handle)?;
        if pool.is_default {
            return fail(Code::INVALID_VALUE);
        }
        if pool.imports > 1 {
            if !pool.live.is_empty() {
                return fail(Code::INVALID_VALUE);
            }
            pool.imports -= 1;
            return Ok(());
        }
        pool.destroyed = true;
        for current in &mut self.current_pools {
            if *current == Some(handle.0) {
                *current = None; // the device falls back to its default pool
            }
        }
        self.reap(handle.0);
        Ok(())
    }

    /// Ends a destroyed pool once nothing in it is in use.
    fn reap(&mut self, handle: u64) {
        let done = |pool: &Pool| pool.destroyed && pool.live.is_empty() && pool.freed.is_empty();
        if self.pools.get(&handle).is_some_and(done)
            && let Some(pool) = self.pools.remove(&handle)
        {
            for start in pool.chunks.keys() {
                self.regions.remove(start);
            }
        }
    }
}
