//! Traces in the shapes of known kinds of programs, the same for the same seed, as RMM's log writes them.
//!
//! They are made up: sizes and orders follow how such programs are known to allocate, and no log of a
//! real one was used. `benches/data/README.md` describes each.

mod dataframe;
mod kv_cache;
mod training;

use std::collections::HashMap;
use std::fmt::Write;

use clap::ValueEnum;
use egmem::kernels::pattern;

/// The kind of program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// LLM inference with a paged KV cache: equal pages per request, scratch per step
    KvCache,
    /// Dataframe queries: columns and their temporaries, sizes over six decades, four threads
    Dataframe,
    /// Training steps: activations freed backwards, optimizer state that stays
    Training,
}

/// The lines of a trace: at least `lines`, and then those until its end.
pub fn generate(shape: Shape, seed: u64, lines: usize) -> String {
    let mut log = Log::new(seed, lines);
    match shape {
        Shape::KvCache => kv_cache::run(&mut log),
        Shape::Dataframe => dataframe::run(&mut log),
        Shape::Training => training::run(&mut log),
    }
    log.text
}

/// A live block.
#[derive(Debug)]
struct Block {
    pointer: u64,
    bytes: u64,
}

/// The log as it is written.
struct Log {
    text: String,
    lines: usize,
    want: usize,
    /// Microseconds since midnight.
    clock: u64,
    random: Random,
    /// Addresses that were freed, by size; the last one freed comes first.
    freed: HashMap<u64, Vec<u64>>,
    next: u64,
}

/// RMM's pools align to this.
const ALIGN: u64 = 256;

impl Log {
    fn new(seed: u64, want: usize) -> Self {
        Self {
            text: "Thread,Time,Action,Pointer,Size,Stream\n".into(),
            lines: 0,
            want,
            clock: 10 * 3600 * 1_000_000,
            random: Random { seed, drawn: 0 },
            freed: HashMap::new(),
            next: 0x7f20_0000_0000,
        }
    }

    /// Whether the log is as long as it should be.
    fn is_long_enough(&self) -> bool {
        self.lines >= self.want
    }

    fn allocate(&mut self, thread: u32, bytes: u64) -> Block {
        let place = bytes.next_multiple_of(ALIGN);
        let again = self.freed.get_mut(&place).and_then(Vec::pop);
        let pointer = again.unwrap_or_else(|| {
            self.next += place;
            self.next - place
        });
        self.line(thread, "allocate", pointer, bytes);
        Block { pointer, bytes }
    }

    fn free(&mut self, thread: u32, block: Block) {
        self.line(thread, "free", block.pointer, block.bytes);
        let place = block.bytes.next_multiple_of(ALIGN);
        self.freed.entry(place).or_default().push(block.pointer);
    }

    /// Last allocated, first freed.
    fn free_backwards(&mut self, thread: u32, blocks: Vec<Block>) {
        for block in blocks.into_iter().rev() {
            self.free(thread, block);
        }
    }

    /// Lets time pass: from half to one and a half times so many microseconds.
    fn work(&mut self, about: u64) {
        self.clock += about / 2 + self.random.below(about + 1);
    }

    fn line(&mut self, thread: u32, action: &str, pointer: u64, bytes: u64) {
        self.clock += 1 + self.random.below(4);
        self.lines += 1;
        let (seconds, micros) = (self.clock / 1_000_000, self.clock % 1_000_000);
        let (minutes, seconds) = (seconds / 60, seconds % 60);
        let (hours, minutes) = (minutes / 60 % 24, minutes % 60);
        // Writing to a String cannot fail.
        let _ = writeln!(
            self.text,
            "{thread},{hours:02}:{minutes:02}:{seconds:02}.{micros:06},{action},{pointer:#x},{bytes},0x{stream:x}",
            stream = thread - 1,
        );
    }
}

/// SplitMix64. Whole numbers only: logarithms differ from one C library to the next.
struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    fn word(&mut self) -> u64 {
        self.drawn += 1;
        pattern(self.seed, self.drawn)
    }

    /// From 0, below `end`, which is not 0.
    fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }

    /// From `low`, below `high`.
    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// From 2^`low`, below 2^`high`, each power of two as likely as the others.
    fn spread(&mut self, low: u32, high: u32) -> u64 {
        let power = self.between(u64::from(low), u64::from(high));
        let least = 1_u64 << power;
        least + self.below(least)
    }

    fn percent(&mut self, n: u64) -> bool {
        self.below(100) < n
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use crate::read::{Reading, read};

    #[test]
    fn every_shape_is_a_sound_log() {
        for &shape in Shape::value_variants() {
            for seed in 0..20 {
                let text = generate(shape, seed, 3000);
                let trace = read(text.as_bytes(), Reading::default()).unwrap();
                let notes = &trace.notes;
                assert!(notes.allocations + notes.frees >= 3000, "{shape:?}");
                assert!(notes.lines < 4500, "{shape:?}: {} lines", notes.lines);
                // Nothing odd: every free has its allocation, and no address is given out twice.
                assert_eq!(notes.lines, notes.allocations + notes.frees + 1);
                assert_eq!((notes.implied_frees, notes.other_sizes), (0, 0));
                assert_eq!((notes.never_freed, notes.times_back), (0, 0));
                assert_eq!(trace.times.len(), trace.events.len());
                assert!(trace.peak > 128 << 20, "{shape:?}: {}", trace.peak);
                assert!(trace.peak < 3 << 30, "{shape:?}: {}", trace.peak);
            }
        }
    }

    #[test]
    fn a_seed_says_all() {
        for &shape in Shape::value_variants() {
            assert_eq!(generate(shape, 7, 1000), generate(shape, 7, 1000));
            assert_ne!(generate(shape, 7, 1000), generate(shape, 8, 1000));
        }
    }
}
