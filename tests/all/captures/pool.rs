//! A pool's memory whose streams are captured.

use egmem::{Pool, PoolBuffer, Stream};
use egmem_tests::{alone, drivers};

use super::cuda;

/// Only a real driver captures.
#[test]
fn memory_that_is_freed_during_a_capture_leaves_it_valid() {
    let name = "memory_that_is_freed_during_a_capture_leaves_it_valid";
    alone(module_path!(), name, during_a_capture);
}

fn during_a_capture() {
    let Some(driver) = drivers::cuda() else {
        return;
    };
    let gpu = driver.device_count().unwrap() - 1;
    let cuda = cuda::Cuda::load(gpu).unwrap();
    let pool = Pool::options(drivers::node_of(&driver, gpu))
        .access_by([egmem::driver::Location::Device(gpu)])
        .create(&driver)
        .unwrap();
    let frees: [fn(PoolBuffer, &Stream); 2] = [
        |memory, _| drop(memory),
        |memory, other| memory.free_on(other).unwrap(),
    ];
    for (captured, free) in [0, 1].into_iter().flat_map(|n| frees.map(|free| (n, free))) {
        let [own, other] = [(); 2].map(|()| Stream::new(&driver, gpu).unwrap());
        let mut memory = pool.allocate(1 << 20, &own).unwrap();
        memory.use_on(&other).unwrap();
        own.synchronize().unwrap();
        let stream = [&own, &other][captured];
        cuda.begin(stream).unwrap();
        free(memory, &other);
        let outside = [&other, &own][captured].is_capturing();
        assert_eq!((outside, cuda.end(stream)), (Ok(false), 0));
        // The next call frees it.
        pool.stats().unwrap();
        own.synchronize().unwrap();
        other.synchronize().unwrap();
        assert_eq!(pool.stats().unwrap().used, 0);
    }
}
