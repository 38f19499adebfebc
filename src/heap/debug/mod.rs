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

use std::sync::Arc;

use crate::debug::record::Fit;
use crate::options::Callback;
use crate::{Error, Result};

mod record;
mod site;
mod state;
mod watch;

pub use record::{LeakReport, Leaks};

pub use crate::error::{BlockInfo, Damage, DamageKind, DamageReport, Seen, Site, WrongBytes};

pub(super) use crate::error::blocks;
pub(super) use watch::{Left, Watch};

/// The default size of a guard in bytes: a cache line of Grace.
const GUARD: u32 = 64;
/// The default size of the quarantine in bytes.
const QUARANTINE: u64 = 16 << 20;

type Told<T> = Callback<dyn Fn(&T) + Send + Sync>;

/// Options of a heap's [debug mode](super); for [`HeapOptions::debug`](crate::HeapOptions::debug).
#[derive(Clone, Debug)]
#[must_use = "these options do nothing until `HeapOptions::debug` has them"]
pub struct DebugOptions {
    pub(super) guard: u32,
    pub(super) quarantine: u64,
    pub(super) fresh: u8,
    pub(super) freed: u8,
    pub(super) backtraces: bool,
    pub(super) on_damage: Option<Told<Damage>>,
    pub(super) on_leaks: Option<Told<LeakReport>>,
}

impl DebugOptions {
    /// The value of a guard's bytes.
    pub const GUARD_BYTE: u8 = 0xfd;

    /// Returns the defaults: guards of 64 bytes; 16 MiB in quarantine; new blocks filled with 0xcd, freed
    /// ones with 0xdd, as in Microsoft's debug heap; no backtraces.
    pub fn new() -> Self {
        Self {
            guard: GUARD,
            quarantine: QUARANTINE,
            fresh: 0xcd,
            freed: 0xdd,
            backtraces: false,
            on_damage: None,
            on_leaks: None,
        }
    }

    /// Sets the minimum number of guard bytes before and after each block; by default 64. A block with a
    /// larger alignment has more before it; a block aligned to more than 2 MiB has none. With 0, only the
    /// bytes that rounding adds after a block are guarded.
    ///
    /// Writes further away are not found, or hit another block's guard: for kernels with a grid stride,
    /// consider guards as wide as the stride.
    pub const fn guard(mut self, bytes: u32) -> Self {
        self.guard = bytes;
        self
    }

    /// Refuses guards that leave no room for a block.
    pub(crate) fn check(&self, limit: u64) -> Result<()> {
        let guard = self.guard;
        if Fit::of(1, 1, guard).bytes <= limit {
            return Ok(());
        }
        let why = format!(
            "{guard} bytes before and after each block leave no room in a heap of {limit} bytes"
        );
        Err(Error::invalid("guard", why))
    }

    /// Sets how many bytes of freed blocks stay in quarantine, including their guards; by default 16 MiB. The
    /// oldest blocks leave first. All leave before an allocation fails, and in
    /// [`Heap::trim`](crate::Heap::trim). With 0, a freed block may be handed out again at once, and writes
    /// to it are not found.
    pub const fn quarantine(mut self, bytes: u64) -> Self {
        self.quarantine = bytes;
        self
    }

    /// Sets the fill byte of new blocks; by default 0xcd. With 0xff, floating-point numbers of any size are
    /// NaN until they are written.
    pub const fn fresh(mut self, byte: u8) -> Self {
        self.fresh = byte;
        self
    }

    /// Sets the fill byte of freed blocks; by default 0xdd. Writes of this very byte are not found.
    pub const fn freed(mut self, byte: u8) -> Self {
        self.freed = byte;
        self
    }

    /// Sets whether to take a backtrace when a block is allocated and when it is freed; by default not. It
    /// shows where a block was dropped and which code filled a collection, which the call's line alone does
    /// not. It takes microseconds and some KiB each time.
    pub const fn backtraces(mut self, on: bool) -> Self {
        self.backtraces = on;
        self
    }

    /// Calls `told` for each damage when it is found, in addition to `tracing`'s error.
    ///
    /// The thread that finds the damage calls it, with no lock of the heap held: `told` may use the heap. It
    /// must not panic, because blocks are freed by drops.
    pub fn on_damage(mut self, told: impl Fn(&Damage) + Send + Sync + 'static) -> Self {
        self.on_damage = Some(Callback(Arc::new(told)));
        self
    }

    /// Calls `told` if blocks are left when the heap's last handle is dropped, in addition to `tracing`'s
    /// warning. The blocks may still be freed later. The rules of [`on_damage`](Self::on_damage) apply.
    pub fn on_leaks(mut self, told: impl Fn(&LeakReport) + Send + Sync + 'static) -> Self {
        self.on_leaks = Some(Callback(Arc::new(told)));
        self
    }
}

impl Default for DebugOptions {
    fn default() -> Self {
        Self::new()
    }
}
