//! The frame allocator of the crate buddy_system_allocator: numbers of frames, in B-trees by power of two.
//!
//! Its heap keeps lists inside the memory instead and searches them at each free, which takes tens of
//! microseconds among ten thousand blocks; the frames are its better half.

use std::alloc::Layout;

use buddy_system_allocator::FrameAllocator;

use super::{Contestant, Room};

/// Blocks to 2⁴⁷ frames.
const ORDER: usize = 48;

/// Powers of two.
pub struct Buddy {
    frames: FrameAllocator<ORDER>,
    shift: u32,
}

impl Buddy {
    /// For `room`, in frames of its alignment.
    pub fn new(room: Room) -> Self {
        let shift = room.align.next_power_of_two().trailing_zeros();
        let mut frames = FrameAllocator::new();
        frames.add_frame(0, (room.capacity >> shift) as usize);
        Self { frames, shift }
    }

    fn count(&self, layout: Layout) -> usize {
        layout.size().max(layout.align()).div_ceil(1 << self.shift)
    }
}

impl Contestant for Buddy {
    /// The first frame.
    type Block = usize;

    #[inline]
    fn allocate(&mut self, layout: Layout) -> Option<usize> {
        self.frames.alloc(self.count(layout))
    }

    #[inline]
    unsafe fn free(&mut self, block: usize, layout: Layout) {
        self.frames.dealloc(block, self.count(layout));
    }

    #[inline]
    fn start(&self, block: &usize) -> u64 {
        (*block as u64) << self.shift
    }
}
