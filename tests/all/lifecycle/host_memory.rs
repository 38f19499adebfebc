//! Other memory behind the interfaces that all memory has.

use std::fs::File;
use std::io::{Read, Seek, Write};

use egmem::driver::{Call, Code};
use egmem::memory::CpuMemory;
use egmem::pinned::{DeviceMemory, ManagedMemory, PageSize, RegisteredHost, SystemMemory};
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::{Driver, Error, Machine, Memory, Stream};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::lifecycle::{MIB, last, nothing_held};

/// CPU and GPU see the same bytes, by kernels and by copies.
fn is_shared(driver: &Driver, gpu: i32, memory: &(impl Memory + CpuMemory)) {
    let prover = Prover::new(driver, gpu).unwrap();
    let stream = Stream::new(driver, gpu).unwrap();
    let view = memory.cpu().unwrap();
    prover.prove(memory, &view, 11).unwrap();
    write_pattern(&view, 12).unwrap();
    let device = DeviceMemory::new(driver, gpu, memory.len()).unwrap();
    stream.copy(&device, 0, memory, 0, memory.len()).unwrap();
    prover.check_rewrite(&device, 12, 13).unwrap();
    stream.copy(memory, 0, &device, 0, memory.len()).unwrap();
    check_pattern(&view, 13).unwrap();
}

pub fn registered_memory_is_shared(driver: &Driver) {
    for size in [PageSize::Base, PageSize::Transparent, PageSize::Reserved] {
        let memory = match RegisteredHost::new(driver, 0, 3 * MIB + 8, size) {
            // This machine may have reserved none.
            Err(error @ Error::System { .. }) if size == PageSize::Reserved => {
                println!("skipped: {error}");
                continue;
            }
            memory => memory.unwrap(),
        };
        is_shared(driver, 0, &memory);
        // Registered for every GPU.
        is_shared(driver, last(driver), &memory);
    }
    nothing_held(driver);
}

pub fn a_registered_file_gets_what_a_gpu_writes(driver: &Driver) {
    let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.write_all(&vec![1; 2 * MIB as usize]).unwrap();
    // SAFETY: the file is this test's alone, and keeps its size and its pages.
    let memory = unsafe { RegisteredHost::of_file(driver, 0, &file, MIB, MIB) }.unwrap();
    is_shared(driver, 0, &memory);
    let stream = Stream::new(driver, 0).unwrap();
    stream.fill(&memory, 0, MIB, 9).unwrap();
    drop((memory, stream));
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    assert!(bytes[..MIB as usize].iter().all(|byte| *byte == 1));
    assert!(bytes[MIB as usize..].iter().all(|byte| *byte == 9));
    for (offset, bytes) in [(MIB, MIB + 1), (2 * MIB, 1), (u64::MAX, 2)] {
        // SAFETY: as above.
        let result = unsafe { RegisteredHost::of_file(driver, 0, &file, offset, bytes) };
        let error = result.unwrap_err();
        assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    }
    nothing_held(driver);
}

pub fn a_file_registered_for_reading_is_read(driver: &Driver) {
    let mut file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.write_all(&vec![5; MIB as usize]).unwrap();
    let reading = File::open(file.path()).unwrap();
    // SAFETY: the file is this test's alone, and keeps its size and its pages.
    let error = unsafe { RegisteredHost::of_file(driver, 0, &reading, 0, MIB) }.unwrap_err();
    assert!(matches!(error, Error::System { .. }), "{error}");
    // SAFETY: as above.
    let memory = unsafe { RegisteredHost::of_file_read_only(driver, 0, &reading, 0, MIB) };
    let memory = match memory {
        Err(error @ Error::PlatformUnsupported { .. }) => return println!("skipped: {error}"),
        memory => memory.unwrap(),
    };
    assert!(memory.cpu().put(0, 1_u8).is_err());
    let stream = Stream::new(driver, 0).unwrap();
    let error = stream.fill(&memory, 0, 8, 1).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    let device = DeviceMemory::new(driver, 0, MIB).unwrap();
    stream.copy(&device, 0, &memory, 0, MIB).unwrap();
    Prover::new(driver, 0).unwrap().read(&memory).unwrap();
}

pub fn a_sealed_file_is_registered_without_unsafe(driver: &Driver) {
    let file = File::from(memfd_create("sealed", MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(2 * MIB).unwrap();
    let error = RegisteredHost::of_sealed_file(driver, 0, &file, 0, MIB).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { what: "file", .. }),
        "{error}"
    );
    assert!(error.to_string().contains("F_SEAL_SHRINK"), "{error}");
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let memory = RegisteredHost::of_sealed_file(driver, 0, &file, MIB, MIB).unwrap();
    is_shared(driver, 0, &memory);
    // The pages stay while they are mapped.
    file.set_len(0).unwrap_err();
    memory.cpu().put(MIB - 1, 9_u8).unwrap();
    match RegisteredHost::of_sealed_file_read_only(driver, 0, &file, 0, MIB) {
        Err(error @ Error::PlatformUnsupported { .. }) => println!("skipped: {error}"),
        memory => assert!(memory.unwrap().cpu().put(0, 1_u8).is_err()),
    }
    drop(memory);
    nothing_held(driver);
}

pub fn managed_memory_is_shared(driver: &Driver) {
    let memory = match ManagedMemory::new(driver, 0, 3 * MIB + 8) {
        Err(error @ Error::PlatformUnsupported { .. }) => return println!("skipped: {error}"),
        memory => memory.unwrap(),
    };
    is_shared(driver, 0, &memory);
    drop(memory);
    let error = ManagedMemory::new(driver, 0, 1 << 50).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { what: "size", .. }),
        "{error}"
    );
    nothing_held(driver);
}

/// The memory is shared where GPUs use the CPU's page tables; elsewhere the error gives the reason.
pub fn system_memory_is_shared_on_coherent_machines(driver: &Driver) {
    let topology = egmem::Topology::discover(driver).unwrap();
    let is_coherent = topology.gpus().iter().all(|gpu| gpu.coherent);
    match SystemMemory::new(driver, 3 * MIB + 8, PageSize::Base) {
        Ok(memory) => {
            assert!(is_coherent);
            is_shared(driver, 0, &memory);
        }
        Err(error) => {
            assert!(
                !is_coherent && error.to_string().contains("page tables"),
                "{error}"
            );
            assert!(
                matches!(error, Error::PlatformUnsupported { .. }),
                "{error}"
            );
        }
    }
    nothing_held(driver);
}

#[test]
fn what_a_platform_lacks_is_a_typed_reason() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    system_memory_is_shared_on_coherent_machines(&driver);
    let unsupported = |result: egmem::Result<()>| {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::PlatformUnsupported { .. }),
            "{error}"
        );
    };
    use egmem::driver::DeviceAttribute as Attribute;
    use egmem::driver::sim::AttributeAnswer;
    let without = |attribute: Attribute| {
        let mut machine = Machine::h200x8();
        machine
            .attributes
            .insert(attribute.0, AttributeAnswer::Value(0));
        Driver::simulated(machine).unwrap()
    };
    let driver = without(Attribute::HOST_REGISTER_SUPPORTED);
    unsupported(RegisteredHost::new(&driver, 0, MIB, PageSize::Base).map(drop));
    for attribute in [
        Attribute::MANAGED_MEMORY,
        Attribute::CONCURRENT_MANAGED_ACCESS,
    ] {
        unsupported(ManagedMemory::new(&without(attribute), 0, MIB).map(drop));
    }
    for gpu in [8, -1] {
        let errors = [
            RegisteredHost::new(&driver, gpu, MIB, PageSize::Base).map(drop),
            ManagedMemory::new(&driver, gpu, MIB).map(drop),
        ];
        for error in errors {
            assert!(matches!(error, Err(Error::NoSuchGpu { .. })), "{error:?}");
        }
    }
}

/// Pages that the driver does not let go are not unmapped: a GPU may use them.
#[test]
fn pages_that_stay_registered_stay_mapped() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let memory = RegisteredHost::new(&driver, 0, MIB, PageSize::Base).unwrap();
    let view = memory.cpu();
    view.put(0, 7_u64).unwrap();
    let start = view.as_ptr() as *const u64;
    for _ in 0..2 {
        driver
            .sim()
            .unwrap()
            .fail(Call::MemHostUnregister, 1, Code::UNKNOWN);
    }
    drop(memory);
    // SAFETY: still mapped, as the test is to show.
    assert_eq!(unsafe { start.read_volatile() }, 7);
    assert_eq!(driver.sim().unwrap().held().registrations, 1);
}
