//! Checks free memory before the driver is asked for much of it.

use std::io::ErrorKind;

use crate::driver::{Code, Driver, Location, NodeId};
use crate::topology::{self, Overcommit};
use crate::{Error, Result};

/// Smaller requests go to the driver unchecked: reading the node's counters takes a good part of the time of
/// creating them, and the kernel keeps as much in reserve.
pub const WORTH_ASKING: u64 = 64 << 20;

/// Refuses `bytes` at `location` if the node has less free.
///
/// Pinned memory cannot be swapped out: beyond a node's free memory the kernel starts to kill processes.
/// `idle` returns how many bytes exist already for the request, and is called only if they matter.
pub fn check_free(
    driver: &Driver,
    location: Location,
    bytes: u64,
    idle: impl FnOnce() -> u64,
) -> Result<()> {
    if bytes < WORTH_ASKING {
        return Ok(());
    }
    check_free_now(driver, location, bytes, idle).map(drop)
}

/// As [`check_free`], for any number of bytes; returns the free bytes, if the location is a node and the number
/// is known.
pub fn check_free_now(
    driver: &Driver,
    location: Location,
    bytes: u64,
    idle: impl FnOnce() -> u64,
) -> Result<Option<u64>> {
    let Location::HostNuma(id) = location else {
        return Ok(None);
    };
    let node = NodeId(id);
    match topology::free_now(driver, node) {
        // The override is for machines that report less memory than they can provide.
        Some(free)
            if free < bytes
                && free.saturating_add(idle()) < bytes
                && Overcommit::from_env() == Overcommit::Refuse =>
        {
            Err(Error::NodeTooFull {
                node,
                requested: bytes,
                free,
            })
        }
        free => Ok(free),
    }
}

/// Returns whether an error says that there was too little memory: less of it, or later, or on another node, there may be.
pub fn is_shortage(error: &Error) -> bool {
    match error {
        Error::NodeTooFull { .. } | Error::NodesTooFull { .. } => true,
        // The kernel has no pages on the node.
        Error::System { kind, .. } => *kind == ErrorKind::OutOfMemory,
        _ => error.code() == Some(Code::OUT_OF_MEMORY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;

    #[test]
    fn more_than_a_node_has_free_is_refused_with_the_numbers() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let total = driver.sim().unwrap().machine().nodes[0].memory;
        let at = |bytes| check_free(&driver, Location::HostNuma(0), bytes, || 0);
        at(total).unwrap();
        check_free(&driver, Location::HostNuma(0), total + 10, || 10).unwrap();
        let error = at(total + 1).unwrap_err();
        assert!(
            matches!(error, Error::NodeTooFull { free, requested, .. } if free == total && requested == total + 1),
            "{error}"
        );
        let _held = driver
            .mem_create(
                256 << 20,
                &crate::driver::AllocationProps::at(Location::HostNuma(0)),
            )
            .unwrap();
        assert!(at(total).is_err());
        at(total - (256 << 20)).unwrap();
    }

    #[test]
    fn only_host_nodes_are_guarded() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        check_free(&driver, Location::Device(0), 1 << 50, || 0).unwrap();
        check_free(&driver, Location::Host, 1 << 50, || 0).unwrap();
        check_free(&driver, Location::HostNuma(99), 1 << 50, || 0).unwrap();
    }
}
