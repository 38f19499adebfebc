//! Each GPU reads its own copy of a table, which is replaced as a whole.
use std::error::Error;

use egmem::driver::Location;
use egmem::proof::Prover;
use egmem::shapes::Replicated;
use egmem::{Driver, Machine};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let gpus: Vec<Location> = (0..driver.device_count()?).map(Location::Device).collect();
    let table = Replicated::<u64>::on(gpus.iter().copied()).create(&driver, &[1, 2, 4])?;
    let old = table.local(gpus[0])?; // one version, whole, for as long as it lives
    table.publish(&[8, 16, 32])?;
    for (gpu, &place) in (0..).zip(&gpus) {
        let near = table.local(place)?; // for a kernel: near.device_ptr()
        let sum = Prover::new(&driver, gpu)?.read(&near)?; // exclusive or of the words
        println!(
            "GPU {gpu} reads version {} in {}: {sum}",
            near.epoch(),
            near.location()
        );
        assert_eq!((near.location(), sum), (place, 56));
    }
    assert_eq!(old.epoch() + 1, table.epoch());
    assert_eq!(Prover::new(&driver, 0)?.read(&old)?, 7);
    println!(
        "a reader that began before still reads version {}",
        old.epoch()
    );
    Ok(())
}
