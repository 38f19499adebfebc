//! The command line.

use std::path::PathBuf;

use clap::Parser;
use egmem::size::Bytes;
use egmem::{Error, Result};

/// Shows that one node's Extended GPU Memory works, with proof.
///
/// For every pair of a host NUMA node and a GPU, memory is allocated on the node through the VMM
/// path and through a pool, granted to the CPU and to the GPUs, and its bytes are proved from both
/// sides. On GPUs the bandwidth is measured too. Exit status 0 only if every proof held.
#[derive(Debug, Parser)]
#[command(name = "egm-demo")]
pub struct Args {
    /// Simulate: a preset's name, or a file that describes a machine (JSON, or lstopo's XML); or EGMEM_SIM (no XML).
    #[arg(long, value_name = "PRESET|FILE", conflicts_with = "cuda")]
    pub sim: Option<String>,

    /// Use the GPUs, and fail where there are none.
    #[arg(long)]
    pub cuda: bool,

    /// Only these GPUs, by ordinal: 0,1.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub gpus: Vec<i32>,

    /// Bytes to allocate, prove and copy at a time: 64MiB, 1.5GiB. Default: 1 GiB on GPUs, 64 MiB
    /// on the simulator.
    #[arg(long, value_name = "SIZE")]
    pub size: Option<Bytes>,

    /// Print one JSON document, and nothing else, on standard output.
    #[arg(long)]
    pub json: bool,

    /// Draw the bandwidth matrix as DIR/bandwidth.svg.
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,

    /// How often each bandwidth is measured; the median counts.
    #[arg(long, value_name = "N", default_value_t = 9,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,

    /// Prove only; measure no bandwidth.
    #[arg(long)]
    pub no_bandwidth: bool,
}

impl Args {
    /// The bytes to allocate: those asked for, else the backend's default; a multiple of 8, since
    /// kernels work in words.
    ///
    /// The simulator's memory is this machine's, written by this machine's CPU: a laptop gets
    /// through gh200x4's 32 proofs in seconds at 64 MiB.
    pub fn size(&self, simulated: bool) -> Result<u64> {
        let bytes = match self.size {
            Some(Bytes(bytes)) => bytes,
            None if simulated => 64 << 20,
            None => 1 << 30,
        };
        bytes
            .checked_next_multiple_of(8)
            .filter(|&bytes| bytes > 0)
            .ok_or_else(|| Error::invalid("--size", format!("{bytes} bytes cannot be allocated")))
    }
}
