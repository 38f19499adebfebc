//! Output of a kernel that cannot say before how much it will be: memory is mapped while the kernel appends.
//!
//! ```text
//! cargo run --example appender
//! ```
//! On the first GPU's host node. Where there is no GPU, the CPU appends, on a simulated machine.

use std::error::Error;

use egmem::driver::{LaunchDims, Location};
use egmem::shapes::{Appender, device};
use egmem::{Driver, Machine, Stream, Topology};

/// A number and its complement, as the crate's kernel for measurements appends them.
type Record = [u64; 2];
const ITEMS: u64 = 4_000_000;
/// Of 256 items, so many make a record: which ones, the kernel finds out.
const SHARE: u64 = 100;
/// How long a thread of the kernel waits for memory, in nanoseconds.
const PATIENCE: u64 = 10_000_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let stream = Stream::new(&driver, 0)?;
    // Addresses for a record of each item, and memory for the first 100,000. The kernel's threads reserve records by
    // a cursor in the GPU's own memory.
    let options = Appender::<Record>::on(node).max_len(ITEMS as usize);
    let options = options.ahead(100_000).cursor_on(Location::Device(0));
    let mut output = options.create(&driver)?;
    let before = output.records().capacity();
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, so the CPU appends");
        let records: Vec<Record> = (0..ITEMS * SHARE / 256).map(|item| [item, !item]).collect();
        output.append(&records)?;
    } else {
        append_by_gpu(&driver, &mut output, &stream)?;
    }
    let records = output.into_growable();
    println!(
        "{} records; {before} had memory at first, {} at the end, in {} chunks",
        records.len(),
        records.capacity(),
        records.chunks()
    );
    for index in 0..records.len() {
        let [item, other] = records.get(index)?;
        assert_eq!((item < ITEMS, other), (true, !item), "record {index}");
    }
    Ok(())
}

fn append_by_gpu(
    driver: &Driver,
    output: &mut Appender<Record>,
    stream: &Stream,
) -> Result<(), Box<dyn Error>> {
    let all = 0; // where the kernel would note the items whose records came
    let args = [output.device_ptr().0, ITEMS, SHARE, all, PATIENCE];
    let dims = LaunchDims {
        blocks: 256,
        threads: 256,
    };
    // SAFETY: the text is PTX; the arguments are the kernel's. `pump_while` keeps the appender's memory until the
    // kernel has ended, also where it fails, and the module is unloaded after that.
    unsafe {
        let module = driver.module_load(0, device::PTX)?;
        let kernel = driver.module_function(0, module, device::APPEND_ITEMS)?;
        driver.launch_kernel(kernel, dims, &args, stream.handle())?;
        output.pump_while(stream)?; // maps memory ahead of the kernel, until it has ended
        driver.module_unload(0, module)?;
    }
    let came = output.collect()?;
    match (came.missed, came.stopped) {
        (0, _) => Ok(()),
        (missed, Some(why)) => Err(format!("{missed} records had no memory: {why}").into()),
        (missed, None) => Err(format!("{missed} records waited too long for memory").into()),
    }
}
