//! Two GPUs' allocations have no address in common, and one GPU copies from the other's memory.
use std::error::Error;

use egmem::driver::Location;
use egmem::ledger::{self, Located};
use egmem::proof::Prover;
use egmem::{Buffer, Driver, Machine, Stream, Topology};

const BYTES: u64 = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let topology = Topology::discover(&driver)?;
    let other = topology.gpu(0)?.peers.first().copied().unwrap_or(0); // without a peer, both are on GPU 0
    let on = |gpu, label| Buffer::on(Location::Device(gpu)).bytes(BYTES).label(label);
    let one = on(0, "one").allocate(&driver)?;
    let two = on(other, "two").allocate(&driver)?;

    let (first, second) = (one.device_ptr().0, two.device_ptr().0);
    println!("GPU 0 has {first:#x}, GPU {other} has {second:#x}, {BYTES} bytes each");
    assert!(first + BYTES <= second || second + BYTES <= first);

    // An address alone says whose memory it is.
    for (address, expected) in [(&one, "one"), (&two, "two")] {
        let address = address.device_ptr().add(4096);
        let Located::Allocation { allocation, .. } = ledger::locate(&driver, address)? else {
            return Err("no allocation has the address".into());
        };
        println!(
            "{:#x} is in {expected:?} on {}",
            address.0, allocation.location
        );
        assert_eq!(allocation.label.as_deref(), Some(expected));
    }

    // GPU 1 writes its memory, GPU 0 copies it, and both read the same bytes.
    let (near, far) = (Prover::new(&driver, 0)?, Prover::new(&driver, other)?);
    far.write(&two, 42)?;
    assert_ne!(near.read(&one)?, far.read(&two)?);
    Stream::new(&driver, 0)?.copy(&one, 0, &two, 0, BYTES)?;
    near.check_rewrite(&one, 42, 43)?; // word by word
    println!("GPU 0 copied {BYTES} bytes of GPU {other}");
    Ok(())
}
