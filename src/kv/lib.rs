//! egmem's KV-cache tier: fixed pages of pinned host memory for serving engines.
//!
//! A [`Tier`] keeps pages by [`Key`], for instance the hashes of a serving engine's token blocks, in least-recently-used order.
//! [`Tier::store`] copies blocks of a GPU's cache to pages and [`Tier::load`] copies pages back, in batches, on a stream,
//! without waiting. The tier's table lies in the same memory as its pages, so several processes that attach to memory of
//! `egmem serve` have one tier, and find the pages of processes before them.
//!
//! ```
//! use std::sync::Arc;
//! use egmem::kv::{GpuPages, Key, Tier};
//! use egmem::{Buffer, Driver, Machine, Stream, driver::NodeId};
//!
//! let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
//! let stream = Stream::new(&driver, 0)?;
//! // The engine's cache: one tensor with 8 blocks of 4 KiB. A page has one part for each tensor.
//! let cache = Arc::new(Buffer::near(&driver, 0, 8 * 4096)?);
//! let gpu = GpuPages::over(vec![(cache.clone(), 0)], 4096, 4096)?;
//! let tier = Tier::on(NodeId(0)).pages(100).page_bytes(4096).create(&driver)?;
//!
//! let keys = [Key::new([1; 32]), Key::new([2; 32])];
//! cache.fill(7)?;
//! let mut store = tier.prepare_store(&keys)?;
//! tier.store(&stream, &store.pairs(&[3, 5])?, &gpu)?.wait()?;
//! store.commit()?;
//!
//! cache.fill(0)?;
//! assert_eq!(tier.lookup(&keys), 2);
//! let load = tier.prepare_load(&keys)?;
//! tier.load(&stream, &load.pairs(&[0, 1])?, &gpu)?.wait()?;
//! assert_eq!(cache.get::<u8>(2 * 4096 - 1)?, 7);
//! # Ok::<(), egmem::kv::Error>(())
//! ```
//!
//! Programs depend on the crate `egmem`, which re-exports it as `egmem::kv`.
#![deny(missing_docs)]

mod attach;
mod copy;
mod error;
mod events;
mod geometry;
mod gpu;
mod header;
mod inner;
mod members;
mod options;
mod page;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod tier;
mod words;

pub use attach::AttachOptions;
pub use copy::CopyMethod;
pub use copy::job::Job;
pub use egmem_core::ledger::TierStats as Stats;
pub use error::{Error, Result};
pub use events::{Events, Subscription, TierEvent, TierEventKind};
pub use gpu::{GpuPages, PartShape};
pub use inner::{TierMemory, Verify};
pub use members::Member;
pub use options::TierOptions;
pub use page::{Evicted, Key, PageId};
pub use store::{Load, Store};
pub use table::Found;
pub use tier::Tier;

use egmem_core::{Buffer, Driver, Error as MemoryError, GrowthState, Stream, driver, memory};
