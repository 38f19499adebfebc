//! What the debug mode is to do.

use std::fmt;
use std::sync::Arc;

use super::table::Fit;
use super::{Damage, LeakReport};
use crate::{Error, Result};

/// Bytes of a guard by default: a cache line of Grace.
const GUARD: u32 = 64;
/// Bytes in quarantine by default.
const QUARANTINE: u64 = 16 << 20;

type Told<T> = Arc<dyn Fn(&T) + Send + Sync>;

/// What the [debug mode](super) of a heap is to do; for
/// [`HeapOptions::debug`](crate::HeapOptions::debug).
#[derive(Clone)]
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
    /// What a guard's bytes are.
    pub const GUARD_BYTE: u8 = 0xfd;

    /// Guards of 64 bytes; 16 MiB in quarantine; new blocks full of 0xcd, freed ones of 0xdd, as
    /// Microsoft's debug heap has them; no backtraces.
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

    /// At least how many bytes are guarded before and after each block; by default 64. More before one
    /// whose alignment is larger; none before one that is aligned to more than 2 MiB. With 0, only what
    /// sizes are rounded up by is guarded, after blocks.
    ///
    /// Writes that are further away are not found, or in another block's guard: strides of a kernel's
    /// grid may want guards as wide.
    pub const fn guard(mut self, bytes: u32) -> Self {
        self.guard = bytes;
        self
    }

    /// Refuses guards that leave no room for a block.
    pub(in crate::heap) fn check(&self, limit: u64) -> Result<()> {
        match Fit::of(1, 1, self.guard).bytes > limit {
            true => {
                let guard = self.guard;
                let why = format!(
                    "{guard} bytes before and after each block leave no room in a heap of {limit} bytes"
                );
                Err(Error::invalid("guard", why))
            }
            false => Ok(()),
        }
    }

    /// How many bytes of freed blocks are kept out of use, with what they take beside their own; by
    /// default 16 MiB. The oldest leave first. All do before an allocation fails, and at
    /// [`Heap::trim`](crate::Heap::trim). With 0, a freed block may be given out again at once, and what
    /// is written to it then is not found.
    pub const fn quarantine(mut self, bytes: u64) -> Self {
        self.quarantine = bytes;
        self
    }

    /// What new blocks are filled with; by default 0xcd. With 0xff, floating-point numbers of any size
    /// are not a number until they are written.
    pub const fn fresh(mut self, byte: u8) -> Self {
        self.fresh = byte;
        self
    }

    /// What freed blocks are filled with; by default 0xdd. A write of just this byte is not found.
    pub const fn freed(mut self, byte: u8) -> Self {
        self.freed = byte;
        self
    }

    /// Whether a backtrace is taken when a block is allocated and when it is freed; by default not. It
    /// tells where a block was dropped, and by whom a collection was filled, which the line of the call
    /// does not; it takes microseconds and some KiB each time.
    pub const fn backtraces(mut self, on: bool) -> Self {
        self.backtraces = on;
        self
    }

    /// Calls `told` for each damage as it is found, besides `tracing`'s error.
    ///
    /// By the thread that finds it, with no lock of the heap held: `told` may use the heap. It must not
    /// panic, since blocks are freed by drops.
    pub fn on_damage(mut self, told: impl Fn(&Damage) + Send + Sync + 'static) -> Self {
        self.on_damage = Some(Arc::new(told));
        self
    }

    /// Calls `told` when the heap's last handle goes and blocks are left, besides `tracing`'s warning.
    /// They may legitimately be freed later. The same holds as for [`on_damage`](Self::on_damage).
    pub fn on_leaks(mut self, told: impl Fn(&LeakReport) + Send + Sync + 'static) -> Self {
        self.on_leaks = Some(Arc::new(told));
        self
    }
}

impl Default for DebugOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for DebugOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DebugOptions")
            .field("guard", &self.guard)
            .field("quarantine", &self.quarantine)
            .field("fresh", &self.fresh)
            .field("freed", &self.freed)
            .field("backtraces", &self.backtraces)
            .finish_non_exhaustive()
    }
}
