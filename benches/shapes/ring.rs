//! A ring of records of 16 bytes.
//!
//! Between two threads, records a second, beside `std::sync::mpsc::sync_channel` with the same capacity. With a GPU,
//! from its kernel to the CPU: records a second by the records of a batch, and the time from a push until the kernel
//! sees that the CPU has released the record, which is a way there and back.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use egmem::pinned::{DeviceMemory, PinnedHost};
use egmem::shapes::{Consumer, Producer, Ring, device};
use egmem::{Driver, Error, Memory, Result, Topology};

use crate::gpu::{Kernels, median_and_p99};

type Record = [u64; 2];

const CAPACITY: usize = 4096;
const RECORDS: u64 = 2_000_000;
const TRIPS: u64 = 20_000;
/// How long a kernel waits before it gives up, in nanoseconds.
const PATIENCE: u64 = 20_000_000_000;

fn ring(driver: &Driver) -> Result<Ring<Record>> {
    let node = Topology::discover(driver)?.gpu(0)?.host_node()?;
    Ring::on(node).records(CAPACITY).create(driver)
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// Takes this many records; returns the seconds from the first to the last.
fn take(consumer: &mut Consumer<Record>, count: u64) -> Result<f64> {
    let mut to = vec![[0; 2]; CAPACITY];
    let mut left = count;
    let (end, mut start) = (later(), None);
    while left > 0 {
        let got = consumer.pop_into(&mut to)?;
        if got == 0 {
            std::hint::spin_loop();
            if Instant::now() > end {
                return Err(Error::failed(
                    "the ring",
                    format!("{left} records are missing"),
                ));
            }
            continue;
        }
        start.get_or_insert_with(Instant::now);
        for (found, n) in to[..got].iter().zip(count - left..) {
            assert_eq!(*found, [n, !n]);
        }
        left -= got as u64;
    }
    Ok(start.map_or(0.0, |start| start.elapsed().as_secs_f64()))
}

fn push_all(producer: &mut Producer<Record>, batch: u64) -> Result<()> {
    let mut records = Vec::new();
    for first in (0..RECORDS).step_by(batch as usize) {
        records.clear();
        records.extend((first..RECORDS.min(first + batch)).map(|n| [n, !n]));
        while !producer.try_push_all(&records)? {
            std::hint::spin_loop();
        }
    }
    Ok(())
}

/// Between two threads; returns millions of records a second.
fn by_threads(driver: &Driver, batch: u64) -> Result<f64> {
    let Ring {
        mut producer,
        mut consumer,
    } = ring(driver)?;
    thread::scope(|scope| {
        let pusher = scope.spawn(move || push_all(&mut producer, batch));
        let seconds = take(&mut consumer, RECORDS);
        let pushed = pusher.join();
        pushed.unwrap_or_else(|_| Err(Error::failed("the producer", "it panicked")))?;
        Ok(RECORDS as f64 / seconds? / 1e6)
    })
}

fn by_channel() -> f64 {
    let (sender, receiver) = mpsc::sync_channel::<Record>(CAPACITY);
    thread::scope(|scope| {
        scope.spawn(move || (0..RECORDS).all(|n| sender.send([n, !n]).is_ok()));
        let start = Instant::now();
        for (n, record) in receiver.iter().enumerate() {
            assert_eq!(record, [n as u64, !(n as u64)]);
        }
        RECORDS as f64 / start.elapsed().as_secs_f64() / 1e6
    })
}

/// From a kernel to the CPU; returns millions of records a second.
fn by_gpu(driver: &Driver, kernels: &Kernels, batch: u64) -> Result<f64> {
    let count = (batch * 200_000).min(20_000_000);
    let ring = ring(driver)?;
    let (producer, mut consumer) = (ring.producer.into_gpu(), ring.consumer);
    let threads = batch.clamp(32, 1024) as u32;
    let args = [producer.device_ptr().0, count, batch, PATIENCE];
    // SAFETY: the ring lives until the stream was synchronised.
    let seconds = unsafe {
        kernels.start(device::RING_PUSH_NUMBERED, (1, threads), &args)?;
        let seconds = take(&mut consumer, count);
        kernels.stream.finish()?;
        seconds?
    };
    Ok(count as f64 / seconds / 1e6)
}

/// There and back; returns the microseconds of each.
fn round_trips(driver: &Driver, kernels: &Kernels) -> Result<Vec<f64>> {
    let ring = ring(driver)?;
    let (producer, mut consumer) = (ring.producer.into_gpu(), ring.consumer);
    // In the GPU's memory: a store to the host would make the next push wait for it.
    let times = DeviceMemory::new(driver, 0, TRIPS * 8)?;
    let args = [
        producer.device_ptr().0,
        TRIPS,
        PATIENCE,
        times.device_ptr().0,
    ];
    let end = later();
    // SAFETY: the ring and `times` live until the stream was synchronised.
    unsafe {
        kernels.start(device::RING_ROUND_TRIPS, (1, 1), &args)?;
        let mut taken = Ok(0);
        while let Ok(count) = taken
            && count < TRIPS
            && Instant::now() < end
        {
            let popped = consumer.try_pop();
            taken = popped.map(|record| count + u64::from(record.is_some()));
        }
        kernels.stream.finish()?;
        taken?;
    }
    let mut clock = [0_u64; 2];
    kernels.report.cpu().read_at(0, &mut clock)?;
    let mut cycles = vec![0_u64; TRIPS as usize];
    let copy = PinnedHost::new(driver, 0, TRIPS * 8)?;
    kernels.stream.copy(&copy, 0, &times, 0, TRIPS * 8)?;
    copy.cpu().read_at(0, &mut cycles)?;
    let each = clock[0] as f64 / clock[1] as f64 / 1e3;
    Ok(cycles.iter().map(|&n| n as f64 * each).collect())
}

fn rates(rounds: usize, mut rate: impl FnMut() -> Result<f64>) -> Result<f64> {
    let all = (0..rounds).map(|_| rate()).collect::<Result<Vec<_>>>()?;
    Ok(median_and_p99(all).0)
}

/// Prints the table.
pub fn run(driver: &Driver, rounds: usize) -> Result<()> {
    println!("ring of {CAPACITY} records of 16 bytes");
    println!("{:<32} {:>16}", "way", "M records per s");
    let line = |name: String, rate: f64| println!("{name:<32} {rate:>16.2}");
    line(
        "threads, sync_channel".into(),
        rates(rounds, || Ok(by_channel()))?,
    );
    for batch in [1, 16, 256] {
        let rate = rates(rounds, || by_threads(driver, batch))?;
        line(format!("threads, batches of {batch}"), rate);
    }
    if driver.is_simulated() {
        println!("no GPU: its kernels are not measured");
        return Ok(());
    }
    let kernels = Kernels::load(driver, device::PTX)?;
    for batch in [1, 32, 128, 512, 2048] {
        let rate = rates(rounds, || by_gpu(driver, &kernels, batch))?;
        line(format!("GPU to CPU, batches of {batch}"), rate);
    }
    for round in 0..rounds {
        let (p50, p99) = median_and_p99(round_trips(driver, &kernels)?);
        println!("there and back, round {round}: p50 {p50:.3} us, p99 {p99:.3} us");
    }
    Ok(())
}
