//! offset-allocator, which counts in units: 2³² of them at most.

use std::alloc::Layout;
use std::io;

use offset_allocator::{Allocation, Allocator};

use super::{Contestant, Room};

/// Units are as large as the alignment, or larger where the capacity takes it.
pub struct Offset {
    allocator: Allocator<u32>,
    unit: u64,
}

/// An allocation, and where its aligned part starts, in units.
pub struct Block {
    allocation: Allocation<u32>,
    start: u32,
}

impl Offset {
    /// For `room`, with nodes for its blocks and the free ranges between them.
    ///
    /// # Errors
    /// Invalid input for more blocks than it can count.
    pub fn new(room: Room) -> io::Result<Self> {
        let mut unit = room.align.next_power_of_two();
        while room.capacity / unit > u64::from(u32::MAX) {
            unit *= 2;
        }
        let nodes = room
            .blocks
            .checked_mul(2)
            .and_then(|nodes| nodes.checked_add(16))
            .filter(|&nodes| nodes < u32::MAX - 1)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let units = (room.capacity / unit) as u32;
        Ok(Self {
            allocator: Allocator::with_max_allocs(units, nodes),
            unit,
        })
    }
}

impl Contestant for Offset {
    type Block = Block;

    #[inline]
    fn allocate(&mut self, layout: Layout) -> Option<Block> {
        let units = u32::try_from((layout.size() as u64).div_ceil(self.unit)).ok()?;
        let align = u32::try_from((layout.align() as u64).div_ceil(self.unit)).ok()?;
        // It knows no alignment: take more, start later.
        let allocation = self.allocator.allocate(units.checked_add(align - 1)?)?;
        Some(Block {
            allocation,
            start: allocation.offset.next_multiple_of(align),
        })
    }

    #[inline]
    unsafe fn free(&mut self, block: Block, _layout: Layout) {
        self.allocator.free(block.allocation);
    }

    #[inline]
    fn start(&self, block: &Block) -> u64 {
        u64::from(block.start) * self.unit
    }
}
