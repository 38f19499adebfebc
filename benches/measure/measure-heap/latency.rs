//! How long single allocations take while the heap grows under a steady demand.

use std::alloc::Layout;
use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};

use egmem::size::Bytes;
use egmem::{Block, Heap, Result};
use egmem_chart::{Chart, Line};
use serde::Serialize;

use crate::args::Args;
use crate::report::{About, Results};
use crate::{Place, layout, median, plot};

/// Sizes are uniform between these.
const LEAST: u64 = 64 << 10;
const MOST: u64 = 1 << 20;
/// An allocation that takes longer has waited for the driver: its quickest call for new memory takes longer.
const WAITED: Duration = Duration::from_micros(100);
/// A wait of about an allocation's length. It needs neither lock nor memory, so the machine causes every longer one.
const WAIT: Duration = Duration::from_nanos(300);
/// How many of the slowest calls are reported one by one.
const SLOWEST: usize = 64;
/// The quantiles that are drawn.
const QUANTILES: [f64; 7] = [0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 1.0];

const AHEAD: &str = "growth ahead";
const ON_DEMAND: &str = "growth on demand";
/// Waits between the allocations of the first.
const WAITS: &str = "waits beside growth ahead";
/// Waits where there is no heap at all.
const NO_HEAP: &str = "waits, no heap";
const NAMES: [&str; 4] = [AHEAD, ON_DEMAND, WAITS, NO_HEAP];

/// One growth of a heap: all its allocations, or as many waits of 0.3 µs.
#[derive(Debug, Serialize)]
pub struct Row {
    pub way: &'static str,
    pub run: u32,
    /// Allocations or waits.
    pub calls: usize,
    /// Microseconds of a call of `Heap::allocate`, or of a wait, the clock's own time included.
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
    /// Calls that took over 100 µs.
    pub waited: usize,
    /// Calls that began more than 1 ms after they were due, for one before them had waited.
    pub late: usize,
    /// Seconds from the first call to the last.
    pub seconds: f64,
    /// `cuMemCreate` calls by then.
    pub creates: u64,
    /// Quantiles of the call, microseconds: 0.5, 0.9, 0.99 … 1.
    pub quantiles: Vec<f64>,
    /// The slowest: the microsecond at which it began, and how many it took.
    pub slowest: Vec<(f64, f64)>,
}

/// All of them.
#[derive(Debug, Serialize)]
pub struct Latency {
    /// Bytes per second asked for.
    demand: u64,
    /// The bytes of the heap at the end.
    bytes: u64,
    /// The bytes that are added in advance.
    ahead: u64,
    /// The time to read the clock twice, in microseconds.
    clock: f64,
    rows: Vec<Row>,
}

/// Grows a heap so, with growth ahead and without, in turns.
///
/// # Errors
/// The driver's; [`egmem::Error::NodeTooFull`].
pub fn measure(place: &Place, args: &Args) -> Result<Latency> {
    let mut rows = Vec::new();
    for run in 0..args.runs {
        let (ahead, waits) = grow(place, args, run, args.ahead.0)?;
        let (demand, _) = grow(place, args, run, 0)?;
        let (_, nothing) = Demand::new(args, run).meet(|_| Ok(Duration::ZERO))?;
        rows.push(ahead.row(AHEAD, run));
        rows.push(demand.row(ON_DEMAND, run));
        rows.push(waits.row(WAITS, run));
        rows.push(nothing.row(NO_HEAP, run));
    }
    let clock: Vec<f64> = (0..1001)
        .map(|_| micros(Instant::now().elapsed()))
        .collect();
    Ok(Latency {
        demand: args.demand,
        bytes: args.to.0,
        ahead: args.ahead.0,
        clock: median(&clock),
        rows,
    })
}

/// The allocations' times, and those of waits between them.
fn grow(place: &Place, args: &Args, run: u32, ahead: u64) -> Result<(Times, Times)> {
    let heap = Heap::on(place.node)
        // Chunks that do not join leave some memory at their ends.
        .limit(args.to.0 / 8 * 9)
        .grow_ahead(ahead)
        .build(&place.driver)?;
    // A program that asks for growth ahead begins when its first memory is there.
    while heap.stats().free < ahead {
        std::thread::sleep(Duration::from_millis(1));
    }
    let demand = Demand::new(args, run);
    let mut blocks: Vec<Block> = Vec::with_capacity(demand.most);
    let (mut allocations, waits) = demand.meet(|layout| {
        let start = Instant::now();
        let block = black_box(heap.allocate(layout)?);
        let took = start.elapsed();
        // The block must have memory, from either thread.
        block.put(0, 1_u8)?;
        blocks.push(block);
        Ok(took)
    })?;
    allocations.creates = heap.stats().driver.create;
    Ok((allocations, waits))
}

/// Bytes asked for at a steady rate.
struct Demand {
    rate: f64,
    bytes: u64,
    /// The most allocations that can come of it.
    most: usize,
    random: fastrand::Rng,
}

impl Demand {
    /// The same for each way of a run.
    fn new(args: &Args, run: u32) -> Self {
        Self {
            rate: args.demand as f64,
            bytes: args.to.0,
            most: (args.to.0 / LEAST) as usize,
            random: fastrand::Rng::with_seed(u64::from(run) + 1),
        }
    }

    /// Calls `allocate`, which returns its duration, and waits once after each call; returns the times of both.
    fn meet(
        mut self,
        mut allocate: impl FnMut(Layout) -> Result<Duration>,
    ) -> Result<(Times, Times)> {
        let (mut allocations, mut waits) = (Times::new(self.most), Times::new(self.most));
        let (began, mut asked) = (Instant::now(), 0_u64);
        loop {
            let bytes = self.random.u64(LEAST / 256..=MOST / 256) * 256;
            if asked + bytes > self.bytes {
                return Ok((allocations, waits));
            }
            let due = Duration::from_secs_f64(asked as f64 / self.rate);
            let layout = layout(bytes)?;
            while began.elapsed() < due {
                spin_loop();
            }
            let start = began.elapsed();
            allocations.add(due, start, allocate(layout)?);
            let (start, wait) = (began.elapsed(), Instant::now());
            while wait.elapsed() < WAIT {}
            waits.add(start, start, wait.elapsed());
            asked += bytes;
        }
    }
}

/// How long calls took.
struct Times {
    /// When each began, from the first, and its duration.
    calls: Vec<(Duration, Duration)>,
    late: usize,
    creates: u64,
}

impl Times {
    fn new(most: usize) -> Self {
        Self {
            calls: Vec::with_capacity(most),
            late: 0,
            creates: 0,
        }
    }

    fn add(&mut self, due: Duration, start: Duration, took: Duration) {
        self.late += usize::from(start > due + Duration::from_millis(1));
        self.calls.push((start, took));
    }

    fn row(mut self, way: &'static str, run: u32) -> Row {
        let seconds = self.calls.last().map_or(0.0, |last| last.0.as_secs_f64());
        let waited = self.calls.iter().filter(|call| call.1 > WAITED).count();
        self.calls.sort_unstable_by_key(|call| call.1);
        let calls = &self.calls;
        let at = |part: f64| {
            let index = (calls.len() as f64 * part).ceil() as usize;
            let call = calls.get(index.clamp(1, calls.len().max(1)) - 1);
            call.map_or(0.0, |call| micros(call.1))
        };
        let slowest = calls.iter().rev().take(SLOWEST);
        Row {
            way,
            run,
            calls: calls.len(),
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: at(1.0),
            waited,
            late: self.late,
            seconds,
            creates: self.creates,
            quantiles: QUANTILES.map(at).to_vec(),
            slowest: slowest
                .map(|call| (micros(call.0), micros(call.1)))
                .collect(),
        }
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

impl Latency {
    /// The median of the runs.
    fn over(&self, way: &str, figure: impl Fn(&Row) -> f64) -> f64 {
        let of = self.rows.iter().filter(|row| row.way == way);
        median(&of.map(figure).collect::<Vec<_>>())
    }
}

impl Results for Latency {
    fn title(&self) -> String {
        format!(
            "blocks of {} to {}, {:.1} GB/s, until the heap has {}; {} ahead; µs",
            Bytes(LEAST),
            Bytes(MOST),
            self.demand as f64 / 1e9,
            Bytes(self.bytes),
            Bytes(self.ahead)
        )
    }

    fn header(&self) -> Vec<&'static str> {
        vec![
            "way", "run", "calls", "creates", "p50", "p99", "p99.9", "max", "waited", "late",
            "seconds",
        ]
    }

    fn facts(&self) -> usize {
        4
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let line = |row: &Row| {
            vec![
                row.way.to_string(),
                row.run.to_string(),
                row.calls.to_string(),
                row.creates.to_string(),
                format!("{:.3}", row.p50),
                format!("{:.3}", row.p99),
                format!("{:.3}", row.p999),
                format!("{:.1}", row.max),
                row.waited.to_string(),
                row.late.to_string(),
                format!("{:.2}", row.seconds),
            ]
        };
        self.rows.iter().map(line).collect()
    }

    fn verdicts(&self) -> Vec<String> {
        let verdict = |way: &&'static str| {
            let target = match *way {
                AHEAD => "; target: under 5 µs",
                _ => "",
            };
            format!(
                "{way}: p99.9 {:.2} µs, {} of {} over 100 µs (medians of the runs{target})",
                self.over(way, |row| row.p999),
                self.over(way, |row| row.waited as f64),
                self.over(way, |row| row.calls as f64),
            )
        };
        let clock = format!("reading the clock twice: {:.3} µs of each", self.clock);
        NAMES.iter().map(verdict).chain([clock]).collect()
    }

    fn draw(&self, about: &About) -> Option<String> {
        let points = |way: &'static str| {
            let point = |(index, _): (usize, &f64)| {
                (index as f64, self.over(way, |row| row.quantiles[index]))
            };
            QUANTILES.iter().enumerate().map(point).collect()
        };
        let line = |&name: &&'static str| Line {
            name: name.to_owned(),
            points: points(name),
        };
        let chart = Chart::measured(
            self.title(),
            (
                "0: median; 1: p90; 2: p99; 3: p99.9; 4: p99.99; 5: p99.999; 6: the longest",
                false,
            ),
            ("µs", true),
            NAMES.iter().map(line).collect(),
        );
        Some(plot::draw(
            "Latency of an allocation while the heap grows",
            &about.first_line(),
            &[chart],
        ))
    }
}
