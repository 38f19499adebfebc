//! The drivers that tests run on: simulated ones, and this machine's own where it has one. With `EGMEM_REQUIRE_CUDA` set, a
//! missing one is a failure.

use std::sync::{Mutex, MutexGuard, PoisonError};

use egmem::driver::NodeId;
use egmem::{Driver, Machine, Topology};

/// Returns whether tests must run on this machine's driver.
pub fn is_cuda_required() -> bool {
    std::env::var_os("EGMEM_REQUIRE_CUDA").is_some()
}

/// Returns this machine's driver; `None`, with a line that says so, where there is none and none is required.
pub fn cuda() -> Option<Driver> {
    match Driver::open() {
        Ok(driver) => Some(driver),
        Err(error) => {
            let required = is_cuda_required();
            assert!(!required, "EGMEM_REQUIRE_CUDA is set, but: {error}");
            println!("skipped on CUDA: {error}");
            None
        }
    }
}

/// Returns this machine's driver where one is required, otherwise a simulated one.
pub fn cuda_or(machine: Machine) -> Driver {
    match is_cuda_required() {
        true => Driver::open().unwrap(),
        false => Driver::simulated(machine).unwrap(),
    }
}

/// Returns a simulated node of four Grace-Hopper superchips.
pub fn grace() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

/// Returns the host node of GPU 0.
pub fn node(driver: &Driver) -> NodeId {
    node_of(driver, 0)
}

/// Returns the host node of a GPU.
pub fn node_of(driver: &Driver, gpu: i32) -> NodeId {
    let topology = Topology::discover(driver).unwrap();
    topology.gpu(gpu).unwrap().host_node().unwrap()
}

/// Returns the right to reserve 64 TiB, half of a process's addresses: one test at a time may.
pub fn half_of_the_addresses() -> MutexGuard<'static, ()> {
    static ROOM: Mutex<()> = Mutex::new(());
    ROOM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that a simulated driver holds nothing of its user's.
#[track_caller]
pub fn nothing_held(driver: &Driver) {
    if let Some(sim) = driver.sim() {
        let held = sim.held();
        assert!(held.is_empty(), "still held: {held}");
    }
}

/// Makes of each `fn name(driver: &Driver)`, of the calling module or of its modules, a test on a simulated machine and one on
/// CUDA.
#[macro_export]
macro_rules! on_both {
    ($machine:expr; $($module:ident { $($(#[$cfg:meta])* $name:ident,)* })*) => {
        $crate::on_both! { @ $machine; $($($(#[$cfg])* $name: super::$module::$name,)*)* }
    };
    ($machine:expr; $($name:ident,)*) => {
        $crate::on_both! { @ $machine; $($name: super::$name,)* }
    };
    (@ $machine:expr; $($(#[$cfg:meta])* $name:ident: $function:path,)*) => {
        mod simulated {
            $($(#[$cfg])* #[test] fn $name() {
                $function(&egmem::Driver::simulated($machine).unwrap());
            })*
        }
        mod cuda {
            $($(#[$cfg])* #[test] fn $name() {
                if let Some(driver) = $crate::drivers::cuda() { $function(&driver); }
            })*
        }
    };
}
pub use on_both;
