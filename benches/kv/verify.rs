//! The speed of checksums: by one thread, of pages in host memory.

use std::time::Instant;

use egmem::Driver;
use egmem::kv::{Key, Tier, Verify};

use crate::Result;
use crate::setup::{key, median, node};

/// The bytes of the pages of a commit or a load.
const BYTES: u64 = 256 << 20;

pub fn run(driver: &Driver, rounds: usize) -> Result<()> {
    println!(
        "checksums of {} MiB, GB/s, medians of {rounds}",
        BYTES >> 20
    );
    println!("{:>10} {:>9} {:>9}", "page", "commit", "load");
    for page_bytes in [16 << 10, 64 << 10, 2 << 20] {
        let keys: Vec<Key> = (0..BYTES / page_bytes).map(key).collect();
        let tier = Tier::on(node(driver)?).pages(keys.len() as u64);
        let tier = tier.page_bytes(page_bytes).verify(Verify::Always);
        let tier = tier.create(driver)?;
        let rate = |since: Instant| BYTES as f64 / since.elapsed().as_secs_f64() / 1e9;
        let (mut commits, mut loads) = (Vec::new(), Vec::new());
        for round in 0..=rounds {
            tier.remove(&keys)?;
            let mut store = tier.prepare_store(&keys)?;
            for index in 0..keys.len() {
                store.view(index)?.fill(0, page_bytes, index as u8)?;
            }
            let start = Instant::now();
            store.commit()?;
            let commit = rate(start);
            let start = Instant::now();
            let load = tier.prepare_load(&keys)?;
            if round > 0 {
                commits.push(commit);
                loads.push(rate(start));
            }
            drop(load);
        }
        let (commit, load) = (median(commits), median(loads));
        println!("{:>6} KiB {commit:>9.1} {load:>9.1}", page_bytes >> 10);
    }
    Ok(())
}
