//! Bulk copies: the kernel for GPUs from Hopper on.

use egmem::Driver;
use egmem::kv::CopyMethod;

use crate::kv::copies::{has_bulk_copies, round_trip};
use crate::kv::setup::{Cache, tier_of};

/// Parts from one copy to many rings full, on every GPU, with numbers of pages that leave some warps less to do than
/// others.
pub fn every_size_of_pages_is_copied(driver: &Driver) {
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    let gpus = driver.device_count().unwrap();
    for gpu in (0..gpus).filter(|&gpu| can(driver, gpu)) {
        for (pages, parts, part_bytes) in [
            (1, 1, 16),
            (777, 1, 16),
            (333, 3, 48),
            (129, 2, 1008),
            (61, 5, 2048),
            (61, 1, 2064),
            (33, 2, 4096),
            (33, 7, 4112),
            (127, 1, 16 << 10),
            (31, 1, 64 << 10),
            (13, 16, 4 << 10),
            (7, 2, (70 << 10) + 16),
            (3, 3, 256 << 10),
            (3, 1, (1 << 20) + 48),
            (5, 1, 2 << 20),
        ] {
            let cache = Cache::on(driver, gpu, parts, pages + 2, (part_bytes + 16, part_bytes));
            let tier = tier_of(driver, gpu, pages, parts * part_bytes);
            for blocks in [1, 2, 3, 8, 300] {
                println!("GPU {gpu}, {blocks} blocks: {pages} pages of {parts} × {part_bytes}");
                let method = CopyMethod::BULK.with_blocks(blocks);
                round_trip(&tier, &cache, method, &mut random);
            }
        }
    }
}

/// Copies of every size from the least to the most, of parts that are and are not their multiples.
pub fn every_size_of_copies_is_taken(driver: &Driver) {
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    if !can(driver, 0) {
        return;
    }
    for part_bytes in [8192, 8208] {
        let cache = Cache::new(driver, 2, 40, (part_bytes, part_bytes));
        let tier = tier_of(driver, 0, 35, 2 * part_bytes);
        for chunk in (16..=4096).step_by(16) {
            let method = CopyMethod::Bulk { blocks: 2, chunk };
            round_trip(&tier, &cache, method, &mut random);
        }
    }
}

/// The simulator has no such kernel; `every_method_moves_the_same_bytes` tests its answer.
fn can(driver: &Driver, gpu: i32) -> bool {
    let can = !driver.is_simulated() && has_bulk_copies(driver, gpu);
    if !can {
        println!("skipped: GPU {gpu} makes no bulk copies");
    }
    can
}
