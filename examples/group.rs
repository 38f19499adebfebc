//! The ranks of a group map each other's memory, meet at a barrier and gather bytes of all.
//!
//! ```text
//! cargo run --features exchange --example group
//! ```
//! Each rank is a thread here, on a simulated machine. Ranks that are processes, on one node or several, make the
//! same calls: docs/multi-node.md.

use std::error::Error;
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use egmem::driver::NodeId;
use egmem::exchange::group::{self, Admission};
use egmem::exchange::{Address, blocking};
use egmem::{Buffer, Driver, Machine};

const RANKS: u32 = 4;
const WITHIN: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::simulated(Machine::gh200())?;
    // Rank 0 starts a server there.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let address = Address::loopback(port);
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            let (driver, address) = (driver.clone(), address.clone());
            thread::spawn(move || run(rank, address, &driver))
        })
        .collect();
    for rank in ranks {
        rank.join().map_err(|_| "a rank panicked")??;
    }
    Ok(())
}

fn run(rank: u32, address: Address, driver: &Driver) -> group::Result<()> {
    let own = Buffer::on(NodeId(0))
        .bytes(2 << 20)
        .shareable()
        .allocate(driver)?;
    own.put(0, u64::from(rank))?;
    let options = group::Group::options("example", rank, RANKS, address, Admission::SamePeer);
    let group = blocking::Group::join(options.memory(own), driver)?;

    // The next rank's memory, which is mapped here.
    let next = group.rank((rank + 1) % RANKS)?;
    println!("rank {rank} reads {} of the next", next.get::<u64>(0)?);
    group.barrier(WITHIN)?; // no rank writes before all have read
    next.put(0, 100 + u64::from(rank))?;
    group.barrier(WITHIN)?; // no rank reads before all have written

    let own: u64 = group.rank(rank)?.get(0)?;
    let of_all = group.gather(&own.to_be_bytes(), WITHIN)?;
    if rank == 0 {
        println!("rank 0 gathers {of_all:?}");
    }
    group.leave(WITHIN)?; // waits for all
    Ok(())
}
