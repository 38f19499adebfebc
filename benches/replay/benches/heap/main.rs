//! The heap beside other allocators: the same work for each of them, made from seeds.
//!
//! `cargo bench -p egmem-replay --bench heap` runs criterion; with `-- --table FILE.csv` all take
//! turns in rounds instead, and medians of those are written. Work of one thread is measured by its own
//! clock (CPU time), work of many by wall time. Each contestant is made once and does each piece of
//! work once before the clock starts.

mod clock;
mod entrant;
mod heaps;
mod metadata;
mod ours;
mod peak;
mod phases;
mod plot;
mod runner;
mod sequence;
mod suite;
mod table;
mod threads;
mod workloads;

use std::process::ExitCode;

use clap::Parser;
use criterion::{Criterion, SamplingMode, Throughput};
use entrant::Entrant;

#[global_allocator]
static ALLOCATOR: metadata::Counting = metadata::Counting;

/// Every workload is a group, every contestant a function of it; a time is one pass's.
fn bench(criterion: &mut Criterion) {
    for workload in workloads::all(&[]) {
        let mut group = criterion.benchmark_group(format!("heap/{}", workload.name));
        group
            .sample_size(10)
            .sampling_mode(SamplingMode::Flat)
            .throughput(Throughput::Elements(workload.operations()));
        for kind in Entrant::all() {
            let mut running = None;
            group.bench_function(kind.name(), |bencher| {
                // Made when its turn comes, because a filter may leave it out.
                let runner = running.get_or_insert_with(|| {
                    let mut runner = workload.start(kind).expect("a contestant");
                    runner.look();
                    runner
                });
                bencher.iter_custom(|passes| (0..passes).map(|_| runner.time()).sum());
            });
        }
        group.finish();
    }
}

fn main() -> ExitCode {
    if std::env::args().any(|arg| arg.starts_with("--table")) {
        return match table::run(&table::Args::parse()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion);
    criterion.final_summary();
    ExitCode::SUCCESS
}
