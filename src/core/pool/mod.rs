//! Stream-ordered memory pools on host nodes and GPUs.
//!
//! An allocation is ordered like work on a stream: later work on that stream may use the bytes, and after the
//! free other allocations may reuse them. [`PoolBuffer`] keeps that order for other streams and for the CPU
//! too.

mod buffer;
mod current;
mod handle;
mod imported;
mod options;

pub use buffer::PoolBuffer;
pub use current::DevicePoolGuard;
pub use handle::{Pool, PoolStats};
pub use imported::{ImportedPool, ImportedPoolBuffer};
pub use options::{PoolOptions, Reuse};
