//! A kernel's output has no known size: the host maps memory while the kernel runs.
use std::error::Error;

use egmem::driver::{LaunchDims, Location};
use egmem::shapes::{Appender, device};
use egmem::{Driver, Machine, Stream, Topology};

type Record = [u64; 2]; // an item's number and its complement
const ITEMS: u64 = 4_000_000;
const SHARE: u64 = 100; // of 256 items; the kernel finds out which
const PATIENCE: u64 = 10_000_000_000; // in nanoseconds, for a thread that waits for memory

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let stream = Stream::new(&driver, 0)?;
    // Addresses for a record of each item, and memory for the first 100,000.
    let options = Appender::<Record>::on(node)
        .max_len(ITEMS as usize)
        .ahead(100_000);
    let mut output = options.cursor_on(Location::Device(0)).create(&driver)?;
    let before = output.records().capacity();
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, so the CPU appends");
        let records: Vec<Record> = (0..ITEMS * SHARE / 256).map(|item| [item, !item]).collect();
        output.append(&records)?;
    } else {
        let args = [output.device_ptr().0, ITEMS, SHARE, 0, PATIENCE];
        let dims = LaunchDims {
            blocks: 256,
            threads: 256,
        };
        // SAFETY: the text is PTX; the arguments are the kernel's. `pump_while` keeps the memory until it has ended.
        unsafe {
            let module = driver.module_load(0, device::PTX)?;
            let kernel = driver.module_function(0, module, device::APPEND_ITEMS)?;
            driver.launch_kernel(kernel, dims, &args, stream.handle())?;
            output.pump_while(&stream)?; // maps what the kernel asks for
            driver.module_unload(0, module)?;
        }
        assert_eq!(output.collect()?.missed, 0);
    }
    let records = output.into_growable();
    println!(
        "{} records; {before} had memory at first, {} at the end",
        records.len(),
        records.capacity()
    );
    assert!(records.len() > before);
    for index in 0..records.len() {
        let [item, other] = records.get(index)?;
        assert_eq!((item < ITEMS, other), (true, !item), "record {index}");
    }
    Ok(())
}
