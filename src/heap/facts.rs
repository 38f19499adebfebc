//! A heap's constants, settled when it is built.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use egmem_core::backing::Chosen;

use super::backing::{Backing, Plan};
use super::options::{HeapOptions, SoftLimit};
use crate::driver::{Access, Driver, Location};
use crate::fork::Generation;

/// Values that never change after the heap is built: read by all threads, without a lock.
pub(super) struct Facts {
    /// Unique in this process, never reused.
    pub(super) id: u64,
    /// The address of offset 0.
    pub(super) start: u64,
    pub(super) limit: u64,
    pub(super) host: Access,
    /// Whether chunks can be exported: importers may write anywhere in them.
    pub(super) exportable: bool,
    /// Whether a block may lie in several chunks.
    pub(super) joins: bool,
    /// What the chunks are made of.
    pub(super) chosen: Chosen,
    /// `None` if the chunks lie in several places.
    pub(super) location: Option<Location>,
    pub(super) driver: Driver,
    pub(super) scrub: bool,
    /// The process that created the heap. A forked child frees nothing.
    pub(super) born: Generation,
    /// The process in which freeing a block needs no scrubbing, checking or lookup.
    pub(super) plain_in: Generation,
    /// A GPU that may write the memory, if any.
    pub(super) gpu: Option<i32>,
    pub(super) soft_limit: Option<SoftLimit>,
    pub(super) wait_for_gpu: bool,
}

impl Facts {
    /// Settles the facts of a new heap, and gives it its number.
    pub(super) fn new(driver: &Driver, backing: &Backing, options: &HeapOptions) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let born = Generation::current();
        Self {
            id: NEXT.fetch_add(1, Relaxed),
            start: backing.start().0,
            limit: backing.limit(),
            host: backing.host_access(),
            exportable: backing.is_exportable(),
            joins: backing.joins(),
            chosen: backing.chosen().clone(),
            location: match options.plan.nodes[..] {
                [node] => Some(node),
                _ => None,
            },
            driver: driver.clone(),
            scrub: options.scrub_on_free,
            born,
            plain_in: if options.scrub_on_free || options.debug.is_some() {
                Generation::NEVER
            } else {
                born
            },
            gpu: gpu_that_writes(driver, &options.plan),
            soft_limit: options.soft_limit.clone(),
            wait_for_gpu: options.wait_for_gpu,
        }
    }
}

fn gpu_that_writes(driver: &Driver, plan: &Plan) -> Option<i32> {
    let ordinal = |location| match location {
        Location::Device(gpu) => Some(gpu),
        _ => None,
    };
    match &plan.access.gpus {
        Some(gpus) => gpus
            .iter()
            .filter(|desc| desc.access == Access::ReadWrite)
            .find_map(|desc| ordinal(desc.location)),
        None => plan
            .nodes
            .iter()
            .find_map(|&node| ordinal(node))
            .or_else(|| driver.device_count().ok().filter(|&n| n > 0).map(|_| 0)),
    }
}
