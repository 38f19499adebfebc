//! The memory that a tier lies in.

use crate::memory::{CpuMemory, Memory};

/// Memory that a tier can lie in: of this library, with a view of the CPU, usable from every thread. A
/// [`Buffer`](egmem_core::Buffer), or memory that `egmem serve` keeps (`exchange::RemoteBuffer`).
pub trait TierMemory: Memory + CpuMemory + Send + Sync {}

impl<M: Memory + CpuMemory + Send + Sync + ?Sized> TierMemory for M {}
