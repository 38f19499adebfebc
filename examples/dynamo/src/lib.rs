//! egmem's memory as storage of [NVIDIA Dynamo](https://github.com/ai-dynamo/dynamo): the traits of its crate
//! `dynamo-memory` for buffers and blocks.
//!
//! ```
//! use dynamo_memory::{ArenaAllocator, MemoryDescriptor, StorageKind};
//! use egmem::{Buffer, Driver, Machine, Topology};
//! use egmem_dynamo_example::Storage;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver = Driver::simulated(Machine::gh200x4())?; // Driver::open() on a real machine
//! let topology = Topology::discover(&driver)?;
//! let node = topology.gpu(2)?.host_node()?;
//! let buffer = Buffer::on(node).bytes(64 << 20).allocate(&driver)?;
//!
//! // Dynamo's arena cuts the buffer into blocks; its layouts and transfers take them as pinned host memory.
//! let arena = ArenaAllocator::new(Storage::new(buffer), 64 << 10)?;
//! let block = arena.allocate(1 << 20)?;
//! assert_eq!((block.size(), block.storage_kind()), (1 << 20, StorageKind::Pinned));
//! # Ok(())
//! # }
//! ```

use std::any::Any;
use std::fmt;

use dynamo_memory::nixl::{MemType, NixlCompatible, NixlDescriptor};
use dynamo_memory::{MemoryDescriptor, StorageKind};
use egmem::Memory;
use egmem::driver::Location;

/// egmem's memory as Dynamo's storage: a [`Buffer`](egmem::Buffer), a [`Block`](egmem::Block) of a heap, or an `Arc`
/// of one.
///
/// The memory is given back when Dynamo drops the storage, and with it the last arena, layout or registration over
/// it. Dynamo waits for its transfers before that; work of other code that uses the address must have ended.
pub struct Storage<M> {
    memory: M,
}

impl<M: Memory> Storage<M> {
    /// Takes over memory.
    pub fn new(memory: M) -> Self {
        Self { memory }
    }

    /// Returns the memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Gives the memory back.
    pub fn into_memory(self) -> M {
        self.memory
    }

    /// Returns the GPU whose memory this is; `None` for the CPU's.
    fn gpu(&self) -> Option<u32> {
        match self.memory.location() {
            Location::Device(gpu) => u32::try_from(gpu).ok(),
            _ => None,
        }
    }
}

impl<M: Memory + Send + Sync + 'static> MemoryDescriptor for Storage<M> {
    fn addr(&self) -> usize {
        self.memory.device_ptr().0 as usize
    }

    fn size(&self) -> usize {
        self.memory.len() as usize
    }

    /// Pinned for memory of the CPU: the driver has it pinned on its node, and GPUs access it.
    fn storage_kind(&self) -> StorageKind {
        self.gpu().map_or(StorageKind::Pinned, StorageKind::Device)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    /// `None`, as for every storage of Dynamo that is not registered: `dynamo_memory::nixl::register_with_nixl` wraps
    /// one that is.
    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        None
    }
}

impl<M: Memory> NixlCompatible for Storage<M> {
    fn nixl_params(&self) -> (*const u8, usize, MemType, u64) {
        let (kind, device) = match self.gpu() {
            Some(gpu) => (MemType::Vram, u64::from(gpu)),
            None => (MemType::Dram, 0),
        };
        let address = self.memory.device_ptr().0 as usize;
        let pointer = std::ptr::with_exposed_provenance(address);
        (pointer, self.memory.len() as usize, kind, device)
    }
}

impl<M: Memory> fmt::Debug for Storage<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("address", &self.memory.device_ptr())
            .field("bytes", &self.memory.len())
            .field("location", &self.memory.location())
            .finish()
    }
}
