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
