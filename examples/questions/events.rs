//! Two processes change one memory in turns, each on its own stream. Events order the work: no CPU waits for a GPU.
use std::{error::Error, path::Path, process::Command, sync::Arc};

use egmem::driver::Access;
use egmem::share::{Channel, ImportOptions, Listener, Peers, Shared};
use egmem::{Buffer, Driver, Event, Machine, Memory, Stream, Topology};

type End = Result<(), Box<dyn Error>>;
const BYTES: u64 = 64 << 20;
const TURNS: u64 = 100;

fn main() -> End {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if let [_, socket] = &std::env::args().collect::<Vec<_>>()[..] {
        let mut channel = Channel::connect(Path::new(socket), Peers::same_user())?;
        let memory = channel.receive()?.import(&driver, ImportOptions::new())?;
        return work(&mut channel, memory, 1);
    }
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let socket = std::env::temp_dir().join(format!("events-{}", std::process::id()));
    let listener = Listener::bind(&socket, Peers::same_user())?;
    let mut other = Command::new("/proc/self/exe").arg(&socket).spawn()?;
    let mut channel = listener.accept()?;
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let memory = Buffer::on(node).bytes(BYTES).shareable();
    let memory = Arc::new(memory.allocate(&driver)?);
    channel.send(&Shared::from(Arc::clone(&memory)), Access::ReadWrite)?;
    work(&mut channel, memory, 0)?;
    assert!(other.wait()?.success());
    println!("{TURNS} turns of two processes, in order");
    Ok(())
}

fn work<M: Memory + Clone + 'static>(on: &mut Channel, memory: M, first: u64) -> End {
    let driver = &memory.driver().clone();
    let (stream, ours) = (Stream::new(driver, 0)?, Event::interprocess(driver, 0)?);
    on.send_event(&ours)?; // it lives until the other process has dropped its own, or has ended
    let theirs = on.receive_event(driver)?;
    let log = Arc::new(Buffer::near(driver, 0, 8 * TURNS)?);
    let (mut copies, mut fills) = (Vec::new(), Vec::new()); // tickets, which keep the memory
    for turn in (first..TURNS).step_by(2) {
        if turn > 0 {
            on.receive_text(8)?; // recorded; its work may still be waiting
            stream.wait(&theirs)?; // for the last record before this call
        }
        let (to, last) = ((log.clone(), 8 * turn), (memory.clone(), BYTES - 8));
        copies.push(stream.start_copy(to, last, 8)?);
        fills.push(stream.start_fill((memory.clone(), 0), BYTES, turn as u8 + 1)?);
        ours.record(&stream)?;
        on.send_text("recorded")?;
    }
    stream.synchronize()?;
    for turn in (first..TURNS).step_by(2) {
        assert_eq!(u64::from(log.get::<u8>(8 * turn)?), turn);
    }
    Ok(())
}
