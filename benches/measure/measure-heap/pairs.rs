//! Pairs of allocation and free per second, by one thread and by many.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use egmem::driver::{DevicePtr, Driver, Location, PoolApi, PoolAttribute, PoolHandle};
use egmem::heap::NotFreed;
use egmem::size::Bytes;
use egmem::{Heap, Pool, Result, Stream};
use egmem_chart::{Chart, Line};
use serde::Serialize;

use crate::args::Args;
use crate::report::{About, Results};
use crate::{Place, layout, median, plot};

/// The bytes reserved for blocks from the start: enough for the largest cache that a thread may keep.
const RESERVE: u64 = 2 << 30;
/// The approximate duration of a batch between two readings of the clock.
const BATCH: Duration = Duration::from_micros(20);

/// The contestants' names, in the order of tables; the heap first.
const NAMES: [&str; 6] = [
    "egmem heap",
    "HOST_NUMA pool",
    "cudaMallocAsync",
    "cudaHostAlloc",
    "malloc",
    "egmem heap, no reserve",
];

/// Those that free after the work of a stream; the heap's first.
const ON_STREAMS: [&str; 4] = [
    "egmem on_stream",
    "egmem free_after",
    "HOST_NUMA pool",
    "cudaMallocAsync",
];

/// Allocates and frees so many blocks, on one thread.
type Work<'a> = Box<dyn FnMut(u32) -> Result<()> + 'a>;

/// An allocator; each thread makes its own work.
enum Contestant {
    Heap(Heap),
    OnStream(Heap, i32),
    FreeAfter(Heap, i32),
    HostPool(Driver, Pool, i32),
    DevicePool(Driver, DefaultPool),
    HostAlloc(Driver, i32),
    Malloc,
}

impl Contestant {
    fn all(place: &Place) -> Result<Vec<Self>> {
        let Place { driver, gpu, .. } = place;
        let gpu = *gpu;
        let reserve = if driver.is_simulated() {
            64 << 20
        } else {
            RESERVE
        };
        let heap = Heap::on(place.node)
            .access_by([Location::Device(gpu)])
            .limit(2 * reserve)
            .reserve(reserve)
            .build(driver)?;
        let fresh = Heap::on(place.node)
            .access_by([Location::Device(gpu)])
            .limit(2 * reserve)
            .build(driver)?;
        let pool = Pool::options(place.node)
            .release_threshold(u64::MAX)
            .access_by([Location::Device(gpu)])
            .create(driver)?;
        Ok(vec![
            Self::Heap(heap),
            Self::HostPool(driver.clone(), pool, gpu),
            Self::DevicePool(driver.clone(), DefaultPool::keeping(driver, gpu)?),
            Self::HostAlloc(driver.clone(), gpu),
            Self::Malloc,
            Self::Heap(fresh),
        ])
    }

    /// Those of [`ON_STREAMS`].
    fn on_streams(place: &Place) -> Result<Vec<Self>> {
        let mut all = Self::all(place)?.into_iter();
        let (Some(Self::Heap(heap)), Some(host), Some(device)) =
            (all.next(), all.next(), all.next())
        else {
            return Ok(Vec::new());
        };
        let gpu = place.gpu;
        let ours = [
            Self::OnStream(heap.clone(), gpu),
            Self::FreeAfter(heap, gpu),
        ];
        Ok(ours.into_iter().chain([host, device]).collect())
    }

    fn start(&self, bytes: u64) -> Result<Work<'_>> {
        Ok(match self {
            Self::OnStream(heap, gpu) => {
                let on_stream = heap.on_stream(&Stream::new(heap.driver(), *gpu)?)?;
                let layout = layout(bytes)?;
                Box::new(move |pairs| {
                    for _ in 0..pairs {
                        drop(black_box(on_stream.allocate(layout)?));
                    }
                    Ok(())
                })
            }
            Self::FreeAfter(heap, gpu) => {
                let (stream, layout) = (Stream::new(heap.driver(), *gpu)?, layout(bytes)?);
                Box::new(move |pairs| {
                    for _ in 0..pairs {
                        let block = black_box(heap.allocate(layout)?);
                        block.free_after(&stream).map_err(NotFreed::forget)?;
                    }
                    // As a program does from time to time: otherwise the heap would grow to its limit first.
                    heap.collect().map(drop)
                })
            }
            Self::Heap(heap) => {
                let layout = layout(bytes)?;
                Box::new(move |pairs| {
                    for _ in 0..pairs {
                        drop(black_box(heap.allocate(layout)?));
                    }
                    Ok(())
                })
            }
            Self::HostPool(driver, pool, gpu) => {
                let (stream, handle) = (Stream::new(driver, *gpu)?, pool.handle());
                let pools = driver.pools(PoolApi::Driver)?;
                Box::new(move |pairs| {
                    for _ in 0..pairs {
                        // SAFETY: pool and stream live, and nobody uses the block.
                        unsafe {
                            let ptr =
                                pools.alloc_from_pool_async(handle, bytes, stream.handle())?;
                            pools.free_async(black_box(ptr), stream.handle())?;
                        }
                    }
                    Ok(())
                })
            }
            Self::DevicePool(driver, default) => {
                let stream = Stream::new(driver, default.gpu)?;
                let pools = driver.pools(PoolApi::Driver)?;
                Box::new(move |pairs| {
                    for _ in 0..pairs {
                        // SAFETY: the stream lives, and nobody uses the block.
                        unsafe {
                            let ptr = pools.alloc_async(bytes, stream.handle())?;
                            pools.free_async(black_box(ptr), stream.handle())?;
                        }
                    }
                    Ok(())
                })
            }
            Self::HostAlloc(driver, gpu) => Box::new(move |pairs| {
                for _ in 0..pairs {
                    let ptr: DevicePtr = driver.mem_host_alloc(*gpu, bytes)?;
                    // SAFETY: just allocated, and nobody uses it.
                    unsafe { driver.mem_free_host(*gpu, black_box(ptr))? };
                }
                Ok(())
            }),
            Self::Malloc => Box::new(move |pairs| {
                for _ in 0..pairs {
                    // SAFETY: free takes every pointer that malloc returned, null too.
                    unsafe { libc::free(black_box(libc::malloc(bytes as usize))) };
                }
                Ok(())
            }),
        })
    }
}

/// The device's default pool, which keeps freed memory until this is dropped.
struct DefaultPool {
    driver: Driver,
    gpu: i32,
    pool: PoolHandle,
    before: u64,
}

impl DefaultPool {
    fn keeping(driver: &Driver, gpu: i32) -> Result<Self> {
        let pools = driver.pools(PoolApi::Driver)?;
        let pool = pools.device_default_pool(gpu)?;
        let kept = PoolAttribute::ReleaseThreshold;
        // SAFETY: the default pool lives as long as its device.
        let before = unsafe { pools.pool_get_attribute(pool, kept)? };
        // SAFETY: as above.
        unsafe { pools.pool_set_attribute(pool, kept, u64::MAX)? };
        let driver = driver.clone();
        Ok(Self {
            driver,
            gpu,
            pool,
            before,
        })
    }
}

impl Drop for DefaultPool {
    fn drop(&mut self) {
        let result = self.driver.pools(PoolApi::Driver).and_then(|pools| {
            // SAFETY: the default pool lives as long as its device.
            unsafe {
                pools.pool_set_attribute(self.pool, PoolAttribute::ReleaseThreshold, self.before)
            }
        });
        if let Err(error) = result {
            eprintln!("measure-heap: the default pool keeps its memory: {error}");
        }
    }
}

/// Pairs per second of one contestant with so many threads.
#[derive(Debug, Serialize)]
pub struct Row {
    pub bytes: u64,
    pub threads: u32,
    pub contestant: &'static str,
    /// The median of the rounds, all threads together.
    pub pairs_per_second: f64,
    /// The least and the most of the rounds.
    pub least: f64,
    pub most: f64,
    /// Of one thread's pairs times the threads.
    pub of_linear: f64,
    /// How many times as many the heap does.
    pub heap_by_this: f64,
}

/// All of them.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Pairs {
    #[serde(skip)]
    names: &'static [&'static str],
    rows: Vec<Row>,
}

/// Measures all sizes, threads and contestants, the contestants in turns.
///
/// # Errors
/// The driver's.
pub fn measure(place: &Place, args: &Args) -> Result<Pairs> {
    of(&Contestant::all(place)?, &NAMES, place, args)
}

/// Measures pairs whose frees come after a stream's work, each thread with a stream of its own.
///
/// # Errors
/// The driver's.
pub fn on_streams(place: &Place, args: &Args) -> Result<Pairs> {
    of(&Contestant::on_streams(place)?, &ON_STREAMS, place, args)
}

fn of(
    contestants: &[Contestant],
    names: &'static [&'static str],
    place: &Place,
    args: &Args,
) -> Result<Pairs> {
    let mut rows: Vec<Row> = Vec::new();
    for &Bytes(bytes) in &args.size {
        for &threads in &args.threads {
            let mut rates = vec![Vec::new(); contestants.len()];
            for round in 0..args.rounds as usize {
                // No contestant always runs after the same one.
                for turn in 0..contestants.len() {
                    let which = (round + turn) % contestants.len();
                    rates[which].push(turn_of(place, &contestants[which], bytes, threads, args)?);
                }
            }
            let heap = median(&rates[0]);
            for (&contestant, rates) in names.iter().zip(rates) {
                let rate = median(&rates);
                let alone = rows
                    .iter()
                    .find(|row| (row.bytes, row.threads, row.contestant) == (bytes, 1, contestant))
                    .map_or(rate / f64::from(threads), |row| row.pairs_per_second);
                rows.push(Row {
                    bytes,
                    threads,
                    contestant,
                    pairs_per_second: rate,
                    least: rates.iter().copied().fold(f64::INFINITY, f64::min),
                    most: rates.iter().copied().fold(0.0, f64::max),
                    of_linear: rate / (alone * f64::from(threads)),
                    heap_by_this: heap / rate,
                });
            }
        }
    }
    Ok(Pairs { names, rows })
}

/// One contestant's window: pairs per second, all threads together.
fn turn_of(
    place: &Place,
    contestant: &Contestant,
    bytes: u64,
    threads: u32,
    args: &Args,
) -> Result<f64> {
    let start = Barrier::new(threads as usize);
    let rate = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    // If this thread fails, the others must not wait for it.
                    let prepared = prepare(place, contestant, bytes);
                    start.wait();
                    let (_bound, mut work, batch) = prepared?;
                    let (began, mut pairs) = (Instant::now(), 0_u64);
                    loop {
                        work(batch)?;
                        pairs += u64::from(batch);
                        let passed = began.elapsed();
                        if passed >= args.window() {
                            return Ok(pairs as f64 / passed.as_secs_f64());
                        }
                    }
                })
            })
            .collect();
        running.into_iter().map(join).sum()
    });
    // The next contestant must not wait for work that is still on this one's streams.
    place.driver.ctx_synchronize(place.gpu)?;
    rate
}

type Prepared<'a> = (Option<egmem::topology::ThreadBinding>, Work<'a>, u32);

/// Binds the thread to the node, does its work once, and returns the pairs between two readings of the clock.
fn prepare<'a>(place: &Place, contestant: &'a Contestant, bytes: u64) -> Result<Prepared<'a>> {
    let bound = place.topology.bind_thread_if_real(place.node)?;
    let mut work = contestant.start(bytes)?;
    work(2)?;
    let began = Instant::now();
    work(4)?;
    let pair = began.elapsed().as_nanos().max(4) / 4;
    let batch = (BATCH.as_nanos() / pair).clamp(1, 1000);
    Ok((bound, work, batch as u32))
}

fn join<R>(thread: std::thread::ScopedJoinHandle<'_, R>) -> R {
    match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

impl Pairs {
    fn find(&self, bytes: u64, threads: u32, contestant: &str) -> Option<&Row> {
        self.rows
            .iter()
            .find(|row| (row.bytes, row.threads, row.contestant) == (bytes, threads, contestant))
    }
}

impl Results for Pairs {
    fn title(&self) -> String {
        "allocation and free, pairs per second, all threads together".into()
    }

    fn header(&self) -> Vec<&'static str> {
        vec![
            "contestant",
            "bytes",
            "threads",
            "million pairs/s",
            "least",
            "most",
            "of linear",
            "heap by this",
        ]
    }

    fn facts(&self) -> usize {
        3
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let line = |row: &Row| {
            vec![
                row.contestant.to_string(),
                row.bytes.to_string(),
                row.threads.to_string(),
                format!("{:.5}", row.pairs_per_second / 1e6),
                format!("{:.5}", row.least / 1e6),
                format!("{:.5}", row.most / 1e6),
                format!("{:.3}", row.of_linear),
                format!("{:.2}", row.heap_by_this),
            ]
        };
        self.rows.iter().map(line).collect()
    }

    fn verdicts(&self) -> Vec<String> {
        let mut verdicts = Vec::new();
        if self.names != NAMES {
            return verdicts;
        }
        for (threads, target) in [(1, 20.0), (16, 500.0)] {
            if let Some(pool) = self.find(64 << 10, threads, NAMES[1]) {
                verdicts.push(format!(
                    "64 KiB, {threads} threads: {:.0} times the HOST_NUMA pool (target {target})",
                    pool.heap_by_this
                ));
            }
        }
        if let Some(heap) = self.find(64 << 10, 16, NAMES[0]) {
            verdicts.push(format!(
                "64 KiB, 16 threads: {:.2} of linear (target 0.8); malloc {:.2}",
                heap.of_linear,
                self.find(64 << 10, 16, NAMES[4])
                    .map_or(0.0, |row| row.of_linear)
            ));
        }
        verdicts
    }

    fn draw(&self, about: &About) -> Option<String> {
        let mut sizes: Vec<u64> = self.rows.iter().map(|row| row.bytes).collect();
        sizes.dedup();
        let line = |bytes: u64, name: &str| Line {
            name: name.to_owned(),
            points: self
                .rows
                .iter()
                .filter(|row| (row.bytes, row.contestant) == (bytes, name))
                .map(|row| (f64::from(row.threads), row.pairs_per_second))
                .collect(),
        };
        let chart = |&bytes: &u64| {
            Chart::measured(
                format!("blocks of {}", Bytes(bytes)),
                ("threads", true),
                ("pairs per second", true),
                self.names.iter().map(|name| line(bytes, name)).collect(),
            )
        };
        let charts: Vec<_> = sizes.iter().map(chart).collect();
        Some(plot::draw(
            "Allocation and free, all threads together",
            &about.first_line(),
            &charts,
        ))
    }
}
