//! A ring between two processes, beside one within a process; and how soon the end of a process is seen.
//!
//! One record there and back: a thread or a kernel pushes a record and waits until it sees that the other side has released
//! it. The consumer is a thread or a kernel, in this process or in another one. On one GPU the kernels of two processes take
//! turns, by the GPU's time slices; with two GPUs the consumer's kernel runs on the second.

use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use egmem::driver::Location;
use egmem::pinned::{DeviceMemory, PinnedHost};
use egmem::shapes::ring::GpuProducer;
use egmem::shapes::{Consumer, Producer, Ring, device};
use egmem::share::{self, Channel, ImportOptions, Listener, Peers};
use egmem::{Driver, Error, Memory, Result, Topology};

use crate::gpu::{Kernels, median_and_p99};

type Record = [u64; 2];

const CAPACITY: usize = 4096;
const TRIPS: u64 = 20_000;
/// Where kernels take turns, a trip takes milliseconds.
const FEW_TRIPS: u64 = 300;
const KILLS: usize = 8;
/// How long a kernel waits before it gives up, in nanoseconds.
const PATIENCE: u64 = 10_000_000_000;

/// The child's variables: where the parent listens, and which GPU its kernel runs on, if any.
const AT: &str = "EGMEM_BENCH_RING_AT";
const GPU: &str = "EGMEM_BENCH_RING_GPU";

/// Returns the kernels, each launched once with nothing to do: a first launch waits for the kernels that run.
fn kernels_on(driver: &Driver, gpu: i32) -> Result<Kernels> {
    let kernels = Kernels::load_on(driver, gpu, device::PTX)?;
    let no_ring = PinnedHost::new(driver, gpu, 4096)?;
    no_ring.cpu().fill(0, 4096, 0)?;
    for name in [device::RING_POP_RECORDS, device::RING_ROUND_TRIPS] {
        // SAFETY: they read less than the page, which lives until they were waited for.
        unsafe { kernels.start(name, (1, 32), &[no_ring.device_ptr().0, 0, 0, 0])? };
        kernels.stream.finish()?;
    }
    Ok(kernels)
}

/// Who has a side.
#[derive(Clone, Copy, PartialEq)]
enum Who {
    Cpu,
    Gpu(i32),
}

impl Who {
    const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "CPU",
            Self::Gpu(_) => "GPU",
        }
    }
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// The process that has the consumer's side, if this is one.
pub fn child(driver: &Driver) -> Option<ExitCode> {
    let at = std::env::var(AT).ok()?;
    let gpu = std::env::var(GPU).ok().and_then(|gpu| gpu.parse().ok());
    Some(match consume_for(driver, Path::new(&at), gpu) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the other process: {error}");
            ExitCode::FAILURE
        }
    })
}

fn consume_for(driver: &Driver, at: &Path, gpu: Option<i32>) -> share::Result<()> {
    let mut channel = Channel::connect(at, Peers::same_user())?;
    let trips: u64 = channel.receive_text(20)?.parse().unwrap_or(TRIPS);
    let options = ImportOptions::new();
    let consumer = Consumer::<Record>::receive(driver, &mut channel, options)?;
    let Some(gpu) = gpu else {
        channel.send_text("ready")?;
        return Ok(release_all(consumer, &AtomicBool::new(false))?);
    };
    let kernels = kernels_on(driver, gpu)?;
    let consumer = consumer.into_gpu();
    let to = DeviceMemory::new(driver, gpu, trips * 16)?;
    let args = [consumer.device_ptr().0, to.device_ptr().0, trips, PATIENCE];
    // SAFETY: the ring and the memory live until the stream was synchronised.
    unsafe {
        kernels.start(device::RING_POP_RECORDS, (1, 32), &args)?;
        channel.send_text("ready")?;
        kernels.stream.finish()?;
    }
    Ok(())
}

/// Releases records until the producer is gone, or until it is told.
fn release_all(mut consumer: Consumer<Record>, is_over: &AtomicBool) -> Result<()> {
    while !consumer.is_alone() && !is_over.load(Relaxed) {
        for _ in 0..1000 {
            consumer.try_pop()?;
        }
    }
    Ok(())
}

/// Another process with the consumer's side.
struct Other(Child, Channel);

impl Other {
    fn start(folder: &Path, who: Who, driver: &Driver) -> share::Result<Self> {
        let socket = folder.join("socket");
        let mut listener = Listener::bind(&socket, Peers::same_user())?;
        listener.set_timeout(Duration::from_secs(60))?;
        let program = std::env::current_exe();
        let program = program.map_err(|error| Error::failed("the program", error.to_string()))?;
        let mut command = Command::new(program);
        command.env(AT, &socket).stdin(Stdio::null());
        if let Who::Gpu(gpu) = who {
            command.env(GPU, gpu.to_string());
        }
        if !driver.is_simulated() {
            command.arg("--cuda");
        }
        let child = command.spawn();
        let child = child.map_err(|error| Error::failed("the other process", error.to_string()))?;
        let channel = listener.accept()?;
        Ok(Self(child, channel))
    }

    /// Gives it the side, and waits until it has begun.
    fn hand(&mut self, producer: &mut Producer<Record>, trips: u64) -> share::Result<()> {
        self.1.send_text(&trips.to_string())?;
        producer.share_consumer(&mut self.1)?;
        self.1.receive_text(20)?;
        Ok(())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Pushes from the CPU; returns the microseconds of each trip.
fn trips_of_cpu(producer: &mut Producer<Record>, trips: u64) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(trips as usize);
    let end = later();
    for number in 0..trips {
        let start = Instant::now();
        producer.try_push([number, !number])?;
        while producer.room()? < CAPACITY {
            if Instant::now() > end {
                return Ok(times);
            }
        }
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// Pushes from a kernel; returns the microseconds of each trip, none if it did not end in time.
fn trips_of_gpu(
    kernels: &Kernels,
    producer: &GpuProducer<Record>,
    (times, copy): (&DeviceMemory, &PinnedHost),
    trips: u64,
) -> Result<Vec<f64>> {
    kernels.report.cpu().fill(0, 64, 0)?;
    let args = [
        producer.device_ptr().0,
        trips,
        PATIENCE,
        times.device_ptr().0,
    ];
    // SAFETY: the ring and `times` live until the stream was synchronised.
    unsafe { kernels.start(device::RING_ROUND_TRIPS, (1, 1), &args)? };
    kernels.stream.finish()?;
    let mut clock = [0_u64; 2];
    kernels.report.cpu().read_at(0, &mut clock)?;
    if clock[1] == 0 {
        return Ok(Vec::new());
    }
    let mut cycles = vec![0_u64; trips as usize];
    kernels.stream.copy(copy, 0, times, 0, trips * 8)?;
    copy.cpu().read_at(0, &mut cycles)?;
    let each = clock[0] as f64 / clock[1] as f64 / 1e3;
    Ok(cycles.iter().map(|&n| n as f64 * each).collect())
}

/// One measurement: who pushes, who pops, and whether in another process.
struct Way<'a> {
    driver: &'a Driver,
    /// For each GPU that is used.
    kernels: &'a [Kernels],
    folder: &'a Path,
    from: Who,
    to: Who,
    trips: u64,
}

impl Way<'_> {
    fn ring(&self, at: Location) -> Result<Ring<Record>> {
        Ring::on(at)
            .records(CAPACITY)
            .shareable()
            .create(self.driver)
    }

    /// Prepares everything, calls `begin`, and pushes.
    fn push(
        &self,
        mut producer: Producer<Record>,
        begin: impl FnOnce(&mut Producer<Record>) -> share::Result<()>,
    ) -> share::Result<Vec<f64>> {
        let Who::Gpu(gpu) = self.from else {
            begin(&mut producer)?;
            return Ok(trips_of_cpu(&mut producer, self.trips)?);
        };
        // Making memory may wait for kernels that run.
        let times = DeviceMemory::new(self.driver, gpu, self.trips * 8)?;
        let copy = PinnedHost::new(self.driver, gpu, self.trips * 8)?;
        begin(&mut producer)?;
        let (kernels, producer) = (&self.kernels[0], producer.into_gpu());
        Ok(trips_of_gpu(
            kernels,
            &producer,
            (&times, &copy),
            self.trips,
        )?)
    }

    fn within_a_process(&self, at: Location) -> share::Result<Vec<f64>> {
        let Ring { producer, consumer } = self.ring(at)?;
        let Who::Gpu(gpu) = self.to else {
            let is_over = AtomicBool::new(false);
            return thread::scope(|scope| {
                scope.spawn(|| release_all(consumer, &is_over));
                let times = self.push(producer, |_| Ok(()));
                is_over.store(true, Relaxed);
                times
            });
        };
        // With a stream of its own.
        let kernels = kernels_on(self.driver, gpu)?;
        let consumer = consumer.into_gpu();
        let to = DeviceMemory::new(self.driver, gpu, self.trips * 16)?;
        let args = [
            consumer.device_ptr().0,
            to.device_ptr().0,
            self.trips,
            PATIENCE,
        ];
        // SAFETY: the ring and the memory live until the stream was synchronised.
        let begin =
            |_: &mut _| unsafe { Ok(kernels.start(device::RING_POP_RECORDS, (1, 32), &args)?) };
        let times = self.push(producer, begin);
        kernels.stream.finish()?;
        times
    }

    fn between_processes(&self, at: Location) -> share::Result<Vec<f64>> {
        let Ring { producer, .. } = self.ring(at)?;
        let mut other = Other::start(self.folder, self.to, self.driver)?;
        self.push(producer, |producer| other.hand(producer, self.trips))
    }
}

fn shown(times: Vec<f64>) -> (String, f64) {
    if times.is_empty() {
        return ("none in time".into(), f64::NAN);
    }
    let (p50, p99) = median_and_p99(times);
    (format!("{p50:.2} / {p99:.2}"), p50)
}

/// Kills the other process; returns how long after it a waiting producer learned of it, in microseconds.
fn time_to_notice(driver: &Driver, folder: &Path, who: Who) -> share::Result<f64> {
    let node = Topology::discover(driver)?.gpu(0)?.host_node()?;
    let options = Ring::<Record>::on(node).records(1).shareable();
    let Ring { mut producer, .. } = options.create(driver)?;
    let mut other = Other::start(folder, who, driver)?;
    // A kernel that waits for records that never come.
    other.hand(&mut producer, 1 << 20)?;
    let (is_full, end) = (AtomicBool::new(false), later());
    let seen = thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            is_full.store(true, Relaxed);
            while !producer.is_alone() && Instant::now() < end {
                if let Some(batch) = producer.reserve_until(1, end)? {
                    batch.commit()?;
                }
            }
            Ok::<_, Error>(Instant::now())
        });
        while !is_full.load(Relaxed) {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(5));
        let start = Instant::now();
        let _ = other.0.kill();
        let seen = waiting.join().unwrap_or(Ok(end))?;
        Ok::<_, Error>(seen.saturating_duration_since(start))
    })?;
    Ok(seen.as_secs_f64() * 1e6)
}

/// Prints the tables.
pub fn run(driver: &Driver) -> share::Result<()> {
    let folder = std::env::temp_dir().join(format!("egmem-ring-{}", std::process::id()));
    let made = std::fs::create_dir(&folder);
    made.map_err(|error| Error::failed("a folder", error.to_string()))?;
    let result = run_in(driver, &folder);
    let _ = std::fs::remove_dir_all(&folder);
    result
}

fn run_in(driver: &Driver, folder: &Path) -> share::Result<()> {
    let node: Location = Topology::discover(driver)?.gpu(0)?.host_node()?.into();
    let gpus = match driver.is_simulated() {
        true => 0,
        false => driver.device_count()?.min(2),
    };
    let kernels = (0..gpus).map(|gpu| kernels_on(driver, gpu));
    let kernels = kernels.collect::<Result<Vec<_>>>()?;
    let (cpu, from, to) = (Who::Cpu, Who::Gpu(0), Who::Gpu(gpus - 1));
    let mut ways = vec![(cpu, cpu, node)];
    if gpus > 0 {
        ways.extend([(from, cpu, node), (cpu, to, node), (from, to, node)]);
        ways.push((from, to, Location::Device(gpus - 1)));
    }
    println!("one record of 16 bytes there and back, us: p50 / p99, {gpus} GPUs");
    println!(
        "{:<24} {:>22} {:>22} {:>8}",
        "way", "one process", "two processes", "times"
    );
    for (from, to, at) in ways {
        let take_turns = gpus == 1 && from != cpu && to != cpu;
        let way = |trips| Way {
            driver,
            kernels: &kernels,
            folder,
            from,
            to,
            trips,
        };
        let (within, one) = shown(way(TRIPS).within_a_process(at)?);
        let trips = if take_turns { FEW_TRIPS } else { TRIPS };
        let (between, two) = shown(way(trips).between_processes(at)?);
        let name = format!("{} to {}, {at}", from.name(), to.name());
        println!("{name:<24} {within:>22} {between:>22} {:>8.2}", two / one);
    }
    let mut whos = vec![("no kernel", cpu)];
    if gpus > 0 {
        whos.push(("a kernel", to));
    }
    println!("from SIGKILL until a waiting producer knows it, us: {KILLS} kills each");
    for (name, who) in whos {
        let times = (0..KILLS).map(|_| time_to_notice(driver, folder, who));
        let times = times.collect::<share::Result<Vec<_>>>()?;
        let most = times.iter().copied().fold(0.0, f64::max);
        println!(
            "{name:<24} p50 {:.0}, max {most:.0}",
            median_and_p99(times).0
        );
    }
    Ok(())
}
