//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use egmem::driver::HandleType;
use egmem::exchange::Address;
use egmem::size::Bytes;

/// Shows that two processes, on one machine or on two, use the same memory, with proof.
///
/// The owner publishes memory on its GPU's host node, the peer imports it, and each verifies by CPU
/// and by GPU the bytes that the other wrote. Exit status 0 only if everything was verified.
/// Without a role, both run here as two processes, on the simulator unless --cuda is given.
#[derive(Debug, Parser)]
#[command(name = "fabric-exchange")]
pub struct Args {
    /// Which of the two this is.
    pub role: Option<Role>,

    /// Where the owner listens and the peer connects: HOST:PORT. Beyond this machine it takes
    /// certificates.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub address: Address,

    /// The authority's certificate (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["cert", "key"])]
    pub ca: Option<PathBuf>,

    /// This end's certificate.
    #[arg(long, value_name = "FILE", requires = "ca")]
    pub cert: Option<PathBuf>,

    /// Its private key.
    #[arg(long, value_name = "FILE", requires = "ca")]
    pub key: Option<PathBuf>,

    /// Revocation lists: with them, a peer that none covers is not trusted.
    #[arg(long, value_name = "FILE", requires = "ca")]
    pub crl: Option<PathBuf>,

    /// How much the owner shares: 64MiB, 1.5GiB. Behind it there is room for the probe.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    pub size: Bytes,

    /// Under which name.
    #[arg(long, default_value = "fabric-exchange/memory")]
    pub name: String,

    /// By which handle the peer imports it. Without this: an fd on the same machine, else fabric.
    #[arg(long, value_name = "HANDLE")]
    pub via: Option<Via>,

    /// Which GPU of this end takes part, by ordinal.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gpu: i32,

    /// How long to wait for the other end, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub wait: u64,

    /// Simulate a machine: gh200, gb200, h200x8, gh200x4, or a description as a JSON file; or EGMEM_SIM.
    #[arg(long, value_name = "PRESET|FILE.json", conflicts_with = "cuda")]
    pub sim: Option<String>,

    /// Use the GPUs, not the simulator.
    #[arg(long)]
    pub cuda: bool,

    /// Print one JSON document, and nothing else, on standard output.
    #[arg(long)]
    pub json: bool,
}

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Allocates the memory and publishes it.
    Owner,
    /// Imports it.
    Peer,
}

/// A type of handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Via {
    /// A fabric handle, which works between machines.
    Fabric,
    /// A POSIX fd, on one machine.
    Fd,
}

impl From<Via> for HandleType {
    fn from(via: Via) -> Self {
        match via {
            Via::Fabric => Self::Fabric,
            Via::Fd => Self::PosixFd,
        }
    }
}

impl Args {
    /// How long to wait for the other end.
    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.wait)
    }
}
