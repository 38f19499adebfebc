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

/// All memory of the heap.
const LIMIT: u64 = 64 << 20;
/// What it is full of.
const FILLER: u64 = 64 << 10;
/// What the neighbour allocates and frees.
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
    /// No hole is left for a small block.
    Small,
}

impl Refuser {
    fn asks_for(self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::TooMuch => Some(4 << 20),
            Self::Pieces => Some(2 * FILLER),
            Self::Small => Some(500),
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
        Refuser::Small,
    ] {
        let (heap, _filler) = full(place, beside)?;
        let before = heap.stats().cache_takings;
        let mut rates = Vec::new();
        for _ in 0..args.rounds {
            rates.push(turn_of(&heap, beside, args)?);
        }
        let (pairs, refusals): (Vec<f64>, Vec<f64>) = rates.into_iter().unzip();
        let rate = median(&pairs);
        rows.push(Row {
            beside,
            cache_takings: heap.stats().cache_takings - before,
            pairs_per_second: rate,
            of_alone: rate / rows.first().map_or(rate, |alone| alone.pairs_per_second),
            refusals_per_second: median(&refusals),
        });
    }
    Ok(Refusals { rows })
}

/// A heap that cannot grow, with no room for what the refuser asks for.
fn full(place: &Place, beside: Refuser) -> Result<(Heap, Vec<Block>)> {
    let heap = Heap::on(place.node).limit(LIMIT).reserve(LIMIT);
    let heap = heap.build(&place.driver)?;
    let mut blocks = Vec::new();
    // The neighbour has a slab of its own.
    blocks.push(heap.allocate(layout_of(SMALL)?)?);
    let all = std::iter::from_fn(|| heap.allocate(layout_of(FILLER).ok()?).ok());
    let filler: Vec<Block> = all.collect();
    let pieces = matches!(beside, Refuser::Pieces);
    let kept = filler.into_iter().enumerate();
    blocks.extend(
        kept.filter(|(at, _)| !pieces || at % 2 == 0)
            .map(|(_, block)| block),
    );
    if let Refuser::Small = beside {
        for bytes in [16 << 10, 4 << 10, 2304, 500] {
            let rest = std::iter::from_fn(|| heap.allocate(layout_of(bytes).ok()?).ok());
            blocks.extend(rest);
        }
    }
    Ok((heap, blocks))
}

fn layout_of(bytes: u64) -> Result<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes as usize, 1)
        .map_err(|error| Error::invalid("size", error.to_string()))
}

/// One window: the neighbour's pairs and the refuser's requests, per second.
fn turn_of(heap: &Heap, beside: Refuser, args: &Args) -> Result<(f64, f64)> {
    let (start, end) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let refuser = scope.spawn(|| -> Result<u64> {
            start.wait();
            let Some(bytes) = beside.asks_for() else {
                return Ok(0);
            };
            let (asked, mut refused) = (layout_of(bytes)?, 0);
            while !end.load(Relaxed) {
                refused += u64::from(heap.allocate(asked).is_err());
            }
            Ok(refused)
        });
        start.wait();
        let (small, began) = (layout_of(SMALL)?, Instant::now());
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
        let refused = match refuser.join() {
            Ok(refused) => refused?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        result.map(|()| (pairs as f64 / seconds, refused as f64 / seconds))
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
            ]
        };
        self.rows.iter().map(line).collect()
    }

    fn verdicts(&self) -> Vec<String> {
        let least = self.rows.iter().map(|row| row.of_alone);
        vec![format!(
            "beside refused requests a thread does at least {:.2} of its pairs alone",
            least.fold(f64::INFINITY, f64::min)
        )]
    }

    fn draw(&self, _: &About) -> Option<String> {
        None
    }
}
