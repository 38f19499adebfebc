//! Every kind of memory that CPU and GPU both reach, measured side by side: the rate at which each writes and reads
//! it.
//!
//! ```text
//! cargo run --release --example host-memory -- 1GiB
//! ```
//! On GPU 0 and its node. Where there is no GPU, on a simulated machine, whose times mean nothing and are not shown.

use std::error::Error;
use std::fs::File;
use std::time::Instant;

use egmem::memory::CpuMemory;
use egmem::pinned::{
    DeviceMemory, ManagedMemory, PageSize, PinnedHost, RegisteredHost, SystemMemory,
};
use egmem::proof::Prover;
use egmem::size::Bytes;
use egmem::{Buffer, Driver, Machine, Memory, Result, Stream};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Rounds, of which the fastest is shown; but the first read is shown too.
const ROUNDS: u32 = 5;

struct Gpu {
    stream: Stream,
    prover: Prover,
    own: DeviceMemory,
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, so no bandwidth is shown");
    }
    let size = std::env::args().nth(1);
    let Bytes(bytes) = size.as_deref().unwrap_or("16MiB").parse()?;
    let gpu = Gpu {
        stream: Stream::new(&driver, 0)?,
        prover: Prover::new(&driver, 0)?,
        own: DeviceMemory::new(&driver, 0, bytes)?,
    };
    println!("{} each; GB/s", Bytes(bytes));
    println!("memory      CPU write 1st read  GPU read    to GPU  from GPU  right for");
    let egm = Buffer::near(&driver, 0, bytes);
    gpu.show("EGM", egm, "large data, chosen nodes, sharing");
    let pinned = PinnedHost::new(&driver, 0, bytes);
    gpu.show("pinned", pinned, "small data, on no node");
    let pages = |size| RegisteredHost::new(&driver, 0, bytes, size);
    let base = pages(PageSize::Base);
    gpu.show("registered", base, "pages that other code needs");
    let huge = pages(PageSize::Transparent);
    gpu.show("  huge", huge, "the same, pinned faster");
    let reserved = pages(PageSize::Reserved);
    gpu.show("  reserved", reserved, "the same, huge for certain");
    // Sealed, so that no process can shorten it under the mapping.
    let file = File::from(memfd_create("host-memory", MemfdFlags::ALLOW_SEALING)?);
    file.set_len(bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK)?;
    let of_file = RegisteredHost::of_sealed_file(&driver, 0, &file, 0, bytes);
    gpu.show("  file", of_file, "files that other processes map");
    let system = SystemMemory::new(&driver, bytes, PageSize::Base);
    gpu.show("system", system, "data that seldom meet a GPU");
    let managed = ManagedMemory::new(&driver, 0, bytes);
    gpu.show("managed", managed, "one side long, then the other");
    Ok(())
}

impl Gpu {
    fn show<M: Memory + CpuMemory>(&self, name: &str, memory: Result<M>, right_for: &str) {
        match memory.and_then(|memory| self.measure(&memory)) {
            Ok(all) => println!("{name:<11} {}  {right_for}", all.join(" ")),
            Err(error) => println!("{name:<11} not here: {error}"),
        }
    }

    fn measure<M: Memory + CpuMemory>(&self, memory: &M) -> Result<[String; 5]> {
        let len = memory.len();
        let ones = vec![1_u8; len as usize];
        let read = || self.prover.read(memory).map(drop);
        Ok([
            self.fastest(ROUNDS, len, || memory.cpu()?.write_at(0, &ones))?,
            // Pages that move do so now.
            self.fastest(1, len, read)?,
            self.fastest(ROUNDS, len, read)?,
            self.fastest(ROUNDS, len, || {
                self.stream.copy(&self.own, 0, memory, 0, len)
            })?,
            self.fastest(ROUNDS, len, || {
                self.stream.copy(memory, 0, &self.own, 0, len)
            })?,
        ])
    }

    /// Returns the bandwidth of the fastest round, or nothing on a simulated machine.
    fn fastest(
        &self,
        rounds: u32,
        bytes: u64,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<String> {
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            let start = Instant::now();
            work()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(match self.stream.driver().is_simulated() {
            true => format!("{:>9}", "-"),
            false => format!("{:>9.1}", bytes as f64 / best / 1e9),
        })
    }
}
