//! How copies are made.

use super::kernel::MAX_BLOCKS;
use crate::MemoryError;

/// How copies are made. docs/kv.md has the speed of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyMethod {
    /// What was the fastest for parts of this size, of those that this driver and these addresses allow.
    #[default]
    Auto,
    /// A kernel that copies all parts of all pages. It takes room on up to `blocks` of the GPU's multiprocessors from other kernels
    /// while it runs: 1 to 1024. A kernel that needs every multiprocessor whole, as many matrix products do, takes up to twice as
    /// long beside it. Addresses and sizes must be multiples of 16. The simulator runs no kernel of this kind.
    Kernel {
        /// The blocks of 512 threads.
        blocks: u32,
    },
    /// One `cuMemcpyBatchAsync`, which drivers have from CUDA 12.8 on. Not on the legacy default stream.
    Batch,
    /// One `cuMemcpyAsync` for each part of each page.
    Loop,
}

impl CopyMethod {
    /// The kernel with the number of blocks that [`Auto`](Self::Auto) takes. On an H100 4 to 64 are about as fast as each other.
    pub const KERNEL: Self = Self::Kernel { blocks: 4 };

    /// The methods that `Auto` tries, the first one first.
    pub(crate) fn choices(self, part_bytes: u64) -> Vec<Self> {
        match self {
            Self::Auto if part_bytes < LARGE => vec![Self::KERNEL, Self::Batch, Self::Loop],
            Self::Auto => vec![Self::Batch, Self::Loop],
            method => vec![method],
        }
    }

    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a number of blocks out of range.
    pub(crate) fn check(self) -> Result<(), MemoryError> {
        match self {
            Self::Kernel { blocks } if blocks == 0 || blocks > MAX_BLOCKS => {
                let valid = format!("1 to {MAX_BLOCKS}");
                Err(MemoryError::invalid_of(
                    "blocks",
                    format!("{blocks} blocks"),
                    valid,
                ))
            }
            _ => Ok(()),
        }
    }
}

/// The bytes of a part from which on copy engines are about as fast as the kernel: 48 to 49 GB/s beside 50 to 52 on an
/// H100 for 256 KiB. They take no multiprocessor.
const LARGE: u64 = 256 << 10;
