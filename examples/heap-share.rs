//! A block of a heap is shared with a child process, which reads it and writes to it.
//!
//! ```text
//! cargo run --example heap-share
//! ```
//! On the first GPU's node; where there is no GPU, on a simulated machine.

use std::alloc::Layout;
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use egmem::driver::Access;
use egmem::share::{Channel, ImportOptions, Listener, Peers};
use egmem::{Driver, Heap, Machine, Topology};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    match std::env::args_os().nth(1) {
        None => parent(&driver),
        Some(socket) => child(&driver, Path::new(&socket)),
    }
}

fn parent(driver: &Driver) -> Result<(), Box<dyn Error>> {
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let topology = Topology::discover(driver)?;
    let heap = Heap::on(topology.gpu(0)?.host_node()?)
        .shareable()
        .build(driver)?;
    let block = Arc::new(heap.allocate(Layout::new::<[u64; 1000]>())?);
    block.put(0, 41_u64)?;
    let shared = Arc::clone(&block).share_arc()?;

    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let mut listener = Listener::bind(&socket, Peers::same_user())?;
    listener.set_timeout(Duration::from_secs(60))?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg(&socket)
        .spawn()?;
    let sent = listener
        .accept()
        .and_then(|mut peer| peer.send(&shared, Access::ReadWrite));
    let ended = child.wait()?;
    sent?;
    if !ended.success() {
        return Err(format!("the child ended with {ended}").into());
    }
    println!("the child has made {} of 41", block.get::<u64>(0)?);
    // Only now may the block go: the child has unmapped it.
    drop((shared, block));
    Ok(())
}

fn child(driver: &Driver, socket: &Path) -> Result<(), Box<dyn Error>> {
    let mut channel = Channel::connect(socket, Peers::same_user())?;
    let imported = channel.receive()?.import(driver, ImportOptions::new())?;
    let found: u64 = imported.get(0)?;
    imported.put(0, found + 1)?;
    Ok(())
}
