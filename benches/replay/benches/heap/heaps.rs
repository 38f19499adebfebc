//! Pairs by eight threads over one heap and over many: the cost of finding a thread's cache of each.

use std::alloc::Layout;
use std::hint::black_box;
use std::io;

use crate::ours::Ours;
use crate::runner::pairs;
use crate::threads::{Borrowed, at_once};
use egmem_replay::contestants::Room;

const THREADS: usize = 8;
const HEAPS: usize = 200;
/// Pairs of each thread, one on each heap in turn.
const PAIRS: u64 = 400_000;

/// Prints medians of `rounds` rounds, in which both take turns.
///
/// # Errors
/// If a heap cannot be made.
pub fn run(rounds: usize) -> io::Result<()> {
    let room = Room {
        capacity: 64 << 20,
        blocks: 64,
        align: 16,
    };
    let heaps: Vec<Ours> = (0..HEAPS)
        .map(|_| Ours::new(room))
        .collect::<Result<_, _>>()?;
    let layout = Layout::from_size_align(64, 16).map_err(io::Error::other)?;
    let turn = |heaps: &[Ours]| {
        let (took, _) = at_once(
            THREADS,
            |_| {
                heaps
                    .iter()
                    .for_each(|heap| pairs(&mut Borrowed(heap), layout, 1))
            },
            |index, ()| {
                for pair in 0..PAIRS {
                    // Threads are at different heaps at the same time.
                    let heap = (pair as usize + index * 25) % heaps.len();
                    pairs(&mut Borrowed(black_box(&heaps[heap])), layout, 1);
                }
                0
            },
        );
        took.as_nanos() as f64 / (PAIRS * THREADS as u64) as f64
    };
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds.max(1) {
        times[0].push(turn(&heaps[..1]));
        times[1].push(turn(&heaps));
    }
    let [one, many] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    println!(
        "pairs of 64 B by {THREADS} threads, ns a pair: 1 heap {one:.1}, {HEAPS} heaps in turn {many:.1} ({:.2} ×)",
        many / one
    );
    Ok(())
}
