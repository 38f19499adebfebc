//! Interfaces that all memory of this crate shares, and the CPU's safe access to it.
//!
//! # Access by the CPU
//! GPUs and other processes write the same bytes, so safe code never gets `&[T]`. `CpuView` copies in and out by relaxed
//! atomic accesses of whole aligned words, since accesses of different sizes to the same bytes would race. This is sound
//! with any concurrent writer; a racing value of more than a word may be torn. Long copies are assembly with the same
//! effect (`core/memory/words`): the compiler makes one move per relaxed access, which is half as fast as `memcpy`, and
//! `memcpy` itself would rest on behaviour that C leaves undefined. `as_slice` is `unsafe`, with its contract.
//! `exclusive_slice` is safe: it checks that the host alone reaches the memory. A view borrows the mapping, and taking the
//! CPU's access away needs the mapping exclusively, so a view never faults.
//!
//! Host access has one meaning per mapping. The driver wants it named by the memory's own node; the types translate every
//! name of the host to that.

mod checks;
mod file;
mod parallel;
mod view;
mod words;

pub use checks::{
    AccessChecks, Engine, GrantUse, GrantUses, access_checks, expect_gpu_access,
    expect_no_cpu_fault, impl_memory, is_of_one_kind, memory_through,
};
pub use parallel::ParallelCopy;
pub use view::{CpuMemory, CpuView, cpu_accessors, impl_cpu_memory};

use std::ops::Range;
use std::sync::Arc;

use crate::driver::{DevicePtr, Driver, Location};
use crate::{Error, Result};

pub use parallel::in_threads;

/// Memory with an address in CUDA's unified address space.
pub trait Memory: AccessChecks {
    /// Returns the memory's driver.
    fn driver(&self) -> &Driver;
    /// Returns the address of the first byte, the same for every GPU and, for host memory, for the CPU.
    fn device_ptr(&self) -> DevicePtr;
    /// Returns the number of usable bytes.
    fn len(&self) -> u64;
    /// Returns the memory's location: of memory in several places, such as a spread [`Buffer`](crate::Buffer), that of
    /// its first byte.
    fn location(&self) -> Location;

    /// Returns whether there are no bytes; memory of this crate always has some.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that `len` bytes follow at `offset`; returns the address there.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    fn range(&self, offset: u64, len: u64) -> Result<DevicePtr> {
        check_range(offset, len, self.len())?;
        Ok(self.device_ptr().add(offset))
    }
}

// Shared memory, which a [ticket](crate::stream::Transfer) and its owner may both have: it lives as long as the pointer.
memory_through!(unsafe impl [M: Memory + ?Sized] for Arc<M>, |this| **this);

/// Checks that `len` bytes from `offset` on lie in memory of `size` bytes.
///
/// # Errors
/// [`Error::OutOfRange`].
pub fn check_range(offset: u64, len: u64, size: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfRange { offset, len, size }),
    }
}

/// Returns those of `parts` that contain some of `len` bytes from `offset` on. The parts are side by side from 0 on, in
/// the order of addresses, and `range` tells where each lies.
pub fn overlapping<P>(
    parts: &[P],
    range: impl Fn(&P) -> Range<u64>,
    offset: u64,
    len: u64,
) -> &[P] {
    let end = offset.saturating_add(len);
    let first = parts.partition_point(|part| range(part).end <= offset);
    let parts = &parts[first..];
    &parts[..parts.partition_point(|part| range(part).start < end)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_overlap_if_they_share_a_byte(
            sizes in prop::collection::vec(1_u64..9, 0..9),
            offset in 0_u64..80,
            len in prop_oneof![1_u64..80, Just(u64::MAX)],
        ) {
            let mut end = 0;
            let parts: Vec<Range<u64>> = sizes
                .iter()
                .map(|size| {
                    end += size;
                    end - size..end
                })
                .collect();
            let range = offset..offset.saturating_add(len);
            let shares = |part: &&Range<u64>| part.start < range.end && range.start < part.end;
            let expected: Vec<_> = parts.iter().filter(shares).cloned().collect();
            prop_assert_eq!(overlapping(&parts, Clone::clone, offset, len), &expected[..]);
        }
    }
}
