//! A heap beside another thread's capture of a stream into a graph.

#[path = "../../examples/measure-heap/cuda.rs"]
mod cuda;

use egmem::Stream;

use super::*;

/// Only a real driver captures.
#[test]
fn growth_trimming_and_release_leave_anothers_capture_alone() {
    for driver in drivers()
        .into_iter()
        .filter(|driver| !driver.is_simulated())
    {
        let heap = on(&driver).build(&driver).unwrap();
        let cuda = cuda::Cuda::load(0).unwrap();
        let captured = Stream::new(&driver, 0).unwrap();
        let other = Stream::new(&driver, 0).unwrap();
        cuda.begin(&captured).unwrap();
        let result = std::thread::scope(|scope| {
            let worked = scope.spawn(|| -> egmem::Result<()> {
                heap.reserve(16 * MIB)?;
                let block = heap.allocate(layout(40 * MIB))?;
                block.put(0, 1_u8)?;
                block.free_after(&other).map_err(|refused| *refused.error)?;
                heap.collect()?;
                heap.trim()?;
                Ok(())
            });
            worked.join().unwrap()
        });
        let end = cuda.end(&captured);
        assert_eq!((result, end), (Ok(()), 0));
    }
}
