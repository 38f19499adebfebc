//! How copies are made, and the choice of [`CopyMethod::Auto`].

use super::kernel::MAX_BLOCKS;
use crate::MemoryError;
use crate::driver::Code;

/// From so many bytes of a part on the copy engines of an H100 are about as fast as the kernel: 48 to 49 GB/s beside 50 to 52.
/// They take no multiprocessor.
const COPY_ENGINES: u64 = 256 << 10;

/// How copies are made. docs/kv.md has the speed of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyMethod {
    /// The method that was the fastest for parts of this size, of those that this driver and these addresses allow.
    #[default]
    Auto,
    /// A kernel that copies all parts of all pages. It takes room on up to `blocks` of the GPU's multiprocessors from other kernels
    /// while it runs: 1 to 1024. A kernel that needs every multiprocessor whole, as many matrix products do, takes up to twice as
    /// long beside it. Addresses and sizes must be multiples of 16. The simulator runs no kernel of this kind.
    Kernel {
        /// The blocks of 512 threads.
        blocks: u32,
    },
    /// One `cuMemcpyBatchAsync`, which drivers have from CUDA 12.8 on. Not on the legacy default stream, nor in memory that does not
    /// tell its [borders](crate::memory::AccessChecks::of_one_mapping).
    Batch,
    /// One `cuMemcpyAsync` for each part of each page.
    Loop,
}

impl CopyMethod {
    /// The kernel with the number of blocks that [`Auto`](Self::Auto) takes. On an H100 4 to 64 are about as fast as each other.
    pub const KERNEL: Self = Self::Kernel { blocks: 4 };

    /// Returns the kernel with another number of blocks; other methods as they are.
    pub const fn with_blocks(self, blocks: u32) -> Self {
        match self {
            Self::Kernel { .. } => Self::Kernel { blocks },
            method => method,
        }
    }

    /// Returns the methods that are tried, the first one first, for parts of which the smallest has so many bytes.
    pub(crate) fn choices(self, part_bytes: u64) -> Vec<Self> {
        match self {
            Self::Auto if part_bytes < COPY_ENGINES => vec![Self::KERNEL, Self::Batch, Self::Loop],
            Self::Auto => vec![Self::Batch, Self::Loop],
            method => vec![method],
        }
    }

    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a number of blocks out of range.
    pub(crate) fn check(self) -> Result<(), MemoryError> {
        match self {
            Self::Kernel { blocks } if !(1..=MAX_BLOCKS).contains(&blocks) => {
                let (why, valid) = (format!("{blocks} blocks"), format!("1 to {MAX_BLOCKS}"));
                Err(MemoryError::invalid_of("blocks", why, valid))
            }
            _ => Ok(()),
        }
    }
}

/// Returns whether an error says that a method does not work here or now, and not that copies fail. Without memory for
/// a kernel, or for its list, copies by the driver may go on.
pub(super) fn may_do_otherwise(error: &crate::Error) -> bool {
    let is_refusal = |error: &MemoryError| {
        matches!(
            error,
            MemoryError::PlatformUnsupported { .. }
                | MemoryError::DriverTooOld { .. }
                | MemoryError::MissingSymbol { .. }
                | MemoryError::NotAccessible { .. }
        ) || matches!(
            error.code(),
            Some(
                Code::OUT_OF_MEMORY
                    | Code::INVALID_VALUE
                    | Code::NOT_SUPPORTED
                    | Code::INVALID_HANDLE
            )
        )
    };
    error.memory().is_some_and(is_refusal)
}
