//! Zeroes memory before another peer gets it.

use serde::{Deserialize, Serialize};

use crate::driver::{Access, AccessDesc, Location};
use crate::memory::Memory;
use crate::vmm::PhysicalMemory;
use crate::{MemoryResult, Stream};

/// The processor that zeroes memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scrubber {
    /// The CPU, in several threads.
    #[default]
    Cpu,
    /// The first GPU, which then has a context of this process: some hundreds of MiB of its memory.
    Gpu,
}

/// Slices of this size are zeroed by one thread each.
const SLICE: u64 = 16 << 20;

/// Zeroes all of `memory`; leaves none of it mapped.
///
/// # Errors
/// Those of mapping and granting; with the GPU, the driver's errors. Some bytes may not be zero then.
pub(crate) fn scrub(memory: &PhysicalMemory, by: Scrubber, threads: usize) -> MemoryResult<()> {
    let mut mapping = memory.map()?;
    let bytes = memory.size().padded();
    match by {
        Scrubber::Gpu => {
            let gpu = match memory.location() {
                Location::Device(gpu) => gpu,
                _ => 0,
            };
            mapping.set_access(&[AccessDesc::new(Location::Device(gpu), Access::ReadWrite)])?;
            let stream = Stream::new(memory.driver(), gpu)?;
            let filled = stream.fill(&mapping, 0, mapping.len(), 0);
            // Even after an error, no work may still run when the mapping is dropped.
            stream.synchronize().and(filled)
        }
        Scrubber::Cpu => {
            mapping.set_access(&[AccessDesc::new(Location::Host, Access::ReadWrite)])?;
            let view = mapping.cpu()?;
            let slices: Vec<_> = (0..bytes)
                .step_by(SLICE as usize)
                .map(|start| (start, SLICE.min(bytes - start)))
                .collect();
            let per_thread = slices.len().div_ceil(threads.max(1));
            std::thread::scope(|scope| {
                let workers: Vec<_> = slices
                    .chunks(per_thread.max(1))
                    .map(|mine| {
                        scope.spawn(move || {
                            mine.iter()
                                .try_for_each(|&(start, len)| view.fill(start, len, 0))
                        })
                    })
                    .collect();
                workers.into_iter().try_for_each(|worker| {
                    worker
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::NodeId;
    use crate::{Driver, Machine};

    #[test]
    fn every_byte_is_zero_afterwards_and_nothing_is_mapped() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        for (by, bytes) in [
            (Scrubber::Cpu, 2 << 20),
            (Scrubber::Cpu, 50 << 20),
            (Scrubber::Gpu, 6 << 20),
        ] {
            let memory = PhysicalMemory::options(NodeId(0))
                .create(&driver, bytes)
                .unwrap();
            let host = [AccessDesc::new(Location::Host, Access::ReadWrite)];
            let mut mapping = memory.map().unwrap();
            mapping.set_access(&host).unwrap();
            mapping.cpu().unwrap().fill(0, bytes, 0xa5).unwrap();
            let before = driver.sim().unwrap().held().to_string();
            scrub(&memory, by, 3).unwrap();
            assert_eq!(driver.sim().unwrap().held().to_string(), before);
            let mut found = vec![1_u8; bytes as usize];
            mapping.cpu().unwrap().read_at(0, &mut found).unwrap();
            assert!(found.iter().all(|&byte| byte == 0), "{by:?}");
        }
    }
}
