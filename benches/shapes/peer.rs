//! Grants of GPU 0's memory, beside `cudaDeviceEnablePeerAccess` in peers.cu: an allocation for GPU 0 alone, one for
//! another GPU too, and a grant that comes later. Changes of one chunk's access, beside the driver's call alone.

use std::time::Instant;

use egmem::driver::{Access, AccessDesc, Location};
use egmem::size::Bytes;
use egmem::{Buffer, Driver, Result, Topology};

use crate::gpu::median_and_p99;

const BYTES: u64 = 64 << 20;
const CHUNK: u64 = 2 << 20;
const OWNER: Location = Location::Device(0);

fn measure(rounds: usize, mut work: impl FnMut() -> Result<f64>) -> Result<f64> {
    work()?; // the first round does not count
    let times: Result<Vec<f64>> = (0..rounds).map(|_| work()).collect();
    Ok(median_and_p99(times?).0 * 1e3)
}

/// Returns the seconds of an allocation and its end.
fn allocate(driver: &Driver, users: &[Location]) -> Result<f64> {
    let start = Instant::now();
    let options = Buffer::on(OWNER).access_by(users.iter().copied());
    drop(options.bytes(BYTES).allocate(driver)?);
    Ok(start.elapsed().as_secs_f64())
}

/// Returns the seconds of a grant to one more GPU.
fn grant(driver: &Driver, peer: Location) -> Result<f64> {
    let options = Buffer::on(OWNER).access_by([OWNER]).bytes(BYTES);
    let mut buffer = options.allocate(driver)?;
    let start = Instant::now();
    buffer.set_access(&[AccessDesc::new(peer, Access::ReadWrite)])?;
    Ok(start.elapsed().as_secs_f64())
}

/// Returns the seconds in which one chunk becomes read-only for its GPU and writable again.
fn change(driver: &Driver, set: impl Fn(&mut Buffer, &[AccessDesc]) -> Result<()>) -> Result<f64> {
    let options = Buffer::on(OWNER).access_by([OWNER]).chunk(CHUNK);
    let mut buffer = options.bytes(BYTES).allocate(driver)?;
    let start = Instant::now();
    for access in [Access::Read, Access::ReadWrite] {
        set(&mut buffer, &[AccessDesc::new(OWNER, access)])?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn show(driver: &Driver, what: &str, ms: f64) {
    match driver.is_simulated() {
        true => println!("{what:<36} simulated"),
        false => println!("{what:<36} {ms:9.3} ms"),
    }
}

fn chunks(driver: &Driver, rounds: usize) -> Result<()> {
    println!("\none chunk of 2 MiB, read-only and writable again");
    let ours =
        |buffer: &mut Buffer, access: &[AccessDesc]| buffer.set_access_at(CHUNK, CHUNK, access);
    // SAFETY: the chunk is mapped there, and no work uses it.
    let bare = |buffer: &mut Buffer, access: &[AccessDesc]| unsafe {
        driver.mem_set_access(buffer.device_ptr().add(CHUNK), CHUNK, access)
    };
    show(
        driver,
        "Buffer::set_access_at",
        measure(rounds, || change(driver, ours))?,
    );
    show(
        driver,
        "the driver's calls alone",
        measure(rounds, || change(driver, bare))?,
    );
    Ok(())
}

/// Prints a line for each.
pub fn run(driver: &Driver, rounds: usize) -> Result<()> {
    let rounds = rounds.max(21);
    chunks(driver, rounds)?;
    println!("\n{} of GPU 0 for another GPU", Bytes(BYTES));
    let topology = Topology::discover(driver)?;
    let mut others = topology.gpus().iter().map(|gpu| gpu.ordinal);
    let Some(peer) =
        others.find(|&gpu| gpu != 0 && driver.device_can_access_peer(gpu, 0) == Ok(true))
    else {
        println!("no other GPU reaches it");
        return Ok(());
    };
    let peer = Location::Device(peer);
    let lines = [
        (
            "Buffer for GPU 0",
            measure(rounds, || allocate(driver, &[OWNER]))?,
        ),
        (
            "Buffer for both",
            measure(rounds, || allocate(driver, &[OWNER, peer]))?,
        ),
        ("set_access later", measure(rounds, || grant(driver, peer))?),
    ];
    for (what, ms) in lines {
        show(driver, what, ms);
    }
    Ok(())
}
