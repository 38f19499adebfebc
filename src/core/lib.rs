//! egmem's memory: topology, physical memory, mappings, pools, streams and buffers.
//!
//! Programs depend on the crate `egmem`, which re-exports the items that they need.
//!
//! # Ownership
//! Each thing that must be given back has a type. A mapping keeps its reservation by reference and its physical memory
//! through the driver, so every drop order is correct. Options build one object after the other, and an early return drops
//! those that exist, so nothing is half-built.
//!
//! The driver can refuse a release. A refusal that may pass is tried once more. "There is no such thing" is not, because a
//! second try could hit another object with the same number. A release that fails is logged, and returned where the caller
//! asked for it (`release`, `free_on`, `destroy`).
//!
//! A forked child gives nothing back (`driver/fork.rs`): a lock that another thread held stays locked in the child, and
//! memory that both have mapped is the parent's. A driver and a heap remember the process that made them, by a count of
//! forks that `pthread_atfork` keeps. Every `Drop` that calls a driver or takes a heap's lock compares it first.
//! docs/lifetimes.md lists all code that touches memory and what keeps that memory alive.
//!
//! **Mapped parts.** A chunk of a heap, a chunk of a growing vector and a part of a growing import are each a
//! `vmm::MappedPart`, and a `MappedRange` has several side by side. It keeps mappings and memories apart, because its interface
//! lends a slice of each; so does a ring, because it maps its records twice.
//!
//! **Buffers** (`core/buffer/allocate.rs`) are planned first: the granularity and the access of each location, and the list of
//! chunks. Each chunk is then created, mapped and granted, and the ledger has one entry for those of a part. Memory that grows in the
//! background (`core/buffer/growing.rs`) has the same plan. All addresses are reserved at once, and one thread adds chunks. A
//! reader of the front needs no lock: the count of granted bytes is stored after the access to them, and only grows. The list of
//! mappings has a lock, which is held for one query of the driver at a time, so that readers do not wait for each other behind a
//! new chunk. The buffer is `Memory` whose length only grows, which `AccessChecks` allows. The calling thread creates the front, so
//! its errors are the call's, and a caller that handles signals in its progress function handles them meanwhile.
//!
//! # Trials and free memory
//! Capabilities are found by trying, per location and handle type, because attributes are hints: some drivers report fabric
//! support without an IMEX channel, some lack the attribute and can do it. The doctor tries in child processes, because
//! drivers have crashed inside such calls.
//!
//! Pinned memory cannot be swapped out. Shareable registered memory that no process has registered yet, such as a service's reserve, is
//! not pinned; its file is bound to the node (`mbind`, once, by the mapping that created the pages), for pages that are swapped in again and for holes. Requests of 64 MiB or more are checked against the node's free memory first, and
//! refused with the numbers; `overcommit(true)`, or `EGMEM_ALLOW_OVERCOMMIT=1`, skips the check. Smaller requests are left
//! to the driver, because reading the counters takes a good part of the time of creating them; so is memory on no named
//! node (`Location::Host`, `HostNumaCurrent`), which the kernel may take from any.
#![deny(missing_docs)]

pub mod backing;
pub mod buffer;
pub mod capability;
#[cfg(all(test, not(miri)))]
#[path = "../../tests/support/fork.rs"]
mod fork_check;
pub mod growth;
pub mod guard;
pub mod host;
#[cfg(feature = "interop")]
pub mod interop;
pub mod ledger;
pub mod memory;
pub mod per_driver;
pub mod pinned;
pub mod pool;
pub mod proof;
pub mod report;
pub mod stream;
pub mod teardown;
pub mod topology;
pub mod vmm;

pub use backing::Backing;
pub use buffer::{Buffer, BufferOptions, GrowingBuffer};
pub use growth::{Growth, GrowthState, Progress};
pub use memory::Memory;
pub use pool::{Pool, PoolBuffer};
pub use stream::{Event, Stream, Transfer};
pub use topology::Topology;
pub use topology::kernel::Kernel;

#[cfg(feature = "simulator")]
pub use egmem_driver::Machine;
pub use egmem_driver::{
    self as driver, Driver, DriverError, Error, Explained, Result, error, fork, kernels, size, text,
};
