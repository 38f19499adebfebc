//! All ranks of a group in one process: how long joining takes, and barriers after that.
//!
//! ```text
//! cargo run --release -p egmem-benches --bin group-join -- --ranks 72
//! cargo run --release -p egmem-benches --bin group-join -- --ranks 576 --unix
//! ```
//! Each rank is a client with a connection of its own; the server is rank 0's. On the simulator, so
//! that the exchange is timed, not the driver; mapping is lazy.

use std::time::{Duration, Instant};

use clap::Parser;
use egmem::driver::NodeId;
use egmem::exchange::Address;
use egmem::exchange::group::{self, Admission, Group, Map};
use egmem::share::Shared;
use egmem::{Buffer, Driver, Machine};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::task::JoinSet;

#[derive(Parser)]
struct Arguments {
    /// How many ranks.
    #[arg(long, default_value_t = 72)]
    ranks: u32,
    /// How often.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// How many barriers the ranks meet at, each time that they have joined.
    #[arg(long, default_value_t = 100)]
    barriers: u32,
    /// Over a Unix socket instead of TCP on loopback.
    #[arg(long)]
    unix: bool,
}

/// All ranks meet at so many barriers, and gather the numbers of all.
async fn meet(groups: Vec<Group>, barriers: u32) -> Result<Vec<Group>, Box<dyn std::error::Error>> {
    const WITHIN: Duration = Duration::from_secs(60);
    let begun = Instant::now();
    let mut meeting = JoinSet::new();
    for group in groups {
        meeting.spawn(async move {
            for _ in 0..barriers {
                group.barrier(WITHIN).await?;
            }
            let numbers = group
                .gather(&group.own_rank().to_be_bytes(), WITHIN)
                .await?;
            let expected = (0..group.size()).map(u32::to_be_bytes);
            assert!(
                expected.eq(numbers
                    .iter()
                    .map(|number| <[u8; 4]>::try_from(&number[..]).unwrap_or_default()))
            );
            group::Result::Ok(group)
        });
    }
    let groups: Vec<Group> = meeting
        .join_all()
        .await
        .into_iter()
        .collect::<group::Result<_>>()?;
    let rate = f64::from(barriers) / begun.elapsed().as_secs_f64();
    println!("{barriers} barriers, {rate:.0} a second");
    Ok(groups)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    // Both ends of every rank's connection are in this process.
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files)?;

    let driver = Driver::simulated(Machine::gh200())?;
    let memory: Vec<Shared> = (0..arguments.ranks)
        .map(|_| {
            let buffer = Buffer::on(NodeId(0))
                .bytes(1)
                .shareable()
                .allocate(&driver)?;
            Ok(buffer.into())
        })
        .collect::<egmem::Result<_>>()?;
    let folder = std::env::temp_dir().join(format!("egmem-group-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let mut times = Vec::new();
    for round in 0..arguments.rounds {
        let address = if arguments.unix {
            Address::Unix(folder.join(round.to_string()))
        } else {
            let free = std::net::TcpListener::bind("127.0.0.1:0")?;
            Address::loopback(free.local_addr()?.port())
        };
        let begun = Instant::now();
        let mut joining = JoinSet::new();
        for (rank, memory) in (0..).zip(memory.clone()) {
            let (driver, address) = (driver.clone(), address.clone());
            joining.spawn(async move {
                Group::options("bench", rank, arguments.ranks, address, Admission::SamePeer)
                    .memory(memory)
                    .map(Map::Lazy)
                    .join(&driver)
                    .await
            });
        }
        let mut groups = Vec::new();
        while let Some(joined) = joining.join_next().await {
            groups.push(joined??);
        }
        let time = begun.elapsed();
        println!(
            "{} ranks joined in {time:.3?} (simulated memory)",
            groups.len()
        );
        times.push(time);
        let groups = meet(groups, arguments.barriers).await?;
        let mut leaving = JoinSet::new();
        for group in groups {
            leaving.spawn(group.leave(Duration::from_secs(60)));
        }
        while let Some(left) = leaving.join_next().await {
            left??;
        }
    }
    std::fs::remove_dir_all(&folder)?;
    times.sort();
    println!("median {:.3?}", times[times.len() / 2]);
    Ok(())
}
