//! A vector grows in place: no element is copied and no address changes.
use std::error::Error;

use egmem::shapes::Growable;
use egmem::{Driver, Machine, Topology};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    // Addresses for a GiB, and no memory yet.
    let options = Growable::<u32>::on(node).max_len(1 << 28).label("tokens");
    let mut tokens = options.create(&driver)?;
    let start = tokens.device_ptr();
    tokens.extend_from_slice(&[7; 1000])?;
    let before = tokens.mapped_bytes();
    tokens.extend_from_slice(&vec![8; 4 << 20])?; // adds memory, copies nothing
    println!(
        "{} bytes mapped, then {}; both at {:#x}",
        before,
        tokens.mapped_bytes(),
        start.0
    );
    assert_eq!((tokens.device_ptr(), tokens.get(999)?), (start, 7));
    assert_eq!(tokens.get(1000)?, 8);

    tokens.truncate(10);
    let given = tokens.shrink_to_fit()?; // gives back the memory behind, in place
    println!("{given} bytes given back");
    assert_eq!((tokens.device_ptr(), tokens.get(9)?), (start, 7));
    Ok(())
}
