//! Memory of heaps for PyTorch's allocator interface: functions that PyTorch calls, with no Python on the way.

mod graphs;
mod pool;
mod slots;
mod symbols;

pub use slots::{TorchSlot, register};
#[cfg(feature = "test-hooks")]
pub use symbols::FUNCTIONS;
