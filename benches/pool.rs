//! Allocate and free from a pool, stream-ordered, through the types and by bare calls: on a driver
//! that does nothing, and on a GPU where there is one.

#![allow(missing_docs)] // `criterion_group!` makes undocumented functions.

mod common;

use common::{cuda, null};
use criterion::{Criterion, criterion_group, criterion_main};
use egmem::driver::{Access, AccessDesc, Driver, Location, PoolProps};
use egmem::{Pool, Stream};

const BYTES: u64 = 64 << 10;

fn pair(c: &mut Criterion, group: &str, driver: &Driver, node: i32) {
    let location = Location::HostNuma(node);
    let access = [AccessDesc {
        location: Location::Device(0),
        access: Access::ReadWrite,
    }];
    let stream = Stream::new(driver, 0).expect("a stream");
    let mut group = c.benchmark_group(group);

    // A threshold above the bytes in use, so that the pool keeps its memory and the steady state is
    // measured.
    let pool = Pool::options(location)
        .release_threshold(1 << 30)
        .create(driver)
        .expect("a pool");
    pool.set_access(&access).expect("access for the GPU");
    group.bench_function("types", |b| {
        b.iter(|| {
            let buffer = pool.allocate(BYTES, &stream).expect("an allocation");
            buffer.free_on(&stream).expect("a free");
        });
    });
    stream.synchronize().expect("the stream's end");

    let calls = driver.driver_pools();
    let props = PoolProps {
        location,
        handle_types: Default::default(),
        max_size: 0,
    };
    let raw = calls.pool_create(&props).expect("a pool");
    // SAFETY: the pool is this function's own, and nothing is allocated from it yet.
    unsafe {
        calls
            .pool_set_access(raw, &access)
            .expect("access for the GPU")
    };
    // SAFETY: the pool was just made.
    unsafe {
        calls.pool_set_attribute(raw, egmem::driver::PoolAttribute::ReleaseThreshold, 1 << 30)
    }
    .expect("the release threshold");
    group.bench_function("calls", |b| {
        b.iter(|| {
            // SAFETY: pool and stream live.
            let ptr = unsafe { calls.alloc_from_pool_async(raw, BYTES, stream.handle()) };
            let ptr = ptr.expect("an allocation");
            // SAFETY: just allocated on this stream, and no work uses it.
            unsafe { calls.free_async(ptr, stream.handle()).expect("a free") };
        });
    });
    stream.synchronize().expect("the stream's end");
    // SAFETY: every allocation from the pool was freed, and the stream is idle.
    unsafe { calls.pool_destroy(raw).expect("the pool's end") };
    group.finish();
}

fn pool(c: &mut Criterion) {
    let driver = null::driver().expect("the null driver");
    pair(c, "pool/null", &driver, 0);
    if let Some((driver, node)) = cuda() {
        pair(c, "pool/cuda", &driver, node);
    }
}

criterion_group!(benches, pool);
criterion_main!(benches);
