//! Devices: queries, answered from the machine's description alone, and the crate's own kernels, in Rust.

use std::ffi::CStr;

use super::access::Engine;
use super::fault::{Answer, fail};
use super::machine::{AttributeAnswer, GpuSpec};
use super::space::GRANULARITY;
use super::state::{Kernel, State, Work};
use crate::kernels::{CHECK_REWRITE, PTX, READ, WRITE, pattern};
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
        let since = attribute.since();
        if since.is_some_and(|since| machine.driver_version < since) {
            return fail(Code::INVALID_VALUE);
        }
        let pci = || {
            let id = machine.pci_bus_id(device).unwrap_or_default();
            pci_address(&id).unwrap_or_default()
        };
        Ok(match attribute {
            DeviceAttribute(33) => pci().1.into(),
            DeviceAttribute(34) => pci().2.into(),
            DeviceAttribute(50) => pci().0 as i32,
            DeviceAttribute::MULTIPROCESSOR_COUNT => gpu.multiprocessors,
            DeviceAttribute::COMPUTE_CAPABILITY_MAJOR => gpu.compute_capability.0,
            DeviceAttribute::COMPUTE_CAPABILITY_MINOR => gpu.compute_capability.1,
            DeviceAttribute::MEMPOOL_SUPPORTED_HANDLE_TYPES => match machine.driver_version.0 {
                12030.. => 9,
                _ => 1,
            },
            DeviceAttribute::NUMA_CONFIG => i32::from(gpu.numa_id >= 0),
            DeviceAttribute::NUMA_ID => gpu.numa_id,
            DeviceAttribute::HOST_NUMA_ID => gpu.host_numa,
            DeviceAttribute::PAGEABLE_MEMORY_ACCESS
            | DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
            | DeviceAttribute::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST
            | DeviceAttribute::HOST_NUMA_MULTINODE_IPC_SUPPORTED => gpu.coherent.into(),
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
            // The simulator does not invent answers for attributes that it does not know.
            _ => return fail(Code::INVALID_VALUE),
        })
    }
}

/// Words handled at a time.
const WORDS: usize = 8 << 10;

/// The kernels, with their names and numbers of arguments. The handle of a module's kernel is the module's, 1 and the
/// kernel's index here.
const KERNELS: [(&CStr, usize, Kernel); 3] = [
    (CHECK_REWRITE, 5, check_rewrite),
    (READ, 3, read),
    (WRITE, 3, write),
];

fn check_rewrite(state: &State, device: i32, args: [u64; 5]) -> Result<(), Code> {
    let [ptr, words, seed, new_seed, report] = args;
    let (mut least, mut wrong) = (u64::MAX, 0_u64);
    each(state, device, ptr, words, Access::ReadWrite, |i, word| {
        if *word == pattern(seed, i) {
            *word = pattern(new_seed, i);
        } else {
            least = least.min(i);
            wrong += 1;
        }
    })?;
    if wrong == 0 {
        return Ok(());
    }
    each(state, device, report, 2, Access::ReadWrite, |i, word| {
        *word = match i {
            0 => least.min(*word),
            _ => word.wrapping_add(wrong),
        }
    })
}

fn read(state: &State, device: i32, [ptr, words, report, ..]: [u64; 5]) -> Result<(), Code> {
    let mut all = 0;
    each(state, device, ptr, words, Access::Read, |_, word| {
        all ^= *word
    })?;
    each(state, device, report, 1, Access::ReadWrite, |_, word| {
        *word ^= all
    })
}

fn write(state: &State, device: i32, [ptr, words, seed, ..]: [u64; 5]) -> Result<(), Code> {
    let rewrite = |i, word: &mut u64| *word = pattern(seed, i);
    each(state, device, ptr, words, Access::ReadWrite, rewrite)
}

/// Calls `f` for each word with its index, and writes the words back if `access` says so.
fn each(
    state: &State,
    device: i32,
    ptr: u64,
    words: u64,
    access: Access,
    mut f: impl FnMut(u64, &mut u64),
) -> Result<(), Code> {
    if !ptr.is_multiple_of(8) {
        return Err(Code::MISALIGNED_ADDRESS);
    }
    let bytes = words.checked_mul(8).ok_or(Code::ILLEGAL_ADDRESS)?;
    let mut buffer = vec![0_u64; WORDS.min(words as usize)];
    let mut index = 0;
    for mut piece in state.pieces(device, Engine::Kernel, ptr, bytes, access)? {
        while piece.len > 0 {
            let n = (piece.len / 8).min(WORDS as u64);
            let part = &mut buffer[..n as usize];
            piece.read(bytemuck::cast_slice_mut(part))?;
            for word in part.iter_mut() {
                f(index, word);
                index += 1;
            }
            if access == Access::ReadWrite {
                // SAFETY: the caller that launched the kernel guarantees the range.
                unsafe { piece.write(bytemuck::cast_slice(part)) }?;
            }
            piece = piece.after(n * 8);
        }
    }
    Ok(())
}

impl State {
    pub fn module_load(&mut self, device: i32, ptx: &CStr) -> Answer<ModuleHandle> {
        self.context(device)?;
        if ptx != PTX {
            return fail(Code::INVALID_PTX);
        }
        let module = self.number();
        self.modules.insert(module, device);
        Ok(ModuleHandle(module))
    }

    pub fn module_unload(&mut self, device: i32, module: ModuleHandle) -> Answer {
        self.device(device)?;
        if self.modules.get(module.0) != Some(&device) {
            return fail(Code::INVALID_HANDLE);
        }
        self.modules.remove(module.0);
        self.context(device).map(drop)
    }

    pub fn module_function(
        &mut self,
        device: i32,
        module: ModuleHandle,
        name: &CStr,
    ) -> Answer<FunctionHandle> {
        self.context(device)?;
        if self.modules.get(module.0) != Some(&device) {
            return fail(Code::INVALID_HANDLE);
        }
        let index = KERNELS.iter().position(|(known, ..)| *known == name);
        let index = index.ok_or(Code::NOT_FOUND)?;
        Ok(FunctionHandle(module.0 + 1 + index as u64))
    }

    pub fn launch_kernel(
        &mut self,
        function: FunctionHandle,
        dims: LaunchDims,
        args: &[u64],
        stream: StreamHandle,
    ) -> Answer {
        let key = self.stream(stream)?;
        let index = (function.0 % 16)
            .checked_sub(1)
            .ok_or(Code::INVALID_HANDLE)?;
        let (_, arguments, kernel) = *KERNELS.get(index as usize).ok_or(Code::INVALID_HANDLE)?;
        if self.modules.get(function.0 - 1 - index) != Some(&stream.device) {
            return fail(Code::INVALID_HANDLE);
        }
        let sane = dims.blocks > 0 && (1..=1024).contains(&dims.threads);
        if !sane || args.len() != arguments {
            return fail(Code::INVALID_VALUE);
        }
        let mut all = [0; 5];
        all[..args.len()].copy_from_slice(args);
        self.submit(key, Work::Kernel { kernel, args: all });
        Ok(())
    }
}
