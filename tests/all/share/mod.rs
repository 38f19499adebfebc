//! Sharing between real processes, on the simulator and on this machine's GPUs: the owner works with
//! the first GPU, its peer with the last.

mod events;
mod few_fds;
mod frames;
mod gentle;
#[cfg(feature = "portable")]
mod growing;
mod leftovers;
mod memory;
mod pools;
pub mod process;
mod registered;
mod windows;

use egmem_tests::drivers;

use std::path::PathBuf;
use std::time::Duration;

use egmem::driver::Location;
use egmem::share::Shared;
use egmem::topology::Placement;
use egmem::{Buffer, Driver, Machine, Topology};

use egmem_tests::drivers::{node, nothing_held};
use process::say;

const MODULE: &str = module_path!();
const MIB: u64 = 1 << 20;
/// Longer than anything here takes, even emulated.
const PATIENCE: Duration = Duration::from_secs(120);
/// Too short for anything.
const IMPATIENCE: Duration = Duration::from_millis(30);

/// With `EGMEM_REQUIRE_CUDA` this machine's driver, otherwise a simulated one.
fn open() -> Driver {
    drivers::cuda_or(Machine::gh200x4())
}

fn last_gpu(driver: &Driver) -> i32 {
    driver.device_count().unwrap() - 1
}

/// Memory near the first GPU, for it alone: other users have imported it.
fn buffer(driver: &Driver) -> Shared {
    let buffer = Buffer::on(node(driver))
        .access_by([Location::Device(0)])
        .bytes(3 * MIB)
        .shareable()
        .allocate(driver)
        .unwrap();
    Shared::from(buffer)
}

/// Parts on every node, or two parts where there is one node.
fn spread(driver: &Driver) -> Shared {
    let topology = Topology::discover(driver).unwrap();
    let mut shares = Placement::Spread
        .request(15 * MIB)
        .place(&topology)
        .unwrap();
    if shares.len() == 1 {
        let last = egmem::topology::Share {
            bytes: 5 * MIB,
            ..shares[0]
        };
        shares[0].bytes = 10 * MIB;
        shares.push(last);
    }
    Shared::from(
        Buffer::spread(&shares)
            .shareable()
            .allocate(driver)
            .unwrap(),
    )
}

/// In a child process, its role; nothing otherwise.
#[test]
fn child_process() {
    let Ok(role) = std::env::var("EGMEM_SHARE_ROLE") else {
        return;
    };
    let path = PathBuf::from(std::env::var_os("EGMEM_SHARE_SOCKET").unwrap());
    let driver = open();
    match role.as_str() {
        "peer" => memory::peer(&driver, &path),
        "owner" => memory::owner(buffer(&driver), &path),
        "registered-owner" => memory::owner(registered::registered(&driver, 9 * MIB), &path),
        "cycles" => leftovers::cycles(&driver, &path),
        "pool" => pools::pool_peer(&driver, &path),
        "event-peer" => events::peer(&driver, &path),
        "event-holder" => events::holder(&driver, &path),
        "event-exporter" => events::exporter(&driver, &path),
        "event-loop" => events::in_a_loop(&driver, &path),
        "stranger" => frames::stranger(&path),
        "poor" => leftovers::poor(&driver, &path),
        "windows" => windows::peer(&driver, &path),
        "many" => memory::many(&driver, &path),
        "few-owner" => few_fds::owner(&path),
        "few-peer" => few_fds::peer(&path),
        "few-half" => few_fds::half(&path),
        "blocks" => crate::heap_share::peer(&driver, &path),
        "gentle-owner" => gentle::owner(&path),
        "gentle-peer" => gentle::peer(&path),
        #[cfg(feature = "portable")]
        "follower" => growing::follower(&driver, &path),
        other => panic!("no role {other}"),
    }
    nothing_held(&driver);
    say("well");
}
