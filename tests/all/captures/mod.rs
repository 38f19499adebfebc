//! Work beside another thread's capture of a stream into a graph. Each test runs in a process of its own: other tests'
//! calls at the same time would end the capture, and would fail because of it.

#[path = "../../../benches/measure/measure-heap/cuda.rs"]
mod cuda;
mod heap;
#[cfg(feature = "portable")]
mod kv;
mod pool;

use egmem::Stream;
use egmem_tests::{alone, drivers};

/// The driver is asked with another GPU's context current, where there is one, and by a thread without any.
#[test]
fn a_capture_is_seen_whatever_context_is_current() {
    let name = "a_capture_is_seen_whatever_context_is_current";
    alone(module_path!(), name, || {
        let Some(driver) = drivers::cuda() else {
            return;
        };
        let gpu = driver.device_count().unwrap() - 1;
        let [captured, other] = [(); 2].map(|()| Stream::new(&driver, gpu).unwrap());
        let own = cuda::Cuda::load(gpu).unwrap();
        own.begin(&captured).unwrap();
        let first = cuda::Cuda::load(0).unwrap();
        let see = || [&captured, &other].map(Stream::is_capturing);
        let seen = [
            see(),
            std::thread::scope(|scope| scope.spawn(see).join().unwrap()),
        ];
        assert_eq!(own.end(&captured), 0);
        assert_eq!(seen, [(); 2].map(|()| [Ok(true), Ok(false)]));
        assert_eq!(see(), [Ok(false), Ok(false)]);
        drop(first);
    });
}

/// Of a driver, and of the simulator in one process.
#[test]
fn memory_of_every_kind_comes_and_goes_beside_a_capture() {
    let name = "memory_of_every_kind_comes_and_goes_beside_a_capture";
    alone(module_path!(), name, || {
        use egmem::pinned::{DeviceMemory, PageSize, PinnedHost, RegisteredHost};
        const MIB: u64 = 1 << 20;
        let every_kind = |driver: &egmem::Driver, gpu| {
            PinnedHost::new(driver, gpu, MIB).map(drop).unwrap();
            DeviceMemory::new(driver, gpu, MIB).map(drop).unwrap();
            let pages = PageSize::Base;
            RegisteredHost::new(driver, gpu, MIB, pages)
                .map(drop)
                .unwrap();
        };
        let simulated = egmem::Driver::simulated(egmem::Machine::h200x8()).unwrap();
        let stream = Stream::new(&simulated, 1).unwrap();
        let sim = simulated.sim().unwrap();
        sim.begin_capture(stream.handle(), false);
        std::thread::scope(|scope| scope.spawn(|| every_kind(&simulated, 1)).join().unwrap());
        every_kind(&simulated, 1);
        assert!(sim.end_capture(stream.handle()), "it was made invalid");
        let Some(driver) = drivers::cuda() else {
            return;
        };
        let gpu = driver.device_count().unwrap() - 1;
        let captured = Stream::new(&driver, gpu).unwrap();
        let own = cuda::Cuda::load(gpu).unwrap();
        own.begin(&captured).unwrap();
        std::thread::scope(|scope| scope.spawn(|| every_kind(&driver, gpu)).join().unwrap());
        assert_eq!(own.end(&captured), 0);
    });
}
