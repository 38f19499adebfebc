//! rlsf's two-level segregated fit, over a range of addresses.

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;

use rlsf::Tlsf as Base;

use super::Contestant;
use super::range::Range;

/// Blocks of up to 32 TiB, 32 lists for each power of two.
pub struct Tlsf {
    tlsf: Base<'static, u64, u32, 40, 32>,
    _range: Range,
}

/// An address.
pub struct Block(NonNull<u8>);

// SAFETY: an address.
unsafe impl Send for Block {}

impl Tlsf {
    /// Over `capacity` bytes.
    ///
    /// # Errors
    /// The kernel's; invalid input if nothing fits.
    pub fn new(capacity: u64) -> io::Result<Self> {
        let range = Range::map(capacity)?;
        let mut tlsf = Base::new();
        // SAFETY: the range is this allocator's alone and goes with it.
        unsafe {
            tlsf.insert_free_block_ptr(NonNull::slice_from_raw_parts(range.base(), range.len()))
        }
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(Self {
            tlsf,
            _range: range,
        })
    }
}

impl Contestant for Tlsf {
    type Block = Block;

    #[inline]
    fn allocate(&mut self, layout: Layout) -> Option<Block> {
        self.tlsf.allocate(layout).map(Block)
    }

    #[inline]
    unsafe fn free(&mut self, block: Block, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.tlsf.deallocate(block.0, layout.align()) };
    }

    #[inline]
    fn start(&self, block: &Block) -> u64 {
        block.0.addr().get() as u64
    }
}
