//! A process is killed, and its memory stays: another process has imported it.
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egmem::driver::Access;
use egmem::ledger;
use egmem::share::{self, Channel, ImportOptions, ImportedBuffer, Listener, Peers, Shared};
use egmem::{Buffer, Driver, Machine, Topology};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if let [_, socket] = &std::env::args().collect::<Vec<_>>()[..] {
        return export(&driver, Path::new(socket));
    }
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let socket = std::env::temp_dir().join(format!("outlives-{}", std::process::id()));
    let listener = Listener::bind(&socket, Peers::same_user())?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg(&socket)
        .spawn()?;
    let imported = receive(&driver, &listener);
    child.kill()?;
    child.wait()?;
    let imported = imported?;
    let word: u64 = imported.get(0)?;
    println!("its process was killed; the memory has {word}");
    assert_eq!(word, 7);
    for entry in ledger::allocations(&driver) {
        let from = entry.imported.and_then(|import| import.from);
        let from = from.ok_or("the ledger does not know the exporter")?;
        println!("{} bytes are kept here, of {}", entry.bytes, from.name);
    }
    drop(imported); // only now is it free
    assert!(ledger::allocations(&driver).is_empty());
    Ok(())
}

fn receive(driver: &Driver, listener: &Listener) -> share::Result<ImportedBuffer> {
    let offer = listener.accept()?.receive()?;
    Ok(offer.import(driver, ImportOptions::new())?)
}

/// The process that is killed.
fn export(driver: &Driver, socket: &Path) -> Result<(), Box<dyn Error>> {
    let node = Topology::discover(driver)?.gpu(0)?.host_node()?;
    let memory = Buffer::on(node)
        .bytes(8 << 20)
        .shareable()
        .allocate(driver)?;
    memory.put(0, 7_u64)?;
    Channel::connect(socket, Peers::same_user())?.send(&Shared::from(memory), Access::ReadWrite)?;
    std::thread::sleep(Duration::from_secs(600));
    Ok(())
}
