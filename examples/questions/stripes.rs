//! One range over all GPUs and a host node: each part is written by its own processor, and read by every GPU.
use std::error::Error;

use egmem::driver::{Access, AccessDesc, Location};
use egmem::shapes::{Stripes, stripes};
use egmem::{Buffer, Driver, Machine, Stream, Topology};

const STRIPE: u64 = 4 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let topology = Topology::discover(&driver)?;
    let first = topology.gpu(0)?;
    let mut gpus = vec![0];
    gpus.extend(first.peers.iter().take(3));
    let mut places: Vec<Location> = gpus.iter().copied().map(Location::Device).collect();
    places.push(first.host_node()?.into());
    let bytes = 2 * places.len() as u64 * STRIPE;
    let mut range = Stripes::over(places)
        .stripe(STRIPE)
        .allocate(&driver, bytes)?;
    // Every GPU may read all parts; the writer of a part is its GPU, or the CPU for the node's.
    let parts = stripes(&range);
    for part in &parts {
        let own = |gpu| part.location == Location::Device(gpu);
        let right = |gpu| [Access::Read, Access::ReadWrite][usize::from(own(gpu))];
        let right = |&gpu: &i32| AccessDesc::new(Location::Device(gpu), right(gpu));
        let rights: Vec<_> = gpus.iter().map(right).collect();
        range.set_access_at(part.bytes.start, STRIPE, &rights)?;
    }
    let streams = gpus.iter().map(|&gpu| Stream::new(&driver, gpu));
    let streams = streams.collect::<egmem::Result<Vec<_>>>()?;
    for (byte, part) in (1..).zip(&parts) {
        let mut writers = Vec::new();
        for stream in &streams {
            if stream.fill(&range, part.bytes.start, STRIPE, byte).is_ok() {
                writers.push(stream.device()); // refused for all others: they may only read
            }
        }
        println!(
            "{:>9} on {}: written by GPUs {writers:?}",
            part.bytes.start, part.location
        );
        match part.location {
            Location::Device(gpu) => assert_eq!(writers, [gpu]),
            _ => range.write_at(part.bytes.start, &vec![byte; STRIPE as usize])?,
        }
    }
    for stream in &streams {
        let seen = Buffer::near(&driver, stream.device(), bytes)?;
        stream.copy(&seen, 0, &range, 0, bytes)?; // over all borders
        for (byte, part) in (1_u8..).zip(&parts) {
            assert_eq!(seen.get::<u8>(part.bytes.end - 1)?, byte);
        }
    }
    Ok(())
}
