//! A kernel sends records to the CPU while it runs.
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use egmem::driver::LaunchDims;
use egmem::pinned::PinnedHost;
use egmem::shapes::ring::{Consumer, Producer};
use egmem::shapes::{Ring, device};
use egmem::{Driver, Machine, Memory, Stream, Topology};

type Record = [u64; 2]; // a number and its complement
const RECORDS: u64 = 100_000;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let Ring { producer, consumer } = Ring::<Record>::on(node).records(4096).create(&driver)?;
    let consuming = thread::spawn(move || consume(consumer));
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, so a thread produces");
        produce(producer)?;
    } else {
        let (producer, stream) = (producer.into_gpu(), Stream::new(&driver, 0)?);
        let done = PinnedHost::new(&driver, 0, 8)?;
        let (ring, done) = (producer.device_ptr().0, done.device_ptr().0);
        let args = [ring, RECORDS, 32, PATIENCE.as_nanos() as u64, done];
        let (blocks, threads) = (1, 32);
        let dims = LaunchDims { blocks, threads };
        // SAFETY: the text is PTX; the arguments are the kernel's, and live until `finish` has waited for it.
        unsafe {
            let module = driver.module_load(0, device::PTX)?;
            let kernel = driver.module_function(0, module, device::RING_PUSH_NUMBERED)?;
            driver.launch_kernel(kernel, dims, &args, stream.handle())?;
            stream.finish()?;
            driver.module_unload(0, module)?;
        }
    }
    consuming.join().expect("the consumer does not panic")?;
    println!("{RECORDS} records came, in order, through room for 4096");
    Ok(())
}

fn produce(mut producer: Producer<Record>) -> egmem::Result<()> {
    for n in 0..RECORDS {
        assert!(producer.push_until([n, !n], Instant::now() + PATIENCE)?);
    }
    Ok(())
}

fn consume(mut consumer: Consumer<Record>) -> egmem::Result<()> {
    for n in 0..RECORDS {
        assert_eq!(
            consumer.pop_until(Instant::now() + PATIENCE)?,
            Some([n, !n])
        );
    }
    Ok(())
}
