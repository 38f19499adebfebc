//! All ranks of a group as threads of one process: how long they take to meet and to map each other's memory.
//!
//! ```text
//! cargo run --release -p egmem-benches --bin group-join -- --ranks 72
//! cargo run --release -p egmem-benches --bin group-join -- --ranks 72 --tcp
//! ```
//! On the simulator, so that the gathers are timed, not the driver.

use std::time::Instant;

use clap::Parser;
use egmem::driver::{HandleType, NodeId};
use egmem::exchange::group::{GatherOptions, GroupSecret, rendezvous};
use egmem::exchange::{Address, Result};
use egmem::share::Shared;
use egmem::{Buffer, Driver, Machine};
use rustix::process::{Resource, getrlimit, setrlimit};

#[derive(Parser)]
struct Arguments {
    /// How many ranks.
    #[arg(long, default_value_t = 72)]
    ranks: u32,
    /// How often.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Over TCP on loopback with a secret, instead of a Unix socket.
    #[arg(long)]
    tcp: bool,
    /// Pass fds instead of fabric handles.
    #[arg(long)]
    fds: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const DEADLINE: std::time::Duration = std::time::Duration::from_secs(60);
    let arguments = Arguments::parse();
    // Both ends of every rank's connections are in this process.
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files)?;

    let driver = Driver::simulated(Machine::gh200())?;
    let options = Buffer::on(NodeId(0)).bytes(1).shareable();
    let memory = (0..arguments.ranks).map(|_| options.clone().allocate(&driver).map(Shared::from));
    let memory: Vec<Shared> = memory.collect::<egmem::Result<_>>()?;
    let folder = std::env::temp_dir().join(format!("egmem-group-join-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let secret = arguments
        .tcp
        .then(|| GroupSecret::new([7; 32]))
        .transpose()?;
    let via = if arguments.fds {
        HandleType::PosixFd
    } else {
        HandleType::Fabric
    };
    let (mut meetings, mut times) = (Vec::new(), Vec::new());
    for round in 0..arguments.rounds {
        let address = if arguments.tcp {
            let free = std::net::TcpListener::bind("127.0.0.1:0")?;
            Address::loopback(free.local_addr()?.port())
        } else {
            Address::Unix(folder.join(round.to_string()))
        };
        let begun = Instant::now();
        let results: Vec<Result<_>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..)
                .zip(&memory)
                .map(|(rank, own)| {
                    let (address, secret, driver) = (&address, secret.as_ref(), &driver);
                    scope.spawn(move || {
                        let size = arguments.ranks;
                        let mut ranks = rendezvous(address, rank, size, secret, DEADLINE)?;
                        // As much as a rank states of its memory.
                        ranks.all_gather(&[7; 512])?;
                        let met = begun.elapsed();
                        let options = GatherOptions::new().via(via);
                        let gathered = options.gather(&mut *ranks, Some(own.clone()), driver)?;
                        Ok((met, gathered))
                    })
                })
                .collect();
            let ranks = ranks.into_iter().filter_map(|rank| rank.join().ok());
            ranks.collect()
        });
        let time = begun.elapsed();
        let gathered = results.into_iter().collect::<Result<Vec<_>>>()?;
        let met = gathered
            .iter()
            .map(|(met, _)| *met)
            .max()
            .unwrap_or_default();
        println!(
            "{} ranks met and gathered 512 bytes of each in {met:.3?}, mapped in {time:.3?} (simulated memory)",
            gathered.len()
        );
        meetings.push(met);
        times.push(time);
    }
    std::fs::remove_dir_all(&folder)?;
    meetings.sort();
    times.sort();
    let middle = times.len() / 2;
    println!("medians {:.3?}, {:.3?}", meetings[middle], times[middle]);
    Ok(())
}
