//! The speed of each method.

use std::time::Instant;

use egmem::Driver;
use egmem::kv::{CopyMethod, PageId};

use crate::Result;
use crate::setup::{Setup, Way, median};

/// Pages: their bytes, and how many parts they have.
pub const PAGES: [(u64, u64); 6] = [
    (16 << 10, 1),
    (64 << 10, 1),
    (64 << 10, 16),
    (256 << 10, 1),
    (2 << 20, 1),
    (2 << 20, 64),
];

/// By name: the method, and the jobs beside each other that make it.
const METHODS: [(&str, CopyMethod, usize); 11] = [
    ("kernel 4", CopyMethod::Kernel { blocks: 4 }, 1),
    ("kernel 8", CopyMethod::Kernel { blocks: 8 }, 1),
    ("kernel 16", CopyMethod::Kernel { blocks: 16 }, 1),
    ("kernel 24", CopyMethod::Kernel { blocks: 24 }, 1),
    ("kernel 32", CopyMethod::Kernel { blocks: 32 }, 1),
    ("kernel 64", CopyMethod::Kernel { blocks: 64 }, 1),
    ("batch", CopyMethod::Batch, 1),
    ("2 batches", CopyMethod::Batch, 2),
    ("4 batches", CopyMethod::Batch, 4),
    ("loop", CopyMethod::Loop, 1),
    ("auto", CopyMethod::Auto, 1),
];

pub fn run(driver: &Driver, rounds: usize) -> Result<()> {
    println!("random pages, GB/s from the call to the end of the wait, medians of {rounds}");
    for (page_bytes, parts) in PAGES {
        let setup = Setup::new(driver, page_bytes, parts)?;
        println!(
            "\n{} KiB in {parts} part(s), {} MiB a job",
            page_bytes >> 10,
            setup.bytes() >> 20
        );
        println!(
            "{:>10} {:>9} {:>9}   submitted in ms",
            "method", "to GPU", "to tier"
        );
        let mut random = fastrand::Rng::new();
        let mut results = Vec::new();
        for (_, method, jobs) in METHODS {
            let mut pairs = || setup.loads(&mut random);
            let what = (Way::ToGpu, method);
            results.push(measure(&setup, what, (jobs, rounds), &mut pairs));
        }
        let (setup, store) = setup.into_writable()?;
        let mut pages: Vec<PageId> = store.pages().to_vec();
        for ((name, method, jobs), to_gpu) in METHODS.into_iter().zip(results) {
            let mut pairs = || setup.random_pairs(&mut pages, &mut random);
            let what = (Way::ToTier, method);
            let to_tier = measure(&setup, what, (jobs, rounds), &mut pairs);
            match (to_gpu, to_tier) {
                (Ok((to, first)), Ok((from, second))) => {
                    println!("{name:>10} {to:>9.1} {from:>9.1}   {first:.2} {second:.2}");
                }
                (Err(error), _) | (_, Err(error)) => println!("{name:>10} {error}"),
            }
        }
    }
    Ok(())
}

/// Returns GB/s and the milliseconds of the submission, after one round that does not count.
pub fn measure(
    setup: &Setup,
    what: (Way, CopyMethod),
    (jobs, rounds): (usize, usize),
    pairs: &mut dyn FnMut() -> Vec<(PageId, u64)>,
) -> egmem::kv::Result<(f64, f64)> {
    let (mut rates, mut submits) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let pairs = pairs();
        let start = Instant::now();
        let jobs = setup.begin_split(what, jobs, &pairs)?;
        let submitted = start.elapsed();
        for job in jobs {
            job.wait()?;
        }
        let took = start.elapsed();
        if round > 0 {
            rates.push(setup.bytes() as f64 / took.as_secs_f64() / 1e9);
            submits.push(submitted.as_secs_f64() * 1e3);
        }
    }
    Ok((median(rates), median(submits)))
}
