//! A heap beside another thread's capture.

use egmem_tests::{alone, drivers};

use super::cuda;

use std::alloc::Layout;

use egmem::heap::NotFreed;
use egmem::{Heap, Stream};

const MIB: u64 = 1 << 20;

/// Only a real driver captures.
#[test]
fn growth_trimming_and_release_leave_anothers_capture_alone() {
    let name = "growth_trimming_and_release_leave_anothers_capture_alone";
    alone(module_path!(), name, beside_a_capture);
}

fn beside_a_capture() {
    let Some(driver) = drivers::cuda() else {
        return;
    };
    let heap = Heap::on(drivers::node(&driver))
        .limit(256 * MIB)
        .chunk(8 * MIB);
    let heap = heap.build(&driver).unwrap();
    let layout = Layout::from_size_align(40 << 20, 1).unwrap();
    let cuda = cuda::Cuda::load(0).unwrap();
    let captured = Stream::new(&driver, 0).unwrap();
    let other = Stream::new(&driver, 0).unwrap();
    cuda.begin(&captured).unwrap();
    let result = std::thread::scope(|scope| {
        let worked = scope.spawn(|| -> egmem::Result<()> {
            heap.reserve(16 * MIB)?;
            let block = heap.allocate(layout)?;
            block.put(0, 1_u8)?;
            block.free_after(&other).map_err(NotFreed::forget)?;
            heap.collect()?;
            heap.trim()?;
            other.is_done()?;
            Ok(())
        });
        worked.join().unwrap()
    });
    let end = cuda.end(&captured);
    assert_eq!((result, end), (Ok(()), 0));
}
