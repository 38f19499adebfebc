//! Each driver call of a tier's work is made to fail.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::driver::{Code, NodeId};
use crate::{Buffer, CopyMethod, Driver, GpuPages, Key, Result, Stream, Tier};
use egmem_core::{Growth, Machine};

const PAGE: u64 = 4096;
const CODES: [Code; 4] = [
    Code::OUT_OF_MEMORY,
    Code::NOT_PERMITTED,
    Code::NOT_SUPPORTED,
    Code(77_777),
];

fn keys(count: u8) -> Vec<Key> {
    (0..count).map(|n| Key::new([n; 32])).collect()
}

/// Stores pages and loads them, with the values that stay.
fn copies(tier: &Tier, driver: &Driver, method: CopyMethod) -> Result<()> {
    let cache = Arc::new(Buffer::near(driver, 0, 8 * PAGE)?);
    let gpu = GpuPages::over(vec![(Arc::clone(&cache), 0)], PAGE, PAGE)?;
    let stream = Stream::new(driver, 0)?;
    let keys = keys(3);
    let mut store = tier.prepare_store(&keys)?;
    cache.fill(7)?;
    tier.store_by(method, &stream, &store.pairs(&[0, 1, 2])?, &gpu)?
        .wait()?;
    store.commit()?;
    cache.fill(0)?;
    let load = tier.prepare_load(&keys)?;
    tier.load_by(method, &stream, &load.pairs(&[4, 5, 6])?, &gpu)?
        .wait()?;
    assert_eq!(cache.get::<u8>(7 * PAGE - 1)?, 7);
    tier.remove(&keys).map(drop)
}

type Operation = fn(&Driver) -> Result<()>;

const OPERATIONS: [(&str, Operation); 4] = [
    ("by any method", |driver| {
        let tier = Tier::on(NodeId(0)).pages(4).page_bytes(PAGE);
        checked(&tier.create(driver)?, driver, CopyMethod::Auto)
    }),
    ("in a batch", |driver| {
        let tier = Tier::on(NodeId(0)).pages(4).page_bytes(PAGE);
        checked(&tier.create(driver)?, driver, CopyMethod::Batch)
    }),
    ("one by one, in given memory", |driver| {
        let memory = Arc::new(Buffer::near(driver, 0, 16 * PAGE)?);
        let tier = Tier::attach(memory).pages(4).page_bytes(PAGE).open()?;
        checked(&tier, driver, CopyMethod::Loop)
    }),
    ("in memory that grows", |driver| {
        let tier = Tier::on(NodeId(0)).pages(1100).page_bytes(PAGE);
        let tier = tier.growth(Growth::steady().chunk(2 << 20));
        let tier = tier.create_in_background(driver, |_| ControlFlow::Continue(()))?;
        tier.wait_grown()?;
        checked(&tier, driver, CopyMethod::Auto)
    }),
];

/// As [`copies`], and the tier is as before.
fn checked(tier: &Tier, driver: &Driver, method: CopyMethod) -> Result<()> {
    let result = copies(tier, driver, method);
    let stats = tier.stats();
    let held = (stats.writing, stats.pinned);
    assert_eq!(held, (0, 0), "{result:?}");
    assert_eq!(stats.free + stats.ready, stats.usable, "{result:?}");
    result
}

#[test]
fn a_call_that_fails_leaves_nothing() {
    for (name, operation) in OPERATIONS {
        let driver = Driver::simulated(Machine::gh200x4()).unwrap();
        operation(&driver).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (call, count) in driver.sim().unwrap().calls() {
            for nth in 1..=count {
                for code in CODES {
                    let driver = Driver::simulated(Machine::gh200x4()).unwrap();
                    let sim = driver.sim().unwrap();
                    sim.fail(call, nth, code);
                    let result = operation(&driver);
                    let case = format!("{name}: {call} number {nth} with {code}: {result:?}");
                    let held = sim.held();
                    assert!(held.is_empty(), "{case}: {held}");
                }
            }
        }
    }
}
