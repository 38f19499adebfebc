//! Queries about devices, answered from the machine's description alone.

use super::fault::{Answer, fail};
use super::machine::{AttributeAnswer, GpuSpec};
use super::space::GRANULARITY;
use super::state::State;
use crate::text::pci_address;
use crate::*;

impl State {
    pub fn driver_version(&self) -> Answer<CudaVersion> {
        Ok(self.machine.driver_version)
    }

    pub fn device_count(&self) -> Answer<i32> {
        Ok(self.machine.gpus.len() as i32)
    }

    fn gpu(&self, device: i32) -> Answer<&GpuSpec> {
        Ok(self.machine.gpu(device).ok_or(Code::INVALID_DEVICE)?)
    }

    pub fn device_name(&self, device: i32) -> Answer<String> {
        Ok(self.gpu(device)?.name.clone())
    }

    pub fn device_uuid(&self, device: i32) -> Answer<[u8; 16]> {
        Ok(self.machine.uuid(device).ok_or(Code::INVALID_DEVICE)?)
    }

    pub fn device_pci_bus_id(&self, device: i32) -> Answer<String> {
        let id = self.machine.pci_bus_id(device);
        Ok(id.ok_or(Code::INVALID_DEVICE)?)
    }

    pub fn device_total_mem(&self, device: i32) -> Answer<u64> {
        Ok(self.gpu(device)?.memory)
    }

    pub fn device_can_access_peer(&self, device: i32, peer: i32) -> Answer<bool> {
        self.gpu(device).and(self.gpu(peer))?;
        Ok(self.machine.peers(device, peer))
    }

    /// CUDA documents that one GPU alone has no link. The answers for GPUs that cannot access each other, and
    /// the rank of PCIe, are guesses.
    pub fn device_p2p_attribute(
        &self,
        device: i32,
        peer: i32,
        attribute: P2pAttribute,
    ) -> Answer<i32> {
        self.gpu(device).and(self.gpu(peer))?;
        if device == peer {
            return fail(Code::INVALID_DEVICE);
        }
        let machine = &self.machine;
        let (access, nvlink) = (machine.peers(device, peer), machine.linked(device, peer));
        Ok(match attribute {
            P2pAttribute::PERFORMANCE_RANK => i32::from(!nvlink),
            P2pAttribute::ACCESS_SUPPORTED | P2pAttribute::CUDA_ARRAY_ACCESS_SUPPORTED => {
                access.into()
            }
            P2pAttribute::NATIVE_ATOMIC_SUPPORTED => (access && nvlink).into(),
            P2pAttribute::ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED
                if machine.driver_version >= CudaVersion(13000) =>
            {
                0
            }
            _ => return fail(Code::INVALID_VALUE),
        })
    }

    pub fn mem_granularity(&self, _: &AllocationProps, _: GranularityKind) -> Answer<u64> {
        // Measured: the same for every location, even those that do not exist.
        Ok(GRANULARITY)
    }

    pub fn device_attribute(&self, device: i32, attribute: DeviceAttribute) -> Answer<i32> {
        let (machine, gpu) = (&self.machine, self.gpu(device)?);
        match machine.attributes.get(&attribute.0) {
            Some(AttributeAnswer::Value(value)) => return Ok(*value),
            Some(AttributeAnswer::Refused(_)) => return fail(Code::INVALID_VALUE),
            None => {}
        }
        if attribute
            .since()
            .is_some_and(|since| machine.driver_version < since)
        {
            return fail(Code::INVALID_VALUE);
        }
        let pci = || {
            let id = machine.pci_bus_id(device).unwrap_or_default();
            pci_address(&id).unwrap_or_default()
        };
        let coherent = i32::from(gpu.coherent);
        Ok(match attribute {
            DeviceAttribute(33) => pci().1.into(),
            DeviceAttribute(34) => pci().2.into(),
            DeviceAttribute(50) => pci().0 as i32,
            DeviceAttribute::MULTIPROCESSOR_COUNT => gpu.multiprocessors,
            DeviceAttribute::COMPUTE_CAPABILITY_MAJOR => gpu.compute_capability.0,
            DeviceAttribute::COMPUTE_CAPABILITY_MINOR => gpu.compute_capability.1,
            DeviceAttribute::PAGEABLE_MEMORY_ACCESS => coherent,
            DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES => coherent,
            DeviceAttribute::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST => coherent,
            DeviceAttribute::MEMPOOL_SUPPORTED_HANDLE_TYPES => match machine.driver_version.0 {
                12030.. => 9,
                _ => 1,
            },
            DeviceAttribute::NUMA_CONFIG => i32::from(gpu.numa_id >= 0),
            DeviceAttribute::NUMA_ID => gpu.numa_id,
            DeviceAttribute::HOST_NUMA_ID => gpu.host_numa,
            DeviceAttribute::HOST_NUMA_MULTINODE_IPC_SUPPORTED => coherent,
            // The simulator does not invent answers for attributes that it does not know.
            _ => return same_on_all(attribute).map_or_else(|| fail(Code::INVALID_VALUE), Ok),
        })
    }
}

/// Returns an attribute that every simulated GPU answers alike.
const fn same_on_all(attribute: DeviceAttribute) -> Option<i32> {
    Some(match attribute {
        DeviceAttribute(1) => 1024, // MAX_THREADS_PER_BLOCK
        DeviceAttribute(10) => 32,  // WARP_SIZE
        DeviceAttribute(19) => 1,   // CAN_MAP_HOST_MEMORY
        DeviceAttribute(31) => 1,   // CONCURRENT_KERNELS
        DeviceAttribute(40) => 3,   // ASYNC_ENGINE_COUNT
        DeviceAttribute::INTEGRATED => 0,
        DeviceAttribute::MANAGED_MEMORY
        | DeviceAttribute::CONCURRENT_MANAGED_ACCESS
        | DeviceAttribute::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        | DeviceAttribute::HOST_REGISTER_SUPPORTED
        | DeviceAttribute::READ_ONLY_HOST_REGISTER_SUPPORTED
        | DeviceAttribute::UNIFIED_ADDRESSING
        | DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | DeviceAttribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        | DeviceAttribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        | DeviceAttribute::MEMORY_POOLS_SUPPORTED
        | DeviceAttribute::DMA_BUF_SUPPORTED
        // Only a hint: without an IMEX channel the driver also answers 1, and refuses later.
        | DeviceAttribute::HANDLE_TYPE_FABRIC_SUPPORTED
        | DeviceAttribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | DeviceAttribute::HOST_NUMA_MEMORY_POOLS_SUPPORTED
        | DeviceAttribute::HOST_MEMORY_POOLS_SUPPORTED
        | DeviceAttribute::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => 1,
        _ => return None,
    })
}
