//! Replicated data, with a copy on each GPU and on GPU 0's node: a publication to all of them, and taking a replica.

use std::hint::black_box;
use std::time::Instant;

use egmem::driver::Location;
use egmem::shapes::Replicated;
use egmem::size::Bytes;
use egmem::{Driver, Result, Topology};

/// Replicas taken in a row.
const TIMES: u32 = 1000;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Prints the line.
pub fn run(driver: &Driver, size: u64, rounds: usize) -> Result<()> {
    let topology = Topology::discover(driver)?;
    let values = vec![7_u64; (size / 8).max(1) as usize];
    let bytes = values.len() as u64 * 8;
    let mut places: Vec<Location> = topology.gpus().iter().map(Location::from).collect();
    places.push(topology.gpu(0)?.host_node()?.into());
    let copies = places.len() as u64;
    let data = Replicated::on(places).create(driver, &values)?;
    let (mut publish, mut local) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let start = Instant::now();
        data.publish(&values)?;
        publish.push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        for _ in 0..TIMES {
            black_box(data.local(Location::Device(0))?);
        }
        local.push(start.elapsed().as_secs_f64() / f64::from(TIMES));
    }
    let (publish, local) = (median(publish), median(local));
    println!("\nreplicated: {} in {copies} copies", Bytes(bytes));
    match driver.is_simulated() {
        true => println!("publish: simulated"),
        false => println!(
            "publish: {:.2} ms, {:.1} GB/s over all copies",
            publish * 1e3,
            (copies * bytes) as f64 / publish / 1e9
        ),
    }
    println!("take and drop a replica: {:.0} ns", local * 1e9);
    Ok(())
}
