//! The time of a ledger's entry beside the time of the allocation that it belongs to, in one run: by bare calls on a
//! GPU where there is one, else on the simulator, whose times mean nothing.
//!
//! `cargo bench -p egmem-benches --bench ledger`

mod common;

use std::hint::black_box;
use std::time::{Duration, Instant};

use common::{GRANULE, chain_by_calls, cuda};
use egmem::driver::{Access, AccessDesc, Driver, Location};
use egmem::ledger::AllocPath;
use egmem::{Machine, Result};
use egmem_core::ledger::{Entry, Grants, NewEntry, Site};

/// Entries that live meanwhile, as in a large program.
const OTHERS: usize = 1000;
const ENTRIES: u32 = 20_000;
const CHAINS: u32 = 200;

/// The life of a mapped allocation's entry: made, mapped, granted to the host and a GPU, unmapped, removed.
fn entry(driver: &Driver, access: &[AccessDesc]) {
    let entry = Entry::new(NewEntry {
        driver,
        bytes: GRANULE,
        location: Location::HostNuma(0),
        path: AllocPath::Vmm,
        label: None,
        site: Site::here(),
    });
    let start = egmem::driver::DevicePtr(GRANULE);
    entry.grant(start, GRANULE, access.into());
    black_box(&entry).unmap(start);
}

/// The life of an entry of a pool's allocation: made at its address, removed before the free.
fn pooled(driver: &Driver, grants: &Grants) {
    let new = NewEntry {
        driver,
        bytes: 64 << 10,
        location: Location::HostNuma(0),
        path: AllocPath::Pool,
        label: None,
        site: Site::here(),
    };
    let entry = Entry::mapped(new, egmem::driver::DevicePtr(GRANULE), grants.clone());
    black_box(&entry).give_back(driver, || false);
}

/// The median of eleven rounds of `count` calls, for one call.
fn median(count: u32, mut call: impl FnMut() -> Result<()>) -> Result<Duration> {
    let mut rounds = Vec::new();
    for _ in 0..11 {
        let begun = Instant::now();
        for _ in 0..count {
            call()?;
        }
        rounds.push(begun.elapsed() / count);
    }
    rounds.sort_unstable();
    Ok(rounds[rounds.len() / 2])
}

fn main() -> Result<()> {
    let (driver, node) = match cuda() {
        Some(found) => found,
        None => (Driver::simulated(Machine::gh200())?, 0),
    };
    let access =
        [Location::Host, Location::Device(0)].map(|who| AccessDesc::new(who, Access::ReadWrite));
    let other = |_| {
        Entry::new(NewEntry {
            driver: &driver,
            bytes: 1,
            location: Location::Host,
            path: AllocPath::Pinned,
            label: None,
            site: Site::here(),
        })
    };
    let _others: Vec<Entry> = (0..OTHERS).map(other).collect();
    let chain = median(CHAINS, || chain_by_calls(&driver, node, GRANULE))?;
    let entry = median(ENTRIES, || {
        entry(&driver, &access);
        Ok(())
    })?;
    let grants = Grants::of_pool(Default::default());
    let pooled = median(ENTRIES, || {
        pooled(&driver, &grants);
        Ok(())
    })?;
    let share = 100.0 * entry.as_secs_f64() / chain.as_secs_f64();
    println!("driver                               {}", driver.name());
    println!("2 MiB: create, map, grant, give back {chain:?}");
    println!("its entry in the ledger              {entry:?}");
    println!("share                                {share:.3} %");
    println!("entry of a pool's allocation         {pooled:?}");
    Ok(())
}
