//! How long single allocations take while the heap grows under a steady demand.

use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};

use egmem::driver::Location;
use egmem::size::Bytes;
use egmem::{Block, Heap, Result};
use serde::Serialize;

use crate::args::Args;
use crate::report::{About, Results};
use crate::{Place, layout, median, plot};

/// Sizes are uniform between these.
const LEAST: u64 = 64 << 10;
const MOST: u64 = 1 << 20;
/// Whoever takes longer has waited for the driver: its quickest call for new memory takes longer.
const WAITED: Duration = Duration::from_micros(100);
/// The quantiles that are drawn.
const QUANTILES: [f64; 7] = [0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 1.0];

const NAMES: [&str; 2] = ["growth ahead", "growth on demand"];

/// One growth of a heap, all its allocations.
#[derive(Debug, Serialize)]
pub struct Row {
    pub way: &'static str,
    pub run: u32,
    pub allocations: usize,
    /// Microseconds of a call of `Heap::allocate`, the clock's own time included.
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
    /// Allocations that took over 100 µs.
    pub waited: usize,
    /// Allocations that began more than 1 ms after they were due, for one before them had waited.
    pub late: usize,
    /// Seconds from the first allocation to the last.
    pub seconds: f64,
    /// `cuMemCreate` calls by then.
    pub creates: u64,
    /// Quantiles of the call, microseconds: 0.5, 0.9, 0.99 … 1.
    pub quantiles: Vec<f64>,
}

/// All of them.
#[derive(Debug, Serialize)]
pub struct Latency {
    /// Bytes per second asked for.
    demand: u64,
    /// What the heap has in the end.
    bytes: u64,
    /// What is added ahead of need.
    ahead: u64,
    /// What reading the clock twice takes, in microseconds.
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
        for way in NAMES {
            let ahead = if way == NAMES[0] { args.ahead.0 } else { 0 };
            rows.push(grow(place, args, way, run, ahead)?);
        }
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

fn grow(place: &Place, args: &Args, way: &'static str, run: u32, ahead: u64) -> Result<Row> {
    let heap = Heap::on(place.node)
        .access_by([Location::Device(place.gpu)])
        .limit(args.to.0)
        .grow_ahead(ahead)
        .build(&place.driver)?;
    // A program that asks for growth ahead begins when its first memory is there.
    while heap.stats().free < ahead {
        std::thread::sleep(Duration::from_millis(1));
    }
    let most = (args.to.0 / LEAST) as usize;
    let mut blocks: Vec<Block> = Vec::with_capacity(most);
    let mut times: Vec<Duration> = Vec::with_capacity(most);
    let mut random = fastrand::Rng::with_seed(u64::from(run) + 1);
    let (began, mut asked, mut late) = (Instant::now(), 0_u64, 0);
    loop {
        let bytes = random.u64(LEAST / 256..=MOST / 256) * 256;
        if asked + bytes > args.to.0 {
            break;
        }
        let due = Duration::from_secs_f64(asked as f64 / args.demand as f64);
        let layout = layout(bytes)?;
        while began.elapsed() < due {
            spin_loop();
        }
        let start = Instant::now();
        let block = black_box(heap.allocate(layout)?);
        times.push(start.elapsed());
        late += usize::from(start - began > due + Duration::from_millis(1));
        // It is memory, whoever added it.
        block.put(0, 1_u8)?;
        blocks.push(block);
        asked += bytes;
    }
    let seconds = began.elapsed().as_secs_f64();
    let creates = heap.stats().driver.create;
    let waited = times.iter().filter(|&&time| time > WAITED).count();
    times.sort_unstable();
    let at = |part: f64| {
        let index = (times.len() as f64 * part).ceil() as usize;
        let time = times.get(index.clamp(1, times.len().max(1)) - 1);
        time.copied().map_or(0.0, micros)
    };
    Ok(Row {
        way,
        run,
        allocations: times.len(),
        p50: at(0.5),
        p99: at(0.99),
        p999: at(0.999),
        max: at(1.0),
        waited,
        late,
        seconds,
        creates,
        quantiles: QUANTILES.map(at).to_vec(),
    })
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
            "way",
            "run",
            "allocations",
            "creates",
            "p50",
            "p99",
            "p99.9",
            "max",
            "waited",
            "late",
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
                row.allocations.to_string(),
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
            format!(
                "{way}: p99.9 {:.2} µs, {} of {} waited (medians of the runs; target with growth ahead: under 5 µs)",
                self.over(way, |row| row.p999),
                self.over(way, |row| row.waited as f64),
                self.over(way, |row| row.allocations as f64),
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
        let panel = plot::Panel {
            title: self.title(),
            across: "0: median; 1: p90; 2: p99; 3: p99.9; 4: p99.99; 5: p99.999; 6: the longest",
            up: "µs",
            logarithmic: (false, true),
            lines: NAMES
                .iter()
                .map(|&name| plot::Line {
                    name,
                    points: points(name),
                })
                .collect(),
        };
        Some(plot::draw(
            "Latency of an allocation while the heap grows",
            &about.first_line(),
            &[panel],
        ))
    }
}
