//! A vector that grows in place: a GPU reads its elements while the CPU adds more.
//!
//! ```text
//! cargo run --example growable
//! ```
//! On the first GPU's node; where there is no GPU, on a simulated machine.

use std::error::Error;

use egmem::shapes::Growable;
use egmem::{Buffer, Driver, Machine, Stream, Topology};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let stream = Stream::new(&driver, 0)?;

    // Addresses for a billion samples, and no memory yet.
    let mut samples = Growable::<f32>::on(node).max_len(1 << 30).create(&driver)?;
    let start = samples.device_ptr();
    let seen = Buffer::near(&driver, 0, 64 << 20)?;
    let mut copied = (seen, 0);
    for batch in 0..8 {
        samples.extend_from_slice(&vec![batch as f32; 1 << 20])?;
        // The GPU copies the elements; the prefix keeps them mapped meanwhile.
        let prefix = samples.prefix();
        let bytes = prefix.len() as u64 * 4;
        let copy = stream.start_copy((copied.0, 0), (prefix, 0), bytes)?;
        samples.push(-1.0)?;
        samples.truncate(samples.len() - 1);
        copied = (copy.wait()?.0, bytes);
    }
    assert_eq!(samples.device_ptr(), start);
    println!(
        "{} samples in {} chunks, {} bytes; the GPU saw {} bytes, the last sample {}",
        samples.len(),
        samples.chunks(),
        samples.mapped_bytes(),
        copied.1,
        copied.0.get::<f32>(copied.1 - 4)?,
    );

    // Memory goes back from the end.
    samples.truncate(1 << 20);
    println!("given back: {} bytes", samples.shrink_to_fit()?);
    Ok(())
}
