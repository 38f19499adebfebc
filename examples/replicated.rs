//! A table with a copy on each GPU and each of their host nodes, replaced as a whole while GPUs read it.
//!
//! ```text
//! cargo run --example replicated
//! ```
//! Where there is no GPU, on a simulated machine with eight.

use std::error::Error;
use std::time::Duration;

use egmem::driver::Location;
use egmem::shapes::{Replica, Replicated};
use egmem::{Buffer, Driver, Machine, Stream, Topology};

const ELEMENTS: usize = 1 << 20;
const BYTES: u64 = ELEMENTS as u64 * 4;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let topology = Topology::discover(&driver)?;
    let mut places: Vec<Location> = topology.gpus().iter().map(Location::from).collect();
    for gpu in topology.gpus() {
        let node = gpu.host_node()?.into();
        if !places.contains(&node) {
            places.push(node);
        }
    }
    let table = Replicated::on(places.iter().copied()).create(&driver, &vec![1.0_f32; ELEMENTS])?;
    let copies: Vec<String> = places.iter().map(ToString::to_string).collect();
    println!("{BYTES} bytes on {}", copies.join(", "));

    // Each GPU reads its own copy: a ticket owns the version that its copy was submitted with.
    let mut tickets = Vec::new();
    for gpu in topology.gpus() {
        let stream = Stream::new(&driver, gpu.ordinal)?;
        let seen = Buffer::near(&driver, gpu.ordinal, BYTES)?;
        let own = table.local(gpu)?;
        tickets.push(stream.start_copy((seen, 0), (own, 0), BYTES)?);
    }
    // Meanwhile the next version is published. It goes to the other slot of each copy, so it waits for no reader.
    assert_eq!(table.publish(&vec![2.0; ELEMENTS])?, 2);
    for ticket in tickets {
        let (seen, old): (Buffer, Replica<f32>) = ticket.wait()?;
        assert_eq!((old.epoch(), seen.get::<f32>(BYTES - 4)?), (1, 1.0));
    }
    let new = table.local(Location::Host)?; // the CPU reads a copy on a host node
    assert_eq!((new.epoch(), new.get(ELEMENTS - 1)?), (2, 2.0));
    println!(
        "readers of epoch 1 saw all of it; epoch 2 is on {}",
        new.location()
    );

    // A version with readers is not overwritten: epoch 4 would go where epoch 2 is.
    table.publish(&vec![3.0; ELEMENTS])?;
    let held = table
        .publish(&vec![4.0; ELEMENTS])
        .expect_err("`new` is read");
    println!("not yet: {held}");
    drop(new);
    table.publish_within(&vec![4.0; ELEMENTS], Duration::from_secs(10))?;
    println!("epoch {}", table.epoch());
    Ok(())
}
