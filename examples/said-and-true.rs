//! Three false claims about CUDA's memory: tries each, and prints the result.
//!
//! ```text
//! cargo run --example said-and-true
//! ```
//! On all GPUs of the machine; where there is no GPU, on a simulated machine.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egmem::driver::{Access, Location};
use egmem::proof::Prover;
use egmem::share::{Channel, ImportOptions, Listener, Peers, Shared};
use egmem::{Buffer, Driver, Machine, Stream, Topology};

const BYTES: u64 = 256 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    if let [_, socket] = &std::env::args().collect::<Vec<_>>()[..] {
        return export(&driver, Path::new(socket));
    }
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    println!("said: pointers of two GPUs may have the same value");
    overlaps(&driver)?;
    println!("said: memory stays in use after its process has ended");
    after_the_end(&driver)?;
    println!("said: a GPU cannot read another one's pointers");
    peers(&driver)
}

fn overlaps(driver: &Driver) -> Result<(), Box<dyn Error>> {
    let mut places: Vec<_> = (0..driver.device_count()?).map(Location::Device).collect();
    places.push(Topology::discover(driver)?.gpu(0)?.host_node()?.into());
    let allocate = |place: &Location| Buffer::on(*place).bytes(BYTES).allocate(driver);
    let memory = (places.iter().map(allocate)).collect::<Result<Vec<_>, _>>()?;
    let mut starts: Vec<u64> = memory.iter().map(|one| one.device_ptr().0).collect();
    starts.sort_unstable();
    let apart = starts.windows(2).all(|pair| pair[0] + BYTES <= pair[1]);
    println!("  allocations at {places:?} are apart: {apart}");
    apart.then_some(()).ok_or_else(|| "they overlap".into())
}

fn after_the_end(driver: &Driver) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let mut listener = Listener::bind(&socket, Peers::same_user())?;
    listener.set_timeout(Duration::from_secs(60))?;
    let free = || driver.mem_info(0).map(|(free, _)| free >> 20);
    let before = free()?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg(&socket)
        .spawn()?;
    let imported = listener.accept().and_then(|mut channel| {
        let gpu = ImportOptions::new().access(Location::Device(0), Access::Read);
        let gpu = gpu.access(Location::Host, Access::None);
        Ok(channel.receive()?.import(driver, gpu)?)
    });
    child.kill()?;
    child.wait()?;
    let (imported, held) = (imported?, free()?);
    let seen = Buffer::near(driver, 0, BYTES)?;
    Stream::new(driver, 0)?.copy(&seen, 0, &imported, 0, BYTES)?;
    let byte: u8 = seen.get(BYTES - 1)?;
    println!("  the process was killed; an importer still reads {byte}");
    drop((imported, seen));
    let after = free()?;
    println!("  MiB free on GPU 0: before {before}, while imported {held}, then {after}");
    (byte == 7)
        .then_some(())
        .ok_or_else(|| "the importer reads another byte".into())
}

/// The process that is killed.
fn export(driver: &Driver, socket: &Path) -> Result<(), Box<dyn Error>> {
    let memory = Buffer::on(Location::Device(0)).bytes(BYTES).shareable();
    let memory = memory.allocate(driver)?;
    Stream::new(driver, 0)?.fill(&memory, 0, BYTES, 7)?;
    Channel::connect(socket, Peers::same_user())?.send(&Shared::from(memory), Access::Read)?;
    std::thread::sleep(Duration::from_secs(600));
    Ok(())
}

fn peers(driver: &Driver) -> Result<(), Box<dyn Error>> {
    let topology = Topology::discover(driver)?;
    let Some(link) = topology.gpu(0)?.peer_links.iter().find(|link| link.access) else {
        println!("  not tried: GPU 0 can access no other GPU here");
        return Ok(());
    };
    let (peer, both) = (link.gpu, [0, link.gpu].map(Location::Device));
    let theirs = Buffer::on(Location::Device(peer)).bytes(BYTES);
    let theirs = theirs.access_by(both).allocate(driver)?;
    Prover::new(driver, peer)?.write(&theirs, 42)?;
    let read = |gpu| Prover::new(driver, gpu)?.read(&theirs);
    let same = read(0)? == read(peer)?;
    println!("  GPU 0 and GPU {peer} read the same bytes at one address: {same}");
    same.then_some(())
        .ok_or_else(|| "they read other bytes".into())
}
