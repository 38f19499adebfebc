//! Pairs of small blocks by one thread beside another whose requests are refused, again and again.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use egmem::{Block, Error, Heap, Result};
use serde::Serialize;

use crate::args::Args;
use crate::report::{About, Results};
use crate::{Place, median};

/// All memory of the heap, unless it has many holes.
const LIMIT: u64 = 64 << 20;
/// The size of the blocks that fill it.
const FILLER: u64 = 64 << 10;
/// The size of a hole where there are many.
const HOLE: u64 = 16 << 10;
/// The size of the blocks that the neighbour allocates and frees.
const SMALL: u64 = 64;

/// Why the other thread's requests are refused.
#[derive(Clone, Copy, Debug, Serialize)]
enum Refuser {
    /// There is none.
    None,
    /// Less is free than it asks for.
    TooMuch,
    /// Enough is free, in pieces.
    Pieces,
    /// The same with many pieces; between requests, a block is allocated in one or freed.
    Holes,
    /// As many pieces, each as large as the request, but none at a multiple of its alignment.
    Aligned,
    /// No hole is left for a small block.
    Small,
}

impl Refuser {
    /// The size and alignment of its requests.
    fn asks_for(self) -> Option<(u64, u64)> {
        match self {
            Self::None => None,
            Self::TooMuch => Some((4 << 20, 1)),
            Self::Pieces => Some((2 * FILLER, 1)),
            Self::Holes => Some((2 * HOLE, 1)),
            Self::Aligned => Some((HOLE, 2 * HOLE)),
            Self::Small => Some((500, 1)),
        }
    }

    fn has_holes(self) -> bool {
        matches!(self, Self::Holes | Self::Aligned)
    }

    /// The heap's memory, and the size of the blocks that it is full of.
    fn heap(self, holes: u32) -> (u64, u64) {
        match self.has_holes() {
            true => (
                (2 * u64::from(holes) * HOLE).next_multiple_of(2 << 20),
                HOLE,
            ),
            false => (LIMIT, FILLER),
        }
    }
}

/// The neighbour's rate beside one kind of refuser.
#[derive(Debug, Serialize)]
pub struct Row {
    beside: Refuser,
    /// How often the refused requests took all caches, in all rounds.
    cache_takings: u64,
    /// The neighbour's, the median of the rounds.
    pairs_per_second: f64,
    /// By the neighbour's without a refuser.
    of_alone: f64,
    refusals_per_second: f64,
    /// How long a refusal takes, over all rounds, in microseconds.
    refusal_p50: f64,
    refusal_p99: f64,
    refusal_max: f64,
}

/// The rates and latencies of one window.
struct Turn {
    pairs_per_second: f64,
    refusals_per_second: f64,
    /// Nanoseconds of each refusal.
    refusals: Vec<u32>,
}

#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Refusals {
    rows: Vec<Row>,
}

/// Measures the neighbour alone and beside each kind of refuser.
///
/// # Errors
/// The driver's.
pub fn measure(place: &Place, args: &Args) -> Result<Refusals> {
    let mut rows: Vec<Row> = Vec::new();
    for beside in [
        Refuser::None,
        Refuser::TooMuch,
        Refuser::Pieces,
        Refuser::Holes,
        Refuser::Aligned,
        Refuser::Small,
    ] {
        let (heap, _filler) = full(place, beside, args.holes)?;
        let before = heap.stats().cache_takings;
        let mut turns = Vec::new();
        for _ in 0..args.rounds {
            turns.push(turn_of(&heap, beside, args)?);
        }
        let of_each = |value: fn(&Turn) -> f64| turns.iter().map(value).collect::<Vec<f64>>();
        let rate = median(&of_each(|turn| turn.pairs_per_second));
        let mut refusals: Vec<u32> = turns
            .iter()
            .flat_map(|turn| &turn.refusals)
            .copied()
            .collect();
        refusals.sort_unstable();
        let at = |part: f64| {
            let index = (refusals.len() as f64 * part) as usize;
            let nanoseconds = refusals.get(index.min(refusals.len().saturating_sub(1)));
            f64::from(nanoseconds.copied().unwrap_or(0)) / 1e3
        };
        rows.push(Row {
            beside,
            cache_takings: heap.stats().cache_takings - before,
            pairs_per_second: rate,
            of_alone: rate / rows.first().map_or(rate, |alone| alone.pairs_per_second),
            refusals_per_second: median(&of_each(|turn| turn.refusals_per_second)),
            refusal_p50: at(0.5),
            refusal_p99: at(0.99),
            refusal_max: at(1.0),
        });
    }
    Ok(Refusals { rows })
}

/// A heap that cannot grow, with no room for the refuser's requests.
fn full(place: &Place, beside: Refuser, holes: u32) -> Result<(Heap, Vec<Block>)> {
    let (limit, filler_bytes) = beside.heap(holes);
    let heap = Heap::on(place.node).limit(limit).reserve(limit);
    let heap = heap.build(&place.driver)?;
    let mut blocks = Vec::new();
    // The neighbour has a slab of its own.
    blocks.push(heap.allocate(layout_of(SMALL, 1)?)?);
    let all = std::iter::from_fn(|| heap.allocate(layout_of(filler_bytes, 1).ok()?).ok());
    let filler: Vec<Block> = all.collect();
    let pieces = matches!(beside, Refuser::Pieces) || beside.has_holes();
    // By address: no piece that comes free has room at a multiple of two.
    let is_even = |block: &Block| (block.device_ptr().0 / filler_bytes).is_multiple_of(2);
    let kept = filler.into_iter().filter(|block| !pieces || is_even(block));
    blocks.extend(kept);
    if let Refuser::Small = beside {
        for bytes in [16 << 10, 4 << 10, 2304, 500] {
            let rest = std::iter::from_fn(|| heap.allocate(layout_of(bytes, 1).ok()?).ok());
            blocks.extend(rest);
        }
    }
    Ok((heap, blocks))
}

fn layout_of(bytes: u64, align: u64) -> Result<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes as usize, align as usize)
        .map_err(|error| Error::invalid("size", error.to_string()))
}

/// One window: the neighbour's pairs and the refuser's requests, per second.
fn turn_of(heap: &Heap, beside: Refuser, args: &Args) -> Result<Turn> {
    let (start, end) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let refuser = scope.spawn(|| -> Result<Vec<u32>> {
            start.wait();
            let mut refusals = Vec::new();
            let Some((bytes, align)) = beside.asks_for() else {
                return Ok(refusals);
            };
            let (asked, hole) = (layout_of(bytes, align)?, layout_of(HOLE, 1)?);
            let mut own = None;
            while !end.load(Relaxed) {
                if beside.has_holes() {
                    own = match own {
                        None => heap.allocate(hole).ok(),
                        Some(_) => None,
                    };
                }
                let began = Instant::now();
                if heap.allocate(asked).is_err() {
                    let took = began.elapsed().as_nanos();
                    refusals.push(u32::try_from(took).unwrap_or(u32::MAX));
                }
            }
            Ok(refusals)
        });
        start.wait();
        let (small, began) = (layout_of(SMALL, 1)?, Instant::now());
        let mut pairs = 0_u64;
        let mut result = Ok(());
        while result.is_ok() && began.elapsed() < args.window() {
            for _ in 0..1000 {
                result = heap.allocate(small).map(|block| drop(black_box(block)));
            }
            pairs += 1000;
        }
        let seconds = began.elapsed().as_secs_f64();
        end.store(true, Relaxed);
        let refusals = match refuser.join() {
            Ok(refusals) => refusals?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        result.map(|()| Turn {
            pairs_per_second: pairs as f64 / seconds,
            refusals_per_second: refusals.len() as f64 / seconds,
            refusals,
        })
    })
}

impl Results for Refusals {
    fn title(&self) -> String {
        "pairs of 64 B per second by a thread beside one whose requests are refused".into()
    }

    fn header(&self) -> Vec<&'static str> {
        vec![
            "refused",
            "cache takings",
            "million pairs/s",
            "of alone",
            "million refusals/s",
            "refusal p50 µs",
            "p99",
            "max",
        ]
    }

    fn facts(&self) -> usize {
        2
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let line = |row: &Row| {
            vec![
                format!("{:?}", row.beside),
                row.cache_takings.to_string(),
                format!("{:.3}", row.pairs_per_second / 1e6),
                format!("{:.3}", row.of_alone),
                format!("{:.4}", row.refusals_per_second / 1e6),
                format!("{:.2}", row.refusal_p50),
                format!("{:.2}", row.refusal_p99),
                format!("{:.0}", row.refusal_max),
            ]
        };
        self.rows.iter().map(line).collect()
    }

    fn verdicts(&self) -> Vec<String> {
        let least = self.rows.iter().map(|row| row.of_alone);
        let holes = self
            .rows
            .iter()
            .find(|row| matches!(row.beside, Refuser::Holes));
        let holes = holes.map(|row| {
            format!(
                "a refusal beside many holes takes {:.2} µs at p99 (target 10)",
                row.refusal_p99
            )
        });
        let pairs = format!(
            "beside refused requests a thread does at least {:.2} of its pairs alone",
            least.fold(f64::INFINITY, f64::min)
        );
        std::iter::once(pairs).chain(holes).collect()
    }

    fn draw(&self, _: &About) -> Option<String> {
        None
    }
}
