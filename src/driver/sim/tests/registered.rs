//! Memory of the process that is registered.

use super::*;
use crate::kernels;

/// Runs the reading kernel on 512 words; returns the value that it reports, or the code of its error.
fn read(driver: &Driver, ptr: DevicePtr) -> Result<u64, Code> {
    let stream = driver.stream_create(0).unwrap();
    let report = driver.mem_host_alloc(0, 8).unwrap();
    let dims = crate::LaunchDims {
        blocks: 1,
        threads: 32,
    };
    // SAFETY: only this function uses the handles, and the caller owns the range and does not write it meanwhile.
    unsafe {
        let module = driver.module_load(0, kernels::PTX).unwrap();
        let function = driver.module_function(0, module, kernels::READ).unwrap();
        let args = [ptr.0, 512, report.0];
        driver.launch_kernel(function, dims, &args, stream).unwrap();
        match driver.stream_synchronize(stream) {
            Ok(()) => Ok(peek(report)),
            Err(error) => Err(error.code().unwrap()),
        }
    }
}

#[test]
fn a_gpu_reaches_memory_while_it_is_registered() {
    let driver = h200();
    let words: Vec<u64> = (0..1024).map(|word| word * word).collect();
    let ptr = DevicePtr(words.as_ptr().expose_provenance() as u64);
    let register = |ptr, size| {
        // SAFETY: the range is registered only while `words` lives, or refused.
        code(unsafe { driver.mem_host_register(0, ptr, size, false, None) })
    };
    assert_eq!(register(ptr, 8192), Code::SUCCESS);
    assert_eq!(
        driver.mem_host_device_pointer(0, ptr.add(8)).unwrap(),
        ptr.add(8)
    );
    let sum = words[..512].iter().fold(0, |sum, word| sum ^ word);
    assert_eq!(read(&driver, ptr), Ok(sum));
    let ask = |attribute| driver.pointer_attribute(ptr.add(8), attribute).unwrap();
    assert_eq!(ask(PointerAttribute::MemoryType), 1);
    assert_eq!(ask(PointerAttribute::RangeStartAddr), ptr.0);
    assert_eq!(ask(PointerAttribute::RangeSize), 8192);
    assert_eq!(sim(&driver).held().registrations, 1);

    for (offset, size) in [(0, 8192), (8, 8), (8191, 100)] {
        let again = register(ptr.add(offset), size);
        assert_eq!(again, Code::HOST_MEMORY_ALREADY_REGISTERED, "{offset}");
    }
    assert_eq!(register(ptr.add(8192), 0), Code::INVALID_VALUE);
    assert_eq!(register(DevicePtr(4096), 4096), Code::INVALID_VALUE);
    assert_eq!(register(DevicePtr(u64::MAX - 8), 4096), Code::INVALID_VALUE);
    let own = driver.mem_host_alloc(0, 4096).unwrap();
    assert_eq!(register(own, 4096), Code::HOST_MEMORY_ALREADY_REGISTERED);
    // SAFETY: registered above, and nothing uses it.
    let unregister = |ptr| code(unsafe { driver.mem_host_unregister(0, ptr) });
    assert_eq!(unregister(ptr.add(8)), Code::HOST_MEMORY_NOT_REGISTERED);
    assert_eq!(unregister(ptr), Code::SUCCESS);
    assert_eq!(unregister(ptr), Code::HOST_MEMORY_NOT_REGISTERED);
    assert_eq!(
        code(driver.mem_host_device_pointer(0, ptr)),
        Code::INVALID_VALUE
    );
    // Over PCIe a kernel does not reach it now.
    assert_eq!(read(&driver, ptr), Err(Code::ILLEGAL_ADDRESS));
}
