//! A tier's copies beside another thread's capture.

use egmem_tests::{alone, drivers};

use super::cuda;

use std::sync::Arc;

use egmem::kv::{CopyMethod, Error, GpuPages, Job, Key, Tier};
use egmem::pinned::DeviceMemory;
use egmem::{Driver, Stream};

/// More jobs at once than a tier keeps lists for: those of the others are given back.
const JOBS: usize = 20;
const PAGE: u64 = 64 << 10;

/// Only a real driver captures.
#[test]
fn copies_leave_anothers_capture_alone() {
    let name = "copies_leave_anothers_capture_alone";
    alone(module_path!(), name, beside_a_capture);
}

fn beside_a_capture() {
    let Some(driver) = drivers::cuda() else {
        return;
    };
    let cuda = cuda::Cuda::load(0).unwrap();
    let captured = Stream::new(&driver, 0).unwrap();
    for method in [
        CopyMethod::Loop,
        CopyMethod::Batch,
        CopyMethod::KERNEL,
        CopyMethod::Auto,
    ] {
        let prepared = Prepared::new(&driver);
        cuda.begin(&captured).unwrap();
        let result = std::thread::scope(|scope| {
            let work = scope.spawn(|| prepared.copy(method));
            work.join().unwrap()
        });
        let end = cuda.end(&captured);
        assert_eq!((result, end), (Ok(()), 0), "{method:?}");
    }
}

/// The objects that the copies need, made before the capture begins.
struct Prepared {
    tier: Tier,
    gpu: GpuPages,
    stream: Stream,
}

impl Prepared {
    fn new(driver: &Driver) -> Self {
        let cache = DeviceMemory::new(driver, 0, JOBS as u64 * PAGE).unwrap();
        let tier = Tier::on(drivers::node(driver)).pages(JOBS as u64);
        Self {
            tier: tier.page_bytes(PAGE).create(driver).unwrap(),
            gpu: GpuPages::over(vec![(Arc::new(cache), 0)], PAGE, PAGE).unwrap(),
            stream: Stream::new(driver, 0).unwrap(),
        }
    }

    /// Stores a page by each of many jobs that run at once, of which one is polled and the others are waited for.
    fn copy(&self, method: CopyMethod) -> Result<(), Error> {
        let Self { tier, gpu, stream } = self;
        let keys: Vec<Key> = (0..JOBS).map(|job| Key::new([job as u8; 32])).collect();
        let blocks: Vec<u64> = (0..JOBS as u64).collect();
        let mut store = tier.prepare_store(&keys)?;
        let pairs = store.pairs(&blocks)?;
        let jobs = pairs.iter().map(|pair| {
            let pair = std::slice::from_ref(pair);
            tier.store_by(method, stream, pair, gpu)
        });
        let mut jobs: Vec<Job> = jobs.collect::<Result<_, _>>()?;
        while !jobs[0].is_done()? {}
        for job in jobs {
            job.wait()?;
        }
        store.commit()
    }
}
