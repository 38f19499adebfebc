//! All ways in turns, and a table of ratios.

use std::time::Instant;

use comfy_table::{Table, presets};
use egmem::memory::ParallelCopy;
use egmem::{Memory, Result, Topology};

use crate::work::{Ways, Work};
use crate::{Args, SIZES, memory};

/// As many bytes are moved in one measurement at least.
const MOVED: u64 = 8 << 20;

pub(crate) fn run(args: &Args) -> Result<()> {
    let sizes = SIZES.into_iter().filter(|&bytes| bytes <= args.largest);
    let buffer = memory(args.cuda, args.largest)?;
    let topology = Topology::discover(buffer.driver())?;
    let mut parallel = ParallelCopy::near(&topology, &buffer)?;
    if let Some(threads) = args.threads {
        parallel = parallel.threads(threads);
    }
    println!("{parallel:?}");
    let mut ways = Ways::new(buffer.cpu()?, parallel);
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header(
        Work::ALL
            .iter()
            .fold(vec!["bytes".into()], |mut all, work| {
                all.push(match work.beside() == *work {
                    true => format!("{}, GB/s", work.name()),
                    false => format!("{}, ratio", work.name()),
                });
                all
            }),
    );
    for bytes in sizes {
        let medians = medians(&mut ways, bytes, args.rounds.max(1));
        let of = |work: Work| medians[Work::ALL.iter().position(|&w| w == work).unwrap_or(0)];
        let cells = Work::ALL.iter().map(|&work| match work.beside() {
            libc if libc == work => format!("{:.2}", bytes as f64 / of(work)),
            libc => format!("{:.3}", of(libc) / of(work)),
        });
        table.add_row(std::iter::once(bytes.to_string()).chain(cells));
    }
    println!("{table}");
    Ok(())
}

/// The median nanoseconds of each way at one size. The ways take turns, each in each place of the order.
fn medians(ways: &mut Ways<'_>, bytes: u64, rounds: usize) -> Vec<f64> {
    let times = (MOVED / bytes).clamp(1, 20_000);
    let mut all = vec![Vec::new(); Work::ALL.len()];
    for round in 0..rounds {
        for turn in 0..Work::ALL.len() {
            let index = (turn + round) % Work::ALL.len();
            let work = Work::ALL[index];
            ways.run(work, bytes as usize);
            let start = Instant::now();
            for _ in 0..times {
                ways.run(work, bytes as usize);
            }
            all[index].push(start.elapsed().as_nanos() as f64 / times as f64);
        }
    }
    for times in &mut all {
        times.sort_by(f64::total_cmp);
    }
    all.into_iter()
        .map(|times| times[times.len() / 2])
        .collect()
}
