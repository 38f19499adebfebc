//! The debug mode of a heap: what spoils its blocks is found, and who allocated them is known.
//!
//! [`HeapOptions::debug`](super::HeapOptions::debug) turns it on. Every block then has *guards*, bytes
//! before and after it that nobody may write; its own bytes are filled with one pattern when it is
//! allocated and with another when it is freed; and a freed block is kept out of use for a while, in
//! *quarantine*. Guards are looked at when a block is freed and by [`Heap::check`](super::Heap::check);
//! those in quarantine are looked at there and when they leave it. So writes beside a block and writes
//! to freed blocks are found, **whoever made them: the CPU, a GPU, or another process** that the block
//! was shared with. Reads are not found, but they read the pattern.
//!
//! Where each block was allocated is known, and by which thread: [`Heap::live_blocks`](super::Heap::live_blocks),
//! [`Heap::leaks`](super::Heap::leaks), and a warning with the same when a heap's last handle goes and
//! blocks are left. Blocks freed twice, and addresses freed where no block begins, which only unsafe code
//! can do (a collection's `Allocator::deallocate`), are refused and told. A collection's block is allocated
//! within the collection, and the place is that: [`DebugOptions::backtraces`] tells whose it is.
//!
//! ```
//! use std::alloc::Layout;
//! use egmem::driver::NodeId;
//! use egmem::heap::debug::{DamageKind, DebugOptions};
//! use egmem::{Driver, Error, Heap, Machine, Stream};
//!
//! let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
//! let heap = Heap::on(NodeId(0))
//!     .debug(DebugOptions::new().on_damage(|damage| eprintln!("{damage}")))
//!     .build(&driver)?;
//! let block = heap.allocate(Layout::new::<[f32; 100]>())?;
//!
//! // A kernel that is off by one, as it were.
//! let stream = Stream::new(&driver, 0)?;
//! let end = block.device_ptr().add(block.len());
//! unsafe { stream.memset_async(end, 0, 4)? };
//! stream.synchronize()?;
//!
//! drop(block);
//! let Err(Error::HeapDamaged { report }) = heap.check() else {
//!     panic!("a write behind the block");
//! };
//! assert_eq!(report.damage[0].kind, DamageKind::Overrun);
//! println!("{report}"); // where the block was allocated, which bytes, what is there
//! # Ok::<(), egmem::Error>(())
//! ```
//!
//! # What it costs
//! Every allocation and free takes a lock and writes all of the block's bytes; blocks take their guards
//! more, and what alignment needs before them. Threads keep nothing. It is for tests and for the search
//! of a fault. A heap without it pays nothing for it.
//!
//! # Memory that the CPU cannot write
//! A GPU fills and reads it, with microseconds of driver calls for each block. Where no GPU may write
//! either, there are no guards and no patterns: blocks freed twice and leaks are found, writes are not.

mod bytes;
mod inner;
mod options;
mod report;
mod site;
mod table;
mod trace;
mod watch;

pub use options::DebugOptions;
pub use report::{LeakReport, Leaks};

pub use crate::error::{BlockInfo, Damage, DamageKind, DamageReport, Seen, Site, WrongBytes};

pub(super) use crate::error::blocks;
pub(super) use site::Origin;
pub(super) use watch::Watch;
