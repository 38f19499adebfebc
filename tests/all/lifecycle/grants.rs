//! Safe calls check a GPU's access first: a GPU that touches memory without it would lose its context.

use std::alloc::Layout;

use egmem::driver::{Access, Location};
use egmem::pinned::DeviceMemory;
use egmem::proof::{Prover, check_pattern};
use egmem::topology::Placement;
use egmem::{Buffer, Driver, Error, Heap, Memory, Pool, Result, Stream};

use crate::lifecycle::{MIB, grant, last, node};

/// A GPU's stream and kernels, and memory that it may use.
struct Gpu {
    gpu: i32,
    stream: Stream,
    prover: Prover,
    own: Buffer,
}

impl Gpu {
    fn last(driver: &Driver) -> Self {
        let gpu = last(driver);
        Self {
            gpu,
            stream: Stream::new(driver, gpu).unwrap(),
            prover: Prover::new(driver, gpu).unwrap(),
            own: Buffer::near(driver, gpu, MIB).unwrap(),
        }
    }

    #[track_caller]
    fn refuses<T>(&self, result: Result<T>, have: Access, need: Access) {
        let who = Location::Device(self.gpu);
        let error = result.err().expect("the GPU has no such access");
        assert_eq!(error, Error::NotAccessible { who, have, need });
        self.lives();
    }

    /// Its context is not lost.
    #[track_caller]
    fn lives(&self) {
        self.stream.fill(&self.own, 0, 8, 0x5a).unwrap();
        self.prover.write(&self.own, 1).unwrap();
        assert_eq!(
            self.own.get::<u64>(8).unwrap(),
            egmem::kernels::pattern(1, 1)
        );
    }

    /// Memory of which it may read the first 64 KiB and write nothing.
    #[track_caller]
    fn may_only_read(&self, memory: &impl Memory) {
        let write = |result| self.refuses(result, Access::Read, Access::ReadWrite);
        write(self.stream.fill(memory, 0, 8, 1));
        write(self.stream.copy(memory, 0, &self.own, 0, 8));
        write(self.prover.write(memory, 1));
        write(self.prover.check_rewrite(memory, 1, 2));
        self.stream.copy(&self.own, 0, memory, 0, 64 << 10).unwrap();
        self.prover.read(memory).unwrap();
    }

    /// Memory that it may not touch.
    #[track_caller]
    fn may_do_nothing(&self, memory: &impl Memory) {
        let refuses = |result, need| self.refuses(result, Access::None, need);
        refuses(self.stream.fill(memory, 0, 8, 1), Access::ReadWrite);
        refuses(self.stream.copy(&self.own, 0, memory, 0, 8), Access::Read);
        refuses(
            self.stream.copy(memory, 0, &self.own, 0, 8),
            Access::ReadWrite,
        );
        refuses(self.prover.write(memory, 1), Access::ReadWrite);
        refuses(self.prover.check_rewrite(memory, 1, 2), Access::ReadWrite);
        self.refuses(self.prover.read(memory), Access::None, Access::Read);
    }
}

pub fn a_gpu_that_may_only_read_is_refused_writes(driver: &Driver) {
    let gpu = Gpu::last(driver);
    let buffer = Buffer::on(node(driver, gpu.gpu))
        .access(Location::Device(gpu.gpu), Access::Read)
        .bytes(MIB)
        .allocate(driver)
        .unwrap();
    egmem::proof::write_pattern(&buffer.cpu().unwrap(), 7).unwrap();
    gpu.may_only_read(&buffer);
    gpu.may_only_read(&buffer.mappings()[0]);
    let proof = gpu.prover.prove(&buffer, &buffer.cpu().unwrap(), 9);
    gpu.refuses(proof, Access::Read, Access::ReadWrite);
    check_pattern(&buffer.cpu().unwrap(), 7).unwrap();
}

pub fn a_gpu_without_access_is_refused_reads(driver: &Driver) {
    let gpu = Gpu::last(driver);
    let buffer = Buffer::on(node(driver, gpu.gpu))
        .access(Location::Device(gpu.gpu), Access::None)
        .bytes(MIB)
        .allocate(driver)
        .unwrap();
    gpu.may_do_nothing(&buffer);
}

pub fn each_part_of_a_spread_buffer_counts(driver: &Driver) {
    let gpu = Gpu::last(driver);
    let topology = egmem::Topology::discover(driver).unwrap();
    if topology.nodes().len() < 2 {
        return;
    }
    let shares = Placement::Spread
        .request(16 * MIB)
        .place(&topology)
        .unwrap();
    let buffer = Buffer::spread(&shares).allocate(driver).unwrap();
    let second = &buffer.mappings()[1];
    let at = second.device_ptr().0 - buffer.device_ptr().0;
    let read = [grant(Location::Device(gpu.gpu), Access::Read)];
    // SAFETY: the range is one whole mapping, and the CPU's access stays.
    unsafe { driver.mem_set_access(second.device_ptr(), second.size().padded(), &read) }.unwrap();
    gpu.stream.fill(&buffer, 0, at, 1).unwrap();
    let over = gpu.stream.fill(&buffer, at - 8, 16, 2);
    gpu.refuses(over, Access::Read, Access::ReadWrite);
    let inside = gpu.stream.fill(&buffer, at, 1, 2);
    gpu.refuses(inside, Access::Read, Access::ReadWrite);
    gpu.stream.copy(&gpu.own, 0, &buffer, at - 8, 16).unwrap();
    assert_eq!(
        gpu.own.get::<[u64; 2]>(0).unwrap(),
        [0x0101_0101_0101_0101, 0]
    );
}

pub fn access_that_was_changed_counts(driver: &Driver) {
    let gpu = Gpu::last(driver);
    let mut buffer = Buffer::near(driver, gpu.gpu, MIB).unwrap();
    let to = |access| [grant(Location::Device(gpu.gpu), access)];
    buffer.set_access(&to(Access::Read)).unwrap();
    gpu.may_only_read(&buffer);
    buffer.set_access(&to(Access::None)).unwrap();
    gpu.may_do_nothing(&buffer);
    buffer.set_access(&to(Access::ReadWrite)).unwrap();
    gpu.stream.fill(&buffer, 0, MIB, 1).unwrap();
}

pub fn blocks_of_a_heap_keep_to_its_grants(driver: &Driver) {
    let gpu = Gpu::last(driver);
    for access in [Access::Read, Access::None] {
        let heap = Heap::on(node(driver, gpu.gpu))
            .access(Location::Device(gpu.gpu), access)
            .build(driver)
            .unwrap();
        let layout = Layout::from_size_align(64 << 10, 256).unwrap();
        let block = heap.allocate(layout).unwrap();
        match access {
            Access::Read => gpu.may_only_read(&block),
            _ => gpu.may_do_nothing(&block),
        }
    }
}

/// The driver makes a copy between two host memories with the CPU, which faults where it may not write.
pub fn a_copy_that_the_cpu_would_fault_at_is_refused(driver: &Driver) {
    let gpu = Gpu::last(driver);
    let node = node(driver, gpu.gpu);
    let buffer = Buffer::on(node)
        .access(Location::Device(gpu.gpu), Access::ReadWrite)
        .access(Location::Host, Access::Read)
        .bytes(MIB)
        .allocate(driver)
        .unwrap();
    let heap = Heap::on(node)
        .access(Location::Device(gpu.gpu), Access::ReadWrite)
        .access(Location::Host, Access::Read)
        .build(driver)
        .unwrap();
    let layout = Layout::from_size_align(64 << 10, 256).unwrap();
    let block = heap.allocate(layout).unwrap();
    let refused = |result: Result<()>| {
        let (have, need) = (Access::Read, Access::ReadWrite);
        let who = Location::Host;
        assert_eq!(result, Err(Error::NotAccessible { who, have, need }));
    };
    refused(gpu.stream.copy(&buffer, 0, &gpu.own, 0, 8));
    refused(gpu.stream.copy(&buffer.mappings()[0], 0, &gpu.own, 0, 8));
    refused(gpu.stream.copy(&block, 0, &gpu.own, 0, 8));
    // The CPU's access does not matter to copies and fills by a GPU.
    let device = DeviceMemory::new(driver, gpu.gpu, MIB).unwrap();
    gpu.stream.fill(&device, 0, 8, 7).unwrap();
    gpu.stream.copy(&buffer, 0, &device, 0, 8).unwrap();
    gpu.stream.copy(&block, 0, &device, 0, 8).unwrap();
    gpu.prover.write(&buffer, 1).unwrap();
    gpu.lives();
}

#[cfg(feature = "portable")]
pub fn imported_memory_keeps_to_the_importers_grants(driver: &Driver) {
    use egmem::driver::{HandleType, HandleTypes};
    use egmem::share::{ImportOptions, Shared};

    let gpu = Gpu::last(driver);
    let buffer = Buffer::on(node(driver, 0))
        .handle_types(HandleTypes::POSIX_FD)
        .bytes(MIB)
        .allocate(driver)
        .unwrap();
    let shared = Shared::from(buffer);
    let import = |shared: &Shared, access| {
        let description = shared.describe(Access::ReadWrite).unwrap();
        let handles = shared.export(HandleType::PosixFd).unwrap();
        let options = ImportOptions::new().access(Location::Device(gpu.gpu), access);
        options.import(driver, &description, handles).unwrap()
    };
    gpu.may_only_read(&import(&shared, Access::Read));
    gpu.may_do_nothing(&import(&shared, Access::None));
    let window = shared.window(4096, 256 << 10).unwrap();
    gpu.may_only_read(&import(&window, Access::Read));
    // The owner's grants are its own.
    let owner = shared.buffer().unwrap();
    gpu.stream.fill(&**owner, 0, MIB, 1).unwrap();
}

pub fn kernels_keep_to_a_pools_grants(driver: &Driver) {
    let gpu = Gpu::last(driver);
    let pool = Pool::options(node(driver, 0))
        .access_by([] as [Location; 0])
        .create(driver)
        .unwrap();
    let memory = pool.allocate(MIB, &gpu.stream).unwrap();
    gpu.may_do_nothing(&memory);
    let all = [grant(Location::Device(gpu.gpu), Access::ReadWrite)];
    pool.set_access(&all).unwrap();
    gpu.prover.write(&memory, 3).unwrap();
    gpu.stream.fill(&memory, 0, MIB, 4).unwrap();
}

pub fn kernels_leave_plain_memory_of_other_gpus_alone(driver: &Driver) {
    let gpu = Gpu::last(driver);
    if gpu.gpu == 0 {
        return;
    }
    let plain = DeviceMemory::new(driver, 0, MIB).unwrap();
    let write = gpu.prover.write(&plain, 1);
    gpu.refuses(write, Access::None, Access::ReadWrite);
    // Copies need no grant.
    gpu.stream.copy(&plain, 0, &gpu.own, 0, MIB).unwrap();
    gpu.stream.copy(&gpu.own, 0, &plain, 0, MIB).unwrap();
}
