//! The ranks of a job map each other's memory.
//!
//! ```text
//! cargo build --features exchange --example group
//! mpirun -n 4 target/debug/examples/group
//! srun -n 4 target/debug/examples/group
//! ```
//! Without a launcher it starts four ranks itself. On the simulator; a program on a machine with a GPU opens the driver
//! instead: docs/multi-node.md.

use std::error::Error;
use std::process::Command;
use std::time::Duration;

use egmem::driver::NodeId;
use egmem::exchange::group;
use egmem::{Buffer, Driver, Machine};

const RANKS: u32 = 4;
/// The variables of the launchers that have a rank.
const LAUNCHERS: [&str; 5] = [
    "EGMEM_RANK",
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS",
    "JOB_COMPLETION_INDEX",
];

fn main() -> Result<(), Box<dyn Error>> {
    match LAUNCHERS
        .iter()
        .any(|name| std::env::var_os(name).is_some())
    {
        true => run(),
        false => start_ranks(),
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    let mut ranks = group::from_env(Duration::from_secs(300))?;
    let rank = ranks.rank();
    let own = Buffer::on(NodeId(0))
        .bytes(2 << 20)
        .shareable()
        .allocate(&driver)?;
    own.put(0, 100 + u64::from(rank))?;

    let memory = group::gather_memory(&mut *ranks, Some(own.into()), &driver)?;
    for other in (0..memory.size()).filter(|other| *other != rank) {
        let mapped = memory.rank(other)?;
        assert_eq!(mapped.get(0), Ok(100 + u64::from(other)));
        mapped.put(8 * (1 + u64::from(rank)), u64::from(rank))?;
    }
    ranks.all_gather(&[])?; // no rank reads before all have written
    if let Some(own) = memory.memory() {
        for other in (0..u64::from(memory.size())).filter(|other| *other != u64::from(rank)) {
            assert_eq!(own.word(8 * (1 + other)), Ok(other));
        }
    }
    println!(
        "rank {rank} of {} mapped the others' memory by {}",
        memory.size(),
        memory.via()
    );
    Ok(())
}

/// Starts this program as so many ranks, as a launcher does.
fn start_ranks() -> Result<(), Box<dyn Error>> {
    let folder = std::env::temp_dir().join(format!("egmem-example-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let address = format!("unix:{}/group", folder.display());
    let start = |rank: u32| {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .env("EGMEM_RANK", rank.to_string())
            .env("EGMEM_SIZE", RANKS.to_string());
        command.env("EGMEM_ADDRESS", &address).spawn()
    };
    let ranks: Vec<_> = (0..RANKS).map(start).collect::<Result<_, _>>()?;
    let mut succeeded = true;
    for mut rank in ranks {
        succeeded &= rank.wait()?.success();
    }
    std::fs::remove_dir_all(&folder)?;
    if succeeded {
        Ok(())
    } else {
        Err("a rank has failed".into())
    }
}
