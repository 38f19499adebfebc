//! Stream-ordered memory pools on host nodes and GPUs.
//!
//! An allocation is ordered like work on a stream: later work on that stream may use the bytes, and after the
//! free other allocations may reuse them. [`PoolBuffer`] keeps that order for other streams and for the CPU
//! too.
//!
//! # Design
//! A pool's allocation knows the stream it was made on and every stream it was lent to by `use_on`. Its free waits for all
//! of them by events, and so does the CPU's view; use after free across streams takes `unsafe`. Safe copies, fills and
//! proofs on another stream wait for the stream that knows the memory.
//!
//! A pool is a device's current one through a guard, one at a time per device: with two, memory of a GPU could be taken for
//! a host pool's, and the CPU would fault. A pool with fabric handles is made only after plain fabric memory could be made:
//! drivers corrupt the heap when such a pool was refused an export and is destroyed.

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
