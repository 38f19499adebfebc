//! The command line: which parts to measure, and their parameters.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use egmem::size::Bytes;

/// Measures the heap on a GPU's host node.
#[derive(Clone, Debug, Parser)]
#[command(name = "measure-heap")]
pub struct Args {
    /// Which measurements.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "pairs,growth,latency,refusals,captures"
    )]
    pub part: Vec<Part>,

    /// The folder for JSON, CSV and SVG; without it the results are only printed.
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,

    /// Which GPU, by ordinal.
    #[arg(long, default_value_t = 0)]
    pub gpu: i32,

    /// Rounds in which the contestants take turns; figures are their medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    /// Pairs: how many threads.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4,8,16"
    )]
    pub threads: Vec<u32>,

    /// Pairs: the sizes of blocks.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "64KiB,4KiB,1MiB"
    )]
    pub size: Vec<Bytes>,

    /// Pairs: milliseconds of each contestant's turn.
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub window: u64,

    /// Growth: how much memory.
    #[arg(long, value_name = "BYTES", default_value = "8GiB")]
    pub growth: Bytes,

    /// Large: how much memory in one range.
    #[arg(long, value_name = "BYTES", default_value = "96GiB")]
    pub large: Bytes,

    /// Growth: the sizes of chunks.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "64MiB,256MiB,1GiB"
    )]
    pub chunk: Vec<Bytes>,

    /// Refusals: how many holes there are where there are many.
    #[arg(long, value_name = "N", default_value_t = 30_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub holes: u32,

    /// Latency: until when the heap grows.
    #[arg(long, value_name = "BYTES", default_value = "16GiB")]
    pub to: Bytes,

    /// Latency: bytes allocated per second.
    #[arg(long, value_name = "BYTES", default_value_t = 1_000_000_000)]
    pub demand: u64,

    /// Latency: how much memory is added in advance.
    #[arg(long, value_name = "BYTES", default_value = "512MiB")]
    pub ahead: Bytes,

    /// Latency: how often the heap is grown, with growth ahead and without.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Pairs of allocation and free.
    Pairs,
    /// New memory.
    Growth,
    /// Single allocations while the heap grows.
    Latency,
    /// Pairs beside a thread whose requests are refused.
    Refusals,
    /// The effect of calls on another thread's capture.
    Captures,
    /// Much memory in one range.
    Large,
    /// Pairs whose frees come after a stream's work.
    Streams,
}

impl Part {
    /// Whether the machine's memory should have been touched before.
    pub fn takes_memory(self) -> bool {
        matches!(self, Self::Growth | Self::Latency)
    }
}

impl Args {
    /// The same for the simulator: enough to see that all of it runs.
    pub fn in_small(&self) -> Self {
        Self {
            rounds: 1,
            threads: vec![1, 2],
            size: vec![Bytes(64 << 10)],
            window: 1,
            growth: Bytes(32 << 20),
            chunk: vec![Bytes(8 << 20)],
            large: Bytes(2 << 30),
            holes: 300,
            to: Bytes(64 << 20),
            ahead: Bytes(16 << 20),
            runs: 1,
            ..self.clone()
        }
    }

    /// The window of a turn.
    pub fn window(&self) -> Duration {
        Duration::from_millis(self.window.max(1))
    }
}
