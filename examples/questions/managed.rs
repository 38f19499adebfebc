//! VMM memory and managed memory in one program: a kernel reads both, and one copies to the other.
use std::error::Error;

use egmem::pinned::ManagedMemory;
use egmem::proof::Prover;
use egmem::{Buffer, Driver, Error as Failed, Machine, Memory, Stream};

const BYTES: u64 = 16 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let vmm = Buffer::near(&driver, 0, BYTES)?;
    let managed = match ManagedMemory::new(&driver, 0, BYTES) {
        Err(error @ Failed::PlatformUnsupported { .. }) => {
            println!("not here: {error}");
            return Ok(());
        }
        made => made?,
    };
    let (start, end) = (vmm.device_ptr().0, vmm.device_ptr().0 + BYTES);
    let apart = managed.device_ptr().0 >= end || managed.device_ptr().0 + BYTES <= start;
    println!(
        "VMM at {start:#x}, managed at {:#x}",
        managed.device_ptr().0
    );
    assert!(apart);

    let gpu = Prover::new(&driver, 0)?;
    managed.cpu().put(0, 7_u64)?; // these pages move to the GPU when it touches them
    vmm.put(0, 9_u64)?; // these never move
    let sums = (gpu.read(&managed)?, gpu.read(&vmm)?);
    println!("one GPU reads {sums:?}");
    assert_eq!(sums, (7, 9));
    Stream::new(&driver, 0)?.copy(&managed, 0, &vmm, 0, BYTES)?;
    assert_eq!(managed.cpu().get::<u64>(0)?, 9);
    println!("copied from VMM memory to managed memory");
    Ok(())
}
