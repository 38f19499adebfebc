//! A kernel of one process sends records to a kernel of another while both run, on two GPUs if there are two.
use std::{error::Error, ffi::CStr, path::Path, process::Command, time};

use egmem::shapes::{Consumer, Ring, device};
use egmem::share::{Channel, ImportOptions, Listener, Peers};
use egmem::{Buffer, Driver, Machine, Stream, Topology, driver::LaunchDims};

const RECORDS: u64 = 200_000; // each a number and its complement; the ring has room for 131,072
const NS: u64 = 10_000_000_000; // how long a side waits for the other

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200x4()))?;
    let by_cpu = RECORDS * u64::from(driver.is_simulated()); // on the simulator CPUs have both sides
    let seen = Buffer::near(&driver, 0, 16 * RECORDS + 8)?; // what the kernels write
    let end = || time::Instant::now() + time::Duration::from_nanos(NS); // for each record
    let (to, done) = (seen.device_ptr(), seen.device_ptr().add(16 * RECORDS));
    if let [_, socket] = &std::env::args().collect::<Vec<_>>()[..] {
        let channel = &mut Channel::connect(Path::new(socket), Peers::same_user())?;
        let mut consumer = Consumer::<[u64; 2]>::receive(&driver, channel, ImportOptions::new())?;
        for n in 0..by_cpu {
            seen.put(16 * n, consumer.pop_until(end())?.expect("a record"))?;
        }
        let (gpu, ring) = (driver.device_count()? - 1, consumer.into_gpu());
        let args = [ring.device_ptr().0, to.0, RECORDS, NS, done.0];
        run(&driver, gpu, device::RING_POP_RECORDS, &args)?;
        assert!((0..RECORDS).all(|n| seen.get(16 * n) == Ok([n, !n])));
        return Ok(());
    }
    let options = Ring::<[u64; 2]>::on(Topology::discover(&driver)?.gpu(0)?.host_node()?);
    let mut producer = options.shareable().create(&driver)?.producer; // and drops the consumer's side
    let socket = std::env::temp_dir().join(format!("relay-{}", std::process::id()));
    let listener = Listener::bind(&socket, Peers::same_user())?;
    let mut other = Command::new("/proc/self/exe").arg(socket).spawn()?;
    producer.share_consumer(&mut listener.accept()?)?;
    for n in 0..by_cpu {
        assert!(producer.push_until([n, !n], end())?);
    }
    let ring = producer.into_gpu();
    let args = [ring.device_ptr().0, RECORDS, 32, NS, done.0];
    run(&driver, 0, device::RING_PUSH_NUMBERED, &args)?;
    assert!(other.wait()?.success());
    println!("{RECORDS} records reached another process, in order");
    Ok(())
}

fn run(driver: &Driver, gpu: i32, kernel: &CStr, args: &[u64; 5]) -> egmem::Result<()> {
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
        return Ok(());
    }
    let (stream, (blocks, threads)) = (Stream::new(driver, gpu)?, (1, 32));
    let dims = LaunchDims { blocks, threads };
    // SAFETY: the text is PTX; the arguments are the kernel's, and their memory lives until it has ended.
    unsafe {
        let module = driver.module_load(gpu, device::PTX)?;
        let kernel = driver.module_function(gpu, module, kernel)?;
        driver.launch_kernel(kernel, dims, args, stream.handle())?;
        stream.finish()
    }
}
