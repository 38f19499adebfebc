//! talc, over a range of addresses.

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;

use talc::DefaultBinning;
use talc::base::Talc as Base;
use talc::source::Manual;

use super::Contestant;
use super::range::Range;

/// talc's core without its lock.
pub struct Talc {
    talc: Base<Manual, DefaultBinning>,
    _range: Range,
}

// SAFETY: the allocator and its range go to the other thread together.
unsafe impl Send for Talc {}

/// An address.
pub struct Block(NonNull<u8>);

// SAFETY: an address.
unsafe impl Send for Block {}

impl Talc {
    /// Over `capacity` bytes.
    ///
    /// # Errors
    /// The kernel's; invalid input if talc's own tables do not fit.
    pub fn new(capacity: u64) -> io::Result<Self> {
        let range = Range::map(capacity)?;
        let mut talc = Base::new(Manual);
        // SAFETY: the range is this allocator's alone and goes with it.
        unsafe { talc.claim(range.base().as_ptr(), range.len()) }
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(Self {
            talc,
            _range: range,
        })
    }
}

impl Contestant for Talc {
    type Block = Block;

    #[inline]
    fn allocate(&mut self, layout: Layout) -> Option<Block> {
        // SAFETY: not of zero bytes, as the trait says.
        unsafe { self.talc.allocate(layout) }.map(Block)
    }

    #[inline]
    unsafe fn free(&mut self, block: Block, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.talc.deallocate(block.0.as_ptr(), layout) };
    }

    #[inline]
    fn start(&self, block: &Block) -> u64 {
        block.0.addr().get() as u64
    }
}
