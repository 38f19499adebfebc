//! Helpers of several benchmarks.

#![allow(dead_code)] // Each benchmark uses its part.

pub mod null;

use egmem::driver::{Access, AccessDesc, AllocationProps, Driver, Location};
use egmem::{Buffer, Result};

/// The size of one granule: the smallest chain there is.
pub const GRANULE: u64 = 2 << 20;

/// The chain through the types: create, reserve, map, grant the host and GPU 0, give all back.
pub fn chain_by_types(driver: &Driver, node: i32, bytes: u64) -> Result<()> {
    Buffer::on(Location::HostNuma(node))
        .access_by([Location::Device(0)])
        .bytes(bytes)
        .allocate(driver)
        .map(drop)
}

/// The same driver calls, bare. `bytes` is a multiple of [`GRANULE`].
pub fn chain_by_calls(driver: &Driver, node: i32, bytes: u64) -> Result<()> {
    let location = Location::HostNuma(node);
    let handle = driver.mem_create(bytes, &AllocationProps::at(location))?;
    let ptr = driver.mem_address_reserve(bytes, 0, 0)?;
    let access = [location, Location::Device(0)].map(|location| AccessDesc {
        location,
        access: Access::ReadWrite,
    });
    // SAFETY: the range was just reserved and the memory just created, no other code has either,
    // and both are given back in order; a failure ends the benchmark.
    unsafe {
        driver.mem_map(ptr, bytes, 0, handle)?;
        driver.mem_set_access(ptr, bytes, &access)?;
        driver.mem_unmap(ptr, bytes)?;
        driver.mem_address_free(ptr, bytes)?;
        driver.mem_release(handle)
    }
}

/// The real driver and GPU 0's host node, if there are any.
pub fn cuda() -> Option<(Driver, i32)> {
    let driver = match Driver::open() {
        Ok(driver) => driver,
        Err(error) => {
            eprintln!("without CUDA: {error}");
            return None;
        }
    };
    let node = egmem::Topology::discover(&driver)
        .and_then(|topology| topology.gpu(0)?.host_node())
        .map_err(|error| eprintln!("without CUDA: {error}"))
        .ok()?;
    Some((driver, node.0))
}
