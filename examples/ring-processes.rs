//! One process per GPU: each reads its left neighbour's memory through an fd, until all have the data of all.
//!
//! ```text
//! cargo run --example ring-processes
//! ```
//! On all GPUs of the machine; a single GPU is used by several processes. Where there is no GPU, on a simulated
//! machine.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use egmem::driver::{Access, HandleTypes, Location};
use egmem::share::{Channel, ImportOptions, Listener, Peers, Shared};
use egmem::{Buffer, Driver, Machine, Stream, Topology};

/// The bytes of each rank.
const SLOT: u64 = 1 << 20;
const WITHIN: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    let ranks = driver.device_count()?.max(2) as u64;
    if let [_, rank, folder] = &std::env::args().collect::<Vec<_>>()[..] {
        return run(&driver, rank.parse()?, ranks, Path::new(folder));
    }
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let (folder, program) = (tempfile::tempdir()?, std::env::current_exe()?);
    let start = |rank: u64| {
        let mut child = Command::new(&program);
        child.arg(rank.to_string()).arg(folder.path()).spawn()
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    // All have ended before a failure is reported.
    let ends: Vec<std::io::Result<_>> = children.into_iter().map(|child| child?.wait()).collect();
    if let Some(rank) = (ends.iter()).position(|end| !matches!(end, Ok(end) if end.success())) {
        return Err(format!("rank {rank}: {:?}", ends[rank]).into());
    }
    println!("each of {ranks} processes has the data of all");
    Ok(())
}

fn run(driver: &Driver, rank: u64, ranks: u64, folder: &Path) -> Result<(), Box<dyn Error>> {
    let (gpus, fd) = (driver.device_count()? as u64, HandleTypes::POSIX_FD);
    let (gpu, right) = ((rank % gpus) as i32, ((rank + 1) % ranks % gpus) as i32);
    let topology = Topology::discover(driver)?;
    let node = topology.gpu(gpu)?.host_node()?;
    // The right neighbour reads this memory. Where it cannot, it reads memory of the host.
    let is_reached = right == gpu || topology.gpu(right)?.peer_link(gpu)?.access;
    let place = [node.into(), Location::Device(gpu)][usize::from(is_reached)];
    let own = Buffer::on(place).access_by([Location::Device(gpu)]);
    let own = own.bytes(ranks * SLOT).handle_types(fd).allocate(driver)?;
    let stream = Stream::new(driver, gpu)?;
    stream.fill(&own, rank * SLOT, SLOT, 1 + rank as u8)?;
    let own = Shared::from(own);
    // How many steps this rank has taken, for its right neighbour's CPU.
    let flag = Buffer::on(node).bytes(8).handle_types(fd);
    let flag = Shared::from(flag.allocate(driver)?);

    let left = (rank + ranks - 1) % ranks;
    let socket = |rank: u64| folder.join(rank.to_string());
    let mut listener = Listener::bind(socket(rank), Peers::same_user())?;
    listener.set_timeout(WITHIN)?;
    let mut from_left = wait_for(|| Channel::connect(socket(left), Peers::same_user()).ok())?;
    from_left.set_timeout(WITHIN);
    let mut to_right = listener.accept()?;
    to_right.send(&own, Access::Read)?;
    to_right.send(&flag, Access::Read)?;
    let reads = ImportOptions::new().access(Location::Device(gpu), Access::Read);
    let reads = reads.access(Location::Host, Access::None);
    let theirs = from_left.receive()?.import(driver, reads)?;
    let their_flag = from_left.receive()?.import(driver, ImportOptions::new())?;
    let memory = own.buffer().ok_or("the memory is a buffer's")?;
    for step in 1..ranks {
        flag.put_word(0, step)?; // the bytes to read in this step have been written
        wait_for(|| (their_flag.word(0).ok()? >= step).then_some(()))?;
        let slot = (rank + ranks - step) % ranks * SLOT;
        stream.copy(&**memory, slot, &theirs, slot, SLOT)?;
    }
    let seen = Buffer::near(driver, gpu, ranks * SLOT)?;
    stream.copy(&seen, 0, &**memory, 0, ranks * SLOT)?;
    for of in 0..ranks {
        assert_eq!(seen.get::<u8>((of + 1) * SLOT - 1)?, 1 + of as u8);
    }
    println!("rank {rank} on GPU {gpu} has the data of all");
    Ok(())
}

fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Result<T, Box<dyn Error>> {
    let start = Instant::now();
    while start.elapsed() < WITHIN {
        if let Some(found) = look() {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Err("the left neighbour is late".into())
}
