//! Bandwidth and latency: every kind of host memory on every node, used by every GPU.
//!
//! All kinds are measured in turns within one run, in an order that rotates, so that drift (clocks,
//! neighbours) hits all alike. Times are those of CUDA events around the work on one stream. The
//! thread that allocates, and whose CPU stages pageable copies, is bound to the node.

use egmem_core::proof::Kernels;

use super::{Bandwidth, BandwidthRow, HostMemory, Kind, Rate, Step};
use crate::driver::{
    DeviceAttribute, DevicePtr, FunctionHandle, LaunchDims, Location, NodeId, PoolApi,
};
use crate::kernels::pattern;
use crate::{DeviceMemory, Driver, Error, Event, Memory, PinnedHost, Result, Stream, Topology};

/// The seed of the pattern that fills all memory while it is measured.
const SEED: u64 = 0x0065_676d_656d;
/// Rounds that do not count: clocks rise, address translations are cached.
const WARM_UP: u32 = 2;
/// The threads of a block.
const THREADS: u32 = 1024;

/// The measurements to make.
#[derive(Clone, Copy, Debug)]
pub struct Rates<'a> {
    /// The driver.
    pub driver: &'a Driver,
    /// The topology, by which threads are bound to nodes.
    pub topology: &'a Topology,
    /// The nodes that memory is allocated on.
    pub nodes: &'a [NodeId],
    /// The ordinals of the GPUs that use it.
    pub gpus: &'a [i32],
    /// The bytes moved at a time, a multiple of 8.
    pub bytes: u64,
    /// How often each figure is measured.
    pub repeats: u32,
}

impl Rates<'_> {
    /// Returns how often a measurement tells [`Step::Done`].
    pub fn steps(&self) -> u64 {
        (self.nodes.len() * self.gpus.len()) as u64 * u64::from(self.rounds())
    }

    fn rounds(&self) -> u32 {
        WARM_UP.saturating_add(self.repeats)
    }

    /// Measures the bandwidth of everything.
    ///
    /// # Errors
    /// Those of the driver, once memory is allocated; memory that cannot be is a [`Step::Without`].
    pub fn measure(&self, progress: &mut dyn FnMut(Step<'_>)) -> Result<Bandwidth> {
        let rows = self.each(progress, |ms| Rate::of(self.bytes, ms))?;
        Ok(Bandwidth {
            unit: "GB/s",
            bytes: self.bytes,
            repeats: self.repeats,
            worst_ratio_to_cuda_host_alloc: worst_ratio(&rows),
            rows,
        })
    }

    /// Measures how many microseconds each operation takes.
    ///
    /// # Errors
    /// As for [`measure`](Self::measure).
    pub fn latency(&self, progress: &mut dyn FnMut(Step<'_>)) -> Result<Vec<BandwidthRow>> {
        let us = |&ms: &f32| f64::from(ms) * 1e3;
        self.each(progress, |ms| Rate::of_figures(ms.iter().map(us)))
    }

    fn each(
        &self,
        progress: &mut dyn FnMut(Step<'_>),
        figure: impl Fn(&[f32]) -> Option<Rate>,
    ) -> Result<Vec<BandwidthRow>> {
        let mut rows = Vec::new();
        for &node in self.nodes {
            // The thread is bound until the guard goes.
            let binding = self.topology.bind_thread_if_real(node);
            if let Err(error) = &binding {
                progress(Step::Without("a thread on the node", error));
            }
            rows.extend(self.measure_node(node, progress, &figure)?);
            drop(binding);
        }
        Ok(rows)
    }

    fn measure_node(
        &self,
        node: NodeId,
        progress: &mut dyn FnMut(Step<'_>),
        figure: impl Fn(&[f32]) -> Option<Rate>,
    ) -> Result<Vec<BandwidthRow>> {
        let memories = self.allocate(node, progress);
        let mut rows = Vec::new();
        for &gpu in self.gpus {
            progress(Step::Doing(&format!("bandwidth: node {node}, GPU {gpu}")));
            let bench = Bench::new(self.driver, gpu, self.bytes)?;
            let mut times: Vec<[Vec<f32>; 4]> = vec![Default::default(); memories.len()];
            for round in 0..self.rounds() {
                for operation in [Op::ToHost, Op::ToGpu, Op::Write, Op::Read] {
                    for turn in 0..memories.len() {
                        let which = (turn + round as usize) % memories.len();
                        let (_, memory) = &memories[which];
                        let is_kernel = matches!(operation, Op::Read | Op::Write);
                        if is_kernel && !memory.reached_by_kernels_of(gpu)? {
                            continue;
                        }
                        let ms = bench.time(operation, memory)?;
                        if round >= WARM_UP {
                            times[which][operation as usize].push(ms);
                        }
                    }
                }
                progress(Step::Done);
            }
            for ((memory, _), times) in memories.iter().zip(times) {
                let figures = times.map(|ms| figure(&ms));
                rows.push(BandwidthRow::new((node.0, gpu, *memory), figures));
            }
        }
        Ok(rows)
    }

    /// Returns one memory of each kind that this machine can do.
    fn allocate(
        &self,
        node: NodeId,
        progress: &mut dyn FnMut(Step<'_>),
    ) -> Vec<(Kind, HostMemory)> {
        let mut memories = Vec::new();
        for kind in Kind::ALL {
            let doing = format!("allocating on node {node}: {}", kind.name());
            progress(Step::Doing(&doing));
            let how = (node, kind, PoolApi::Driver);
            match HostMemory::allocate(self.driver, how, self.gpus, self.bytes) {
                Ok(memory) => memories.push((kind, memory)),
                Err(error) => progress(Step::Without(kind.name(), &error)),
            }
        }
        memories
    }
}

/// The least of the library's medians over cudaHostAlloc's, among all pairs and operations.
fn worst_ratio(rows: &[BandwidthRow]) -> Option<f64> {
    let compared = rows.iter().filter(|row| row.is_compared());
    let pairs =
        compared.filter_map(|row| Some(row.rates().into_iter().zip(row.beside(rows)?.rates())));
    let ratios = pairs
        .flatten()
        .filter_map(|(own, base)| Some(own?.median / base?.median));
    // Two medians of zero have none.
    ratios
        .filter(|ratio| !ratio.is_nan())
        .min_by(f64::total_cmp)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    ToGpu,
    ToHost,
    Read,
    Write,
}

/// One GPU's side: its memory, stream, events and kernels.
struct Bench<'a> {
    driver: &'a Driver,
    gpu: i32,
    bytes: u64,
    expected: u64,
    memory: DeviceMemory,
    report: DeviceMemory,
    back: PinnedHost,
    stream: Stream,
    start: Event,
    end: Event,
    kernels: Kernels,
    dims: LaunchDims,
}

impl<'a> Bench<'a> {
    fn new(driver: &'a Driver, gpu: i32, bytes: u64) -> Result<Self> {
        let multiprocessors = driver
            .device_attribute(gpu, DeviceAttribute::MULTIPROCESSOR_COUNT)?
            .max(1);
        let bench = Self {
            driver,
            gpu,
            bytes,
            expected: (0..bytes / 8).fold(0, |sum, i| sum ^ pattern(SEED, i)),
            memory: DeviceMemory::new(driver, gpu, bytes)?,
            report: DeviceMemory::new(driver, gpu, 8)?,
            back: PinnedHost::new(driver, gpu, 8)?,
            stream: Stream::new(driver, gpu)?,
            start: Event::new(driver, gpu, true)?,
            end: Event::new(driver, gpu, true)?,
            kernels: Kernels::load(driver, gpu)?,
            // Twice as many as can run at once, so that the link has requests in flight to the end.
            dims: LaunchDims {
                blocks: (4 * multiprocessors as u64)
                    .min((bytes / 8).div_ceil(u64::from(THREADS)))
                    .max(1) as u32,
                threads: THREADS,
            },
        };
        bench.launch(bench.kernels.write, bench.memory.device_ptr(), SEED)?;
        bench.stream.synchronize()?;
        Ok(bench)
    }

    /// Milliseconds that one operation between the GPU and `memory` takes, `bytes` long.
    fn time(&self, op: Op, memory: &HostMemory) -> Result<f32> {
        let host = memory.start();
        let copies = memory.copies(self.bytes);
        if op == Op::Read {
            // SAFETY: the report is 8 bytes of this struct's own.
            unsafe {
                self.stream.memset_async(self.report.device_ptr(), 0, 8)?;
            }
        }
        self.start.record(&self.stream)?;
        match op {
            // SAFETY: `host` is one of the memories of `bytes` bytes that this thread measures,
            // nothing else uses them, and the work is waited for below.
            Op::ToGpu => unsafe { self.copy(self.memory.device_ptr(), host, &copies)? },
            // SAFETY: as above.
            Op::ToHost => unsafe { self.copy(host, self.memory.device_ptr(), &copies)? },
            Op::Read => self.launch(self.kernels.read, host, self.report.device_ptr().0)?,
            Op::Write => self.launch(self.kernels.write, host, SEED)?,
        }
        self.end.record(&self.stream)?;
        self.end.synchronize()?;
        if op == Op::Read {
            self.check_sum()?;
        }
        self.end.elapsed_ms_since(&self.start)
    }

    /// Copies pieces, an offset and a length each, of the one memory to the same of the other.
    ///
    /// # Safety
    /// Those of [`Stream::copy_async`], for all pieces.
    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, pieces: &[(u64, u64)]) -> Result<()> {
        for &(at, bytes) in pieces {
            let (dst, src) = (dst.add(at), src.add(at));
            // SAFETY: the caller's promise.
            unsafe { self.stream.copy_async(dst, src, bytes)? };
        }
        Ok(())
    }

    /// Launches `function(host, words, last)`.
    fn launch(&self, function: FunctionHandle, host: DevicePtr, last: u64) -> Result<()> {
        let args = [host.0, self.bytes / 8, last];
        // SAFETY: both kernels take three 64-bit arguments and stay inside the `bytes` bytes at
        // `host`, which this GPU was granted or can reach; the report outlives the stream's work.
        unsafe {
            self.driver
                .launch_kernel(function, self.dims, &args, self.stream.handle())
        }
    }

    /// Whether the kernel has really read every word: the sum tells.
    fn check_sum(&self) -> Result<()> {
        self.stream.copy(&self.back, 0, &self.report, 0, 8)?;
        let found = self.back.cpu().get(0)?;
        if found == self.expected {
            return Ok(());
        }
        Err(Error::WrongBytes {
            by: Location::Device(self.gpu),
            offset: 0,
            expected: self.expected,
            found,
        })
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        // A failed measurement may have left work on the stream, which uses the memory and the kernels; its error was
        // reported.
        let _ = self.stream.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_no_worst_ratio() {
        let row = |kind, medians: [f64; 4]| {
            let (min, max) = (0.0, f64::INFINITY);
            let rates = medians.map(|median| Some(Rate { median, min, max }));
            BandwidthRow::new((0, 0, kind), rates)
        };
        let base = row(Kind::HostAlloc, [2.0, 2.0, 0.0, 2.0]);
        for nan in [f64::NAN, -f64::NAN] {
            let own = row(Kind::Vmm, [1.0, nan, 0.0, 3.0]);
            assert_eq!(worst_ratio(&[base.clone(), own]), Some(0.5));
        }
        let none = row(Kind::Vmm, [f64::NAN; 4]);
        assert_eq!(worst_ratio(&[base, none]), None);
    }
    #[test]
    fn any_number_of_repeats_is_counted() {
        let driver = Driver::simulated(egmem_core::Machine::gh200()).unwrap();
        let rates = Rates {
            driver: &driver,
            topology: &Topology::discover(&driver).unwrap(),
            nodes: &[NodeId(0)],
            gpus: &[0],
            bytes: 8,
            repeats: u32::MAX,
        };
        assert_eq!(rates.steps(), u64::from(u32::MAX));
    }
}
