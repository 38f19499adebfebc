//! Criterion's samples kept as they are taken, so that one run ends with medians and ratios.

use std::cell::RefCell;
use std::time::Duration;

use criterion::{BenchmarkGroup, SamplingMode, measurement::WallTime};

thread_local! {
    // Criterion runs benchmarks one after another on the thread that asks for them.
    static ROWS: RefCell<Vec<Row>> = const { RefCell::new(Vec::new()) };
}

struct Row {
    group: &'static str,
    name: String,
    samples: Vec<f64>,
}

/// A group's name, and how many samples each of its benchmarks takes.
pub type Group = (&'static str, usize);

/// Measures `routine`, which does something so many times and says how long it took.
pub fn measure(
    criterion: &mut BenchmarkGroup<'_, WallTime>,
    (group, samples_wanted): Group,
    name: &str,
    mut routine: impl FnMut(u64) -> Duration,
) {
    let mut samples = Vec::new();
    criterion
        .sampling_mode(SamplingMode::Flat)
        .sample_size(samples_wanted);
    criterion.bench_function(name, |bencher| {
        bencher.iter_custom(|times| {
            let took = routine(times);
            samples.push(took.as_secs_f64() / times as f64);
            took
        });
    });
    if samples.len() < samples_wanted {
        return; // left out by the filter on the command line, or run once as a test
    }
    samples.drain(..samples.len() - samples_wanted); // those of criterion's warming up
    samples.sort_by(f64::total_cmp);
    let name = name.to_string();
    ROWS.with_borrow_mut(|rows| {
        rows.push(Row {
            group,
            name,
            samples,
        })
    });
}

/// Prints a row for each benchmark; ratios are to the first of its group.
pub fn print() {
    ROWS.with_borrow(|rows| {
        if rows.is_empty() {
            return;
        }
        println!(
            "\n{:<58} {:>12} {:>25} {:>7}",
            "medians", "µs", "quartiles", "ratio"
        );
        for row in rows {
            let micros = |quarter: usize| row.samples[quarter * (row.samples.len() - 1) / 4] * 1e6;
            let first = rows
                .iter()
                .find(|first| first.group == row.group)
                .unwrap_or(row);
            let ratio = micros(2) / (first.samples[2 * (first.samples.len() - 1) / 4] * 1e6);
            let name = format!("{}/{}", row.group, row.name);
            let quartiles = format!("[{:.1}–{:.1}]", micros(1), micros(3));
            println!(
                "{name:<58} {:>12.1} {quartiles:>25} {ratio:>7.2}",
                micros(2)
            );
        }
    });
}
