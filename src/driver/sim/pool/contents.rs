//! A pool's memory: chunks, allocations, and frees that their streams have not reached.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::sim::capacity::Charge;
use crate::sim::fault::Answer;
use crate::sim::memory::Memory;
use crate::sim::space::{FreeRanges, Range};
use crate::sim::state::Point;
use crate::{Access, Code, DevicePtr, Location};

/// Allocations are aligned to, and a multiple of, this many bytes.
const UNIT: u64 = 512;

#[derive(Debug)]
pub struct Pool {
    pub memory: Arc<Memory>,
    /// How often it was imported and not destroyed again, which all imports have one handle for; 0: it is this simulator's.
    pub imports: u32,
    /// Whether it was exported: only then can pointers of it be.
    pub exported: bool,
    /// A device's own pool, which cannot be destroyed.
    pub is_default: bool,
    /// Its handle was destroyed; the pool lives until its last allocation is freed.
    pub destroyed: bool,
    pub host: Access,
    pub devices: Box<[Access]>,
    pub max_size: u64,
    pub chunks: BTreeMap<u64, Chunk>,
    /// Unused parts of the file, which has no end.
    pub holes: FreeRanges,
    /// Live allocations by address: chunk and length.
    pub live: BTreeMap<u64, Allocation>,
    /// Frees that their streams have not reached.
    pub freed: Vec<Freed>,
    /// Follow events, opportunistic, internal dependencies.
    pub reuse: [u64; 3],
    pub release_threshold: u64,
    pub reserved: Level,
    pub used: Level,
}

/// A count and its maximum so far.
#[derive(Debug, Default)]
pub struct Level {
    pub current: u64,
    pub high: u64,
}

/// Part of a pool's memory at an address.
#[derive(Debug)]
pub struct Chunk {
    pub range: Range,
    /// Its start in the pool's file.
    pub offset: u64,
    /// Free addresses; an imported allocation's chunk has none.
    pub free: FreeRanges,
    pub _charge: Option<Charge>,
}

#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    pub chunk: u64,
    /// The bytes it takes in the chunk.
    pub len: u64,
    /// The bytes requested.
    pub size: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Freed {
    pub start: u64,
    pub allocation: Allocation,
    pub point: Point,
}

impl Level {
    pub fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.high = self.high.max(self.current);
    }
}

impl Pool {
    pub fn new(memory: Arc<Memory>, max_size: u64, devices: Box<[Access]>, imported: bool) -> Self {
        let location = memory.label.location;
        let mut pool = Self {
            memory,
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
            holes: FreeRanges::whole(0, i64::MAX as u64),
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

    pub fn is_imported(&self) -> bool {
        self.imports > 0
    }

    /// Returns the live allocation that contains an address: start and length.
    pub fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, allocation) = self.live.range(..=address).next_back()?;
        (address - start < allocation.size).then_some((start, allocation.size))
    }

    /// Returns whether a whole range lies in one live allocation.
    pub fn is_live(&self, start: u64, len: u64) -> bool {
        let fits = |(at, size): (u64, u64)| len <= size - (start - at);
        self.allocation(start).is_some_and(fits)
    }

    /// Records an allocation.
    pub fn hold(&mut self, start: u64, allocation: Allocation) {
        self.live.insert(start, allocation);
        self.used.add(allocation.size);
    }

    /// Ends the use of the allocation at an address.
    pub fn end_use(&mut self, ptr: DevicePtr) -> Answer<Allocation> {
        let allocation = self.live.remove(&ptr.0).ok_or(Code::INVALID_VALUE)?;
        self.used.current -= allocation.size;
        Ok(allocation)
    }

    /// Returns whether an import of the allocation at `offset` in the file is still alive.
    pub fn has_imported(&self, offset: u64) -> bool {
        let freed = self.freed.iter().map(|it| (it.start, it.allocation));
        let live = self.live.iter().map(|(&start, &it)| (start, it));
        self.is_imported()
            && live.chain(freed).any(|(start, allocation)| {
                let chunk = self.chunks.get(&allocation.chunk);
                chunk.is_some_and(|it| it.offset + (start - allocation.chunk) == offset)
            })
    }

    /// Takes the smallest free range that is large enough; never-used memory comes last.
    pub fn take_free(&mut self, size: u64) -> Option<(u64, Allocation)> {
        let len = size.checked_next_multiple_of(UNIT)?;
        let parts = self.chunks.iter().flat_map(|(&chunk, it)| {
            let end = chunk + it.range.len;
            let part = move |(start, have)| (start + have == end, have, start, chunk);
            it.free.fitting(len).map(part)
        });
        let (_, _, start, chunk) = parts.min()?;
        let free = &mut self.chunks.get_mut(&chunk)?.free;
        let allocation = Allocation { chunk, len, size };
        free.take_at(start, len).then_some((start, allocation))
    }

    /// Takes memory that was freed earlier in the same order.
    pub fn take_freed(
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

    /// Returns the chunks that can be given back to the system until at most `keep` bytes are held.
    pub fn releasable(&self, keep: u64) -> Vec<u64> {
        let mut held = self.reserved.current;
        let mut chunks = Vec::new();
        for (&start, chunk) in &self.chunks {
            if held <= keep {
                break;
            }
            if chunk.free.is_whole(start, chunk.range.len) {
                held -= chunk.range.len;
                chunks.push(start);
            }
        }
        chunks
    }
}
