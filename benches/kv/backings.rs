//! The speed of copies by what the tier's memory is: the driver's, or registered pages.

use egmem::kv::CopyMethod;
use egmem::{Backing, Driver};

use crate::Result;
use crate::copies::{PAGES, measure};
use crate::setup::{Setup, Way, median};

const METHODS: [(&str, CopyMethod); 4] = [
    ("kernel 4", CopyMethod::KERNEL),
    ("batch", CopyMethod::Batch),
    ("loop", CopyMethod::Loop),
    ("auto", CopyMethod::Auto),
];

const BACKINGS: [Backing; 2] = [Backing::Driver, Backing::Auto];

/// Measures both by turns: each round has a tier of each.
pub fn run(driver: &Driver, rounds: usize) -> Result<()> {
    println!(
        "random pages by backing, GB/s from the call to the end of the wait, medians of {rounds}"
    );
    println!(
        "{:>9} {:>5} {:>9} {:>16} {:>16} {:>6}",
        "KiB", "parts", "method", "driver: to, from", "auto: to, from", "ratio"
    );
    for (page_bytes, parts) in PAGES {
        // By method, backing and direction.
        let mut rates: [[[Vec<f64>; 2]; 2]; METHODS.len()] = Default::default();
        for round in 0..rounds {
            for turn in 0..2 {
                let backing = (round + turn) % 2;
                let setup = Setup::with_backing(driver, page_bytes, parts, BACKINGS[backing])?;
                for (rate, to) in rates.iter_mut().zip(loads(&setup)?) {
                    rate[backing][0].push(to);
                }
                for (rate, from) in rates.iter_mut().zip(stores(setup)?) {
                    rate[backing][1].push(from);
                }
            }
        }
        for ((name, _), rates) in METHODS.into_iter().zip(rates) {
            let [[to, from], [to_auto, from_auto]] = rates.map(|ways| ways.map(median));
            println!(
                "{:>9} {parts:>5} {name:>9} {to:>8.1} {from:>7.1} {to_auto:>8.1} {from_auto:>7.1} {:>6.3} {:>6.3}",
                page_bytes >> 10,
                to_auto / to,
                from_auto / from,
            );
        }
    }
    Ok(())
}

fn loads(setup: &Setup) -> Result<Vec<f64>> {
    let mut random = fastrand::Rng::new();
    let mut rate = |(_, method)| {
        let mut pairs = || setup.loads(&mut random);
        Ok(measure(setup, (Way::ToGpu, method), (1, 3), &mut pairs)?.0)
    };
    usable(setup).map(&mut rate).collect()
}

fn stores(setup: Setup) -> Result<Vec<f64>> {
    let mut random = fastrand::Rng::new();
    let (setup, store) = setup.into_writable()?;
    let mut pages = store.pages().to_vec();
    let mut rate = |(_, method)| {
        let mut pairs = || setup.random_pairs(&mut pages, &mut random);
        Ok(measure(&setup, (Way::ToTier, method), (1, 3), &mut pairs)?.0)
    };
    usable(&setup).map(&mut rate).collect()
}

/// A simulated GPU runs no kernels: `Auto` stands in for them there.
fn usable(setup: &Setup) -> impl Iterator<Item = (&'static str, CopyMethod)> + use<> {
    let is_simulated = setup.tier.driver().is_simulated();
    METHODS.into_iter().map(move |(name, method)| match method {
        CopyMethod::Kernel { .. } if is_simulated => (name, CopyMethod::Auto),
        method => (name, method),
    })
}
