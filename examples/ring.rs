//! Records from a kernel to the CPU while the kernel runs, through a ring.
//!
//! ```text
//! cargo run --example ring
//! ```
//! The kernel writes to the memory of the first GPU's host node, and the CPU polls its own cache. Where there is no
//! GPU, a thread stands in for the kernel, on a simulated machine.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use egmem::driver::LaunchDims;
use egmem::pinned::PinnedHost;
use egmem::shapes::ring::{Consumer, GpuProducer, Producer};
use egmem::shapes::{Ring, device};
use egmem::{Driver, Machine, Memory, Stream, Topology};

/// A number and its complement, as the crate's kernel for measurements pushes them.
type Record = [u64; 2];
const RECORDS: u64 = 500_000;
/// Records that are committed together.
const BATCH: usize = 64;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let options = Ring::<Record>::on(node).records(4096);
    let Ring { producer, consumer } = options.create(&driver)?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, so a thread produces");
        let producing = thread::spawn(move || produce(producer));
        consume(consumer)?;
        producing.join().expect("the thread ends")?;
    } else {
        consume_from_gpu(&driver, &producer.into_gpu(), consumer)?;
    }
    println!("{RECORDS} records came, in order, through room for 4096");
    Ok(())
}

fn produce(mut producer: Producer<Record>) -> egmem::Result<()> {
    for first in (0..RECORDS).step_by(BATCH) {
        let batch: Vec<Record> = (first..RECORDS).take(BATCH).map(|n| [n, !n]).collect();
        let room = producer.reserve_until(batch.len(), Instant::now() + PATIENCE)?;
        let mut room = room.expect("the consumer makes room");
        room.write(0, &batch)?;
        room.commit()?; // all of the batch at once
    }
    Ok(())
}

fn consume(mut consumer: Consumer<Record>) -> egmem::Result<()> {
    let mut next = 0;
    while next < RECORDS {
        let batch = consumer.peek_until(1000, Instant::now() + PATIENCE)?;
        assert!(!batch.is_empty(), "no record came for {PATIENCE:?}");
        for index in 0..batch.len() {
            assert_eq!(batch.get(index)?, [next, !next]);
            next += 1;
        }
        batch.release()?; // the producer gets the room
    }
    Ok(())
}

/// Launches the kernel that pushes numbered records, and takes them.
fn consume_from_gpu(
    driver: &Driver,
    producer: &GpuProducer<Record>,
    consumer: Consumer<Record>,
) -> Result<(), Box<dyn Error>> {
    let stream = Stream::new(driver, 0)?;
    let done = PinnedHost::new(driver, 0, 8)?;
    let (ring, batch, ns) = (producer.device_ptr().0, BATCH as u64, PATIENCE.as_nanos());
    let args = [ring, RECORDS, batch, ns as u64, done.device_ptr().0];
    let dims = LaunchDims {
        blocks: 1,
        threads: BATCH as u32,
    };
    // SAFETY: the text is PTX; the arguments are the kernel's. The module, the ring and `done` live until the kernel
    // has ended, which `finish` waits for, also where the consumer fails. The kernel gives up after PATIENCE without
    // room.
    unsafe {
        let module = driver.module_load(0, device::PTX)?;
        let kernel = driver.module_function(0, module, device::RING_PUSH_NUMBERED)?;
        driver.launch_kernel(kernel, dims, &args, stream.handle())?;
        let consumed = thread::scope(|scope| scope.spawn(|| consume(consumer)).join());
        stream.finish()?;
        driver.module_unload(0, module)?;
        consumed.expect("records came in order")?;
    }
    assert_eq!(done.cpu().get::<u64>(0)?, RECORDS);
    Ok(())
}
