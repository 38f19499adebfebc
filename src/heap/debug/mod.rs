//! The debug mode of a heap: finds writes that damage its blocks, and records where each block was allocated.
//!
//! [`HeapOptions::debug`](super::HeapOptions::debug) turns it on. Every block then has *guards*: bytes before
//! and after it that the program must not write. The heap fills a block with one pattern when it is allocated
//! and with another when it is freed, and keeps freed blocks out of use for a while, in *quarantine*. It
//! checks guards when a block is freed and in [`Heap::check`](super::Heap::check), and blocks in quarantine
//! there and when they leave it. So it finds writes beside a block and writes to freed blocks **by the CPU,
//! by a GPU, and by other processes** that the block was shared with. It does not find reads, but they return
//! the pattern.
//!
//! The heap records where and by which thread each block was allocated:
//! [`Heap::live_blocks`](super::Heap::live_blocks), [`Heap::leaks`](super::Heap::leaks), and a warning if
//! blocks are left when the last handle is dropped. It refuses and reports double frees, and frees of
//! addresses where no block begins; only unsafe code can cause them (a collection's `Allocator::deallocate`).
//! For a collection's block the recorded place lies inside the collection's code: turn
//! [`DebugOptions::backtraces`] on to find the caller.
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
//! // Stands for a kernel that is off by one.
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
//! Every allocation and free takes a lock and writes all of the block's bytes. Each block takes extra bytes
//! for its guards and for alignment before it. Threads cache nothing. Use it in tests and to find a fault. A
//! heap without it pays nothing for it.
//!
//! # Memory that the CPU cannot write
//! A GPU fills and reads it, with microseconds of driver calls for each block. If no GPU may write either,
//! there are no guards and no patterns: the debug mode then finds double frees and leaks, but no writes.

mod options;
mod record;
mod report;
mod site;
mod state;
mod watch;

pub use options::DebugOptions;
pub use report::{LeakReport, Leaks};

pub use crate::error::{BlockInfo, Damage, DamageKind, DamageReport, Seen, Site, WrongBytes};

pub(super) use crate::error::blocks;
pub(super) use watch::{Left, Watch};
