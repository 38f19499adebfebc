//! The time of the table's calls, which no GPU takes part in.

use std::hint::black_box;
use std::time::Instant;

use egmem::Driver;
use egmem::kv::{Key, Tier};

use crate::Result;
use crate::setup::{key, median, node};

/// The pages of the tier, of 4 KiB: its slots and its index exceed the processor's caches.
const PAGES: u64 = 1 << 16;
/// The keys of a call.
const COUNTS: [usize; 3] = [1, 16, 256];

pub fn run(driver: &Driver, rounds: usize) -> Result<()> {
    println!("calls of a tier of {PAGES} pages: ns for each key, medians of {rounds}");
    println!("{:>5} {:>9} {:>9} {:>9}", "keys", "lookup", "load", "store");
    let mut keys: Vec<Key> = (0..2 * PAGES).map(key).collect();
    fastrand::Rng::with_seed(7).shuffle(&mut keys);
    let tier = Tier::on(node(driver)?).pages(PAGES).page_bytes(4096);
    let tier = tier.create(driver)?;
    let (ready, others) = keys.split_at(PAGES as usize);
    tier.prepare_store(ready)?.commit()?;
    for count in COUNTS {
        let mut times = [const { Vec::new() }; 3];
        for round in 0..=rounds {
            let time = |keys: &[Key], call: &dyn Fn(&[Key]) -> Result<()>| -> Result<f64> {
                let start = Instant::now();
                keys.chunks_exact(count).try_for_each(call)?;
                let whole = keys.len() - keys.len() % count;
                Ok(start.elapsed().as_nanos() as f64 / whole as f64)
            };
            let lookup = time(ready, &|keys| {
                black_box(tier.lookup(keys));
                Ok(())
            })?;
            let load = time(ready, &|keys| Ok(tier.prepare_load(keys).map(drop)?))?;
            let store = |keys: &[Key]| Ok(tier.prepare_store(keys)?.commit()?);
            // Each evicts the pages of the other.
            let stored = time(others, &store)?;
            time(ready, &store)?;
            for (times, time) in times.iter_mut().zip([lookup, load, stored]) {
                times.extend((round > 0).then_some(time));
            }
        }
        let [lookup, load, store] = times.map(median);
        println!("{count:>5} {lookup:>9.0} {load:>9.0} {store:>9.0}");
    }
    Ok(())
}
