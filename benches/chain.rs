//! The chain create → reserve → map → grant → release through the types and by bare calls: on a
//! driver that does nothing (the difference is this crate's own time), on the simulator, and on a
//! GPU where there is one.

#![allow(missing_docs)] // `criterion_group!` makes undocumented functions.

mod common;

use common::{GRANULE, chain_by_calls, chain_by_types, cuda, null};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use egmem::{Driver, Machine};

fn pair(c: &mut Criterion, group: &str, driver: &Driver, node: i32, sizes: &[u64]) {
    let mut group = c.benchmark_group(group);
    for &bytes in sizes {
        group.bench_with_input(BenchmarkId::new("types", bytes), &bytes, |b, &bytes| {
            b.iter(|| chain_by_types(driver, node, bytes).expect("the chain through the types"));
        });
        group.bench_with_input(BenchmarkId::new("calls", bytes), &bytes, |b, &bytes| {
            b.iter(|| chain_by_calls(driver, node, bytes).expect("the chain by bare calls"));
        });
    }
    group.finish();
}

fn chain(c: &mut Criterion) {
    let driver = null::driver().expect("the null driver");
    pair(c, "chain/null", &driver, 0, &[GRANULE]);

    let driver = Driver::simulated(Machine::gh200()).expect("the simulator");
    pair(c, "chain/simulated", &driver, 0, &[GRANULE]);

    if let Some((driver, node)) = cuda() {
        pair(c, "chain/cuda", &driver, node, &[GRANULE, 64 << 20]);
    }
}

criterion_group!(benches, chain);
criterion_main!(benches);
