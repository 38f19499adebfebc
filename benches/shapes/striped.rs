//! Ranges in stripes: copies and kernels of GPU 0, by the number of stripes, beside a buffer in one place each.
//!
//! Stripes lie on GPU 0 and its host node in turn and, where another GPU reaches its memory, on two GPUs in turn. The
//! kernels go through the range from its start on with all blocks at a time, some MiB wide: with few large stripes
//! they read one place after the other, with many small ones all places at once.

use std::sync::Arc;

use egmem::driver::Location;
use egmem::pinned::DeviceMemory;
use egmem::proof::Prover;
use egmem::shapes::{Stripes, stripes};
use egmem::size::Bytes;
use egmem::{Buffer, Driver, Event, Memory, Result, Topology};

use crate::gpu::median_and_p99;

const GRANULE: u64 = 2 << 20;
const GPU: Location = Location::Device(0);

/// The measurements of each buffer.
const WORK: [&str; 4] = [
    "copy from it",
    "copy to it",
    "kernel reads",
    "kernel writes",
];

struct Bench {
    prover: Prover,
    /// The other end of copies, in GPU 0's own memory.
    own: Arc<DeviceMemory>,
    start: Event,
    end: Event,
    rounds: usize,
}

impl Bench {
    /// Returns the milliseconds that the GPU took for the work that `submit` submits.
    fn time<T>(&self, submit: impl FnOnce() -> Result<T>) -> Result<f64> {
        let stream = self.prover.stream();
        self.start.record(stream)?;
        let submitted = submit();
        self.end.record(stream)?;
        stream.finish()?;
        submitted?;
        Ok(f64::from(self.end.elapsed_ms_since(&self.start)?))
    }

    fn copy<M: Memory + 'static, N: Memory + 'static>(
        &self,
        to: &Arc<M>,
        from: &Arc<N>,
    ) -> Result<f64> {
        let (to, from, bytes) = (Arc::clone(to), Arc::clone(from), self.own.len());
        let stream = self.prover.stream();
        self.time(|| {
            stream
                .start_copy((to, 0), (from, 0), bytes)
                .map_err(|failed| *failed.error)
        })
    }

    /// Returns the medians of each kind of work, in milliseconds.
    fn measure(&self, buffer: &Arc<Buffer>) -> Result<[f64; WORK.len()]> {
        let mut times = [const { Vec::new() }; WORK.len()];
        for _ in 0..self.rounds {
            times[0].push(self.copy(&self.own, buffer)?);
            times[1].push(self.copy(buffer, &self.own)?);
            // SAFETY: `time` returns when the kernel has ended, and the buffer lives longer.
            times[2].push(self.time(|| unsafe { self.prover.launch_read(&**buffer) })?);
            // SAFETY: as above.
            times[3].push(self.time(|| unsafe { self.prover.launch_write(&**buffer, 1) })?);
        }
        Ok(times.map(|times| median_and_p99(times).0))
    }

    fn show(&self, name: &str, count: usize, buffer: Buffer) -> Result<()> {
        let bytes = buffer.len();
        let times = self.measure(&Arc::new(buffer))?;
        let rates = times.map(|ms| match self.own.driver().is_simulated() {
            true => format!("{:>14}", "simulated"),
            false => format!("{:>14.1}", bytes as f64 / ms / 1e6),
        });
        println!("{name:<24} {count:>7} {}", rates.join(" "));
        Ok(())
    }
}

/// Allocates for GPU 0 alone.
fn allocate(driver: &Driver, plan: &Stripes, bytes: u64) -> Result<Buffer> {
    plan.options(bytes)?.access_by([GPU]).allocate(driver)
}

/// Prints the table.
pub fn run(driver: &Driver, size: u64, rounds: usize) -> Result<()> {
    let topology = Topology::discover(driver)?;
    let gpu = topology.gpu(0)?;
    let node = Location::from(gpu.host_node()?);
    let peer = topology
        .gpus()
        .iter()
        .map(|gpu| gpu.ordinal)
        .find(|&other| other != 0 && driver.device_can_access_peer(0, other) == Ok(true));
    let size = size.next_multiple_of(2 * GRANULE);
    let bench = Bench {
        prover: Prover::new(driver, 0)?,
        own: Arc::new(DeviceMemory::new(driver, 0, size)?),
        start: Event::new(driver, 0, true)?,
        end: Event::new(driver, 0, true)?,
        rounds,
    };
    println!("\n{} in stripes, GB/s of GPU 0", Bytes(size));
    println!(
        "{:<24} {:>7} {}",
        "place",
        "stripes",
        WORK.map(|work| format!("{work:>14}")).join(" ")
    );
    let peer = peer.map(Location::Device);
    for place in [Some(node), Some(GPU), peer].into_iter().flatten() {
        let buffer = allocate(driver, &Stripes::over([place]), size)?;
        bench.show(&place.to_string(), 1, buffer)?;
    }
    for other in [Some(node), peer].into_iter().flatten() {
        let mut count = 2;
        while size / count >= GRANULE {
            let stripe = (size / count).next_multiple_of(GRANULE);
            let plan = Stripes::over([GPU, other]).stripe(stripe);
            let buffer = allocate(driver, &plan, size)?;
            let name = format!("{GPU}, {other}");
            bench.show(&name, stripes(&buffer).len(), buffer)?;
            count *= 4;
        }
    }
    Ok(())
}
