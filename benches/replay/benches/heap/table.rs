//! All workloads on all contestants in turn, in rounds: medians, as a table, as CSV and as a picture.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;

use crate::entrant::Entrant;
use crate::heaps;
use crate::metadata;
use crate::peak;
use crate::phases;
use crate::plot;
use crate::runner;
use crate::workloads::{self, Work, Workload};

/// The heap beside other allocators: medians of rounds in which each has its turn.
#[derive(Parser)]
pub struct Args {
    /// Write times to this file instead of running criterion
    #[arg(long, value_name = "FILE.csv")]
    table: PathBuf,
    /// Draw them
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Draw those of one workload over the number of threads
    #[arg(long, value_name = "FILE.svg")]
    over_threads: Option<PathBuf>,
    /// How many rounds
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Only workloads whose names contain this; may be given several times
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// Only these contestants, by name
    #[arg(long, value_delimiter = ',')]
    among: Vec<String>,
    /// Print one figure of the first workload and the first contestant.
    #[arg(long, hide = true)]
    child: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A contestant that has taken this long in a workload gets no further rounds after three.
const ENOUGH: Duration = Duration::from_secs(10);

/// Short work is repeated in each turn until it comes to about so many operations.
const LEAST: u32 = 100_000;

/// The figures of one contestant in one workload. Times in nanoseconds.
pub struct Row {
    /// The workload's name.
    pub workload: String,
    /// The unit that a time is divided by.
    pub unit: &'static str,
    /// The contestant's name.
    pub contestant: &'static str,
    /// The median of the rounds.
    pub median: f64,
    least: f64,
    rounds: usize,
    failures: u64,
    /// Span by live bytes at their peak, in plenty of room.
    span: Option<f64>,
    /// Allocations that failed in a capacity of peak/0.97.
    failures_when_tight: Option<u64>,
    /// The most memory that the process took, in bytes.
    peak: Option<u64>,
}

/// Runs it.
///
/// # Errors
/// If a file cannot be written.
pub fn run(args: &Args) -> io::Result<()> {
    let mut kinds = Entrant::all();
    if !args.among.is_empty() {
        kinds = Entrant::named();
        kinds.retain(|kind| args.among.iter().any(|name| name == kind.name()));
    }
    match (args.child.as_deref(), kinds.first()) {
        (Some("phases"), Some(&kind)) => return phases::print(kind),
        (Some(_), _) => return peak::print(&workloads::all(&args.only), &kinds),
        _ => {}
    }
    let mut rows = Vec::new();
    for workload in workloads::all(&args.only) {
        rows.extend(measure(&workload, &kinds, args.rounds));
        fs::write(&args.table, csv(&rows))?;
    }
    let wanted =
        |name: &str| args.only.is_empty() || args.only.iter().any(|part| name.contains(part));
    if wanted("heaps") {
        heaps::run(args.rounds)?;
    }
    if wanted("phases") {
        phases::run(&kinds);
    }
    if wanted("metadata") {
        books(&kinds);
    }
    if let Some(path) = &args.plot {
        fs::write(path, plot::draw(&rows))?;
    }
    if let Some(path) = &args.over_threads {
        fs::write(path, plot::over_threads(&rows))?;
    }
    Ok(())
}

/// One workload: each contestant is made and looked at, then they take turns.
fn measure(workload: &Workload, kinds: &[Entrant], rounds: usize) -> Vec<Row> {
    println!("{} (ns by {})", workload.name, workload.unit);
    let mut running = Vec::new();
    for &kind in kinds {
        match workload.start(kind) {
            Ok(mut runner) => {
                let facts = runner.look();
                running.push((kind, runner, facts, Vec::new(), Duration::ZERO));
            }
            Err(error) => println!("  {kind:<20} cannot: {error}"),
        }
    }
    let operations = workload.operations() as f64;
    let passes = (LEAST / workload.operations() as u32).max(1);
    for round in 0..rounds {
        // No contestant always runs after the same one.
        let first = round % running.len().max(1);
        running.rotate_left(first);
        for (_, runner, _, times, spent) in &mut running {
            if *spent > ENOUGH && times.len() >= 3 {
                continue;
            }
            let started = Instant::now();
            let elapsed: Duration = (0..passes).map(|_| runner.time()).sum();
            times.push(elapsed.as_nanos() as f64 / (operations * f64::from(passes)));
            *spent += started.elapsed();
        }
        running.rotate_right(first);
    }
    let peak = workload.sequence().map(|sequence| sequence.peak as f64);
    let rows = running
        .into_iter()
        .map(|(kind, runner, facts, mut times, _)| {
            drop(runner);
            times.sort_by(f64::total_cmp);
            let row = Row {
                workload: workload.name.clone(),
                unit: workload.unit,
                contestant: kind.name(),
                median: times[times.len() / 2],
                least: times[0],
                rounds: times.len(),
                failures: facts.failures,
                span: peak
                    .filter(|_| kind.is_bounded())
                    .map(|peak| facts.span as f64 / peak),
                failures_when_tight: tight(workload, kind),
                peak: peak::of_child(workload, kind),
            };
            println!("{}", line(&row));
            row
        });
    rows.collect()
}

/// Failures where 97 % of the capacity is live at the peak.
fn tight(workload: &Workload, kind: Entrant) -> Option<u64> {
    let room = workload.tight().filter(|_| kind.is_bounded())?;
    let Work::One(work) = &workload.work else {
        return None;
    };
    let mut runner = runner::start(kind, room, work).ok()?;
    Some(runner.look().failures)
}

fn line(row: &Row) -> String {
    let mut line = format!(
        "  {:<20} median {:>9.1}  least {:>9.1}",
        row.contestant, row.median, row.least
    );
    if let Some(span) = row.span {
        line += &format!("  span/peak {span:.3}");
    }
    if let Some(failures) = row.failures_when_tight {
        line += &format!("  at 97 %: {failures} failed");
    }
    if let Some(peak) = row.peak {
        line += &format!("  peak {:.2} MiB", peak as f64 / f64::from(1 << 20));
    }
    if row.failures > 0 {
        line += &format!("  {} FAILED", row.failures);
    }
    line
}

fn csv(rows: &[Row]) -> String {
    let mut text = String::from(
        "workload,unit,contestant,median_ns,least_ns,rounds,failures,span_by_peak,failures_at_97_percent,peak_bytes\n",
    );
    for row in rows {
        let span = row.span.map(|span| format!("{span:.4}"));
        let tight = row.failures_when_tight.map(|count| count.to_string());
        let peak = row.peak.map(|bytes| bytes.to_string());
        text += &format!(
            "\"{}\",{},\"{}\",{:.2},{:.2},{},{},{},{},{}\n",
            row.workload,
            row.unit,
            row.contestant,
            row.median,
            row.least,
            row.rounds,
            row.failures,
            span.unwrap_or_default(),
            tight.unwrap_or_default(),
            peak.unwrap_or_default(),
        );
    }
    text
}

/// Prints the overhead of each contestant's metadata.
fn books(kinds: &[Entrant]) {
    const BLOCKS: u32 = 100_000;
    println!("books of {BLOCKS} live blocks of 4 KiB, in percent of the live bytes");
    for &kind in kinds {
        match metadata::measure(kind, BLOCKS) {
            Ok(books) => {
                print!("  {kind:<20} ");
                if kind.is_rust() {
                    print!(
                        "outside {:>6.3}  inside {:>6.3}  outside when every other is free {:>6.3}",
                        books.outside * 100.0,
                        books.inside * 100.0,
                        books.outside_among_holes * 100.0,
                    );
                } else {
                    print!("only it knows");
                }
                println!();
            }
            Err(error) => println!("  {kind:<20} cannot: {error}"),
        }
    }
    // A table that is piped shows up at once.
    let _ = io::stdout().flush();
}
