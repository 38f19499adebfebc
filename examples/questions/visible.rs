//! When the CPU sees what a GPU wrote, and a GPU what the CPU wrote.
use std::error::Error;
use std::sync::Arc;

use egmem::proof::Prover;
use egmem::{Buffer, Driver, Event, Machine, Stream};

const BYTES: u64 = 4 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let memory = Arc::new(Buffer::near(&driver, 0, BYTES)?);
    let (stream, event) = (Stream::new(&driver, 0)?, Event::new(&driver, 0, false)?);

    // GPU to CPU: after a wait that has succeeded, for the stream, an event or a ticket.
    for byte in 1..=100 {
        let ticket = stream.start_fill((Arc::clone(&memory), 0), BYTES, byte)?;
        event.record(&stream)?;
        event.synchronize()?;
        assert_eq!(memory.get::<u8>(BYTES - 1)?, byte);
        ticket.wait()?;
    }
    println!("the CPU saw each of 100 fills after their event");

    // CPU to GPU: what was written before the call that submits the work.
    let gpu = Prover::new(&driver, 0)?;
    for word in 1..=100_u64 {
        memory.put(BYTES - 8, word)?;
        // The exclusive or of all words, of which an odd number has the last fill.
        assert_eq!(gpu.read(&*memory)?, u64::from_ne_bytes([100; 8]) ^ word);
    }
    println!("a kernel saw each of 100 words that the CPU wrote before its launch");
    Ok(())
}
