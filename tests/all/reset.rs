//! A GPU whose primary context is reset by other code of the process, as `cudaDeviceReset` does.

use std::ffi::c_int;

use egmem::{Buffer, Driver, Error, Event, Pool, Stream};
use egmem_tests::{alone, drivers};

const MIB: u64 = 1 << 20;

/// Resets the primary context of a GPU; `anew` makes it again, as a library's next call does.
fn reset(driver: &Driver, gpu: i32, anew: bool) {
    type Reset = unsafe extern "C" fn(c_int) -> c_int;
    type Retain = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    assert!(!driver.is_simulated());
    // SAFETY: the driver's library, which has been loaded; the functions have these types; CUDA's device handles are
    // the ordinals.
    unsafe {
        let cuda = libloading::Library::new("libcuda.so.1").unwrap();
        let function = cuda.get::<Reset>(b"cuDevicePrimaryCtxReset_v2\0").unwrap();
        assert_eq!(function(gpu), 0);
        if anew {
            let retain = cuda.get::<Retain>(b"cuDevicePrimaryCtxRetain\0").unwrap();
            assert_eq!(retain(&mut 0, gpu), 0);
        }
    }
}

/// Only a real driver has contexts that others can reset. Returns what the calls answered.
fn after_a_reset(anew: bool) -> Option<[Result<(), Error>; 5]> {
    let driver = drivers::cuda()?;
    let gpu = driver.device_count().unwrap() - 1;
    let stream = Stream::new(&driver, gpu).unwrap();
    let event = Event::new(&driver, gpu, false).unwrap();
    let pool = Pool::options(drivers::node_of(&driver, gpu)).access_by([gpu_of(gpu)]);
    let pool = pool.create(&driver).unwrap();
    let kept = pool.allocate(MIB, &stream).unwrap();
    stream.synchronize().unwrap();
    reset(&driver, gpu, anew);
    let answers = [
        stream.synchronize(),
        event.record(&stream),
        pool.allocate(MIB, &stream).map(drop),
        Stream::new(&driver, gpu).map(drop),
        kept.free_on(&stream),
    ];
    // The CPU's memory is not the context's.
    let memory = Buffer::near(&driver, gpu, MIB);
    println!("{answers:?}, {memory:?}");
    Some(answers)
}

fn gpu_of(gpu: i32) -> egmem::driver::Location {
    egmem::driver::Location::Device(gpu)
}

#[test]
fn a_reset_context_is_named_and_nothing_reaches_it() {
    let name = "a_reset_context_is_named_and_nothing_reaches_it";
    alone(module_path!(), name, || {
        for answer in after_a_reset(false).into_iter().flatten() {
            assert!(
                matches!(answer, Err(Error::ContextLost { .. })),
                "{answer:?}"
            );
        }
    });
}

/// The new context may have the old one's address; streams and events of the old one are gone all the same.
#[test]
fn nothing_of_a_context_before_a_reset_is_used_in_the_next_one() {
    let name = "nothing_of_a_context_before_a_reset_is_used_in_the_next_one";
    alone(module_path!(), name, || {
        for answer in after_a_reset(true).into_iter().flatten() {
            assert!(
                matches!(answer, Err(Error::ContextLost { .. })),
                "{answer:?}"
            );
        }
    });
}
