//! The heap behind a handle.

use std::alloc::Layout;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use egmem::driver::{AccessDesc, Location};
use egmem::heap::{DebugOptions, NotFreed, RawBlock};
use egmem::share::Shared;
use egmem::{Block, Driver, Error, Heap, HeapOptions};

use crate::args::{read_backing, read_handle_types};
use crate::blocks::Blocks;
use crate::buffer::pointer;
use crate::failure::{Failure, Outcome};
use crate::options::{With, check_flags, nonzero, read_grants};
use crate::{
    EGM_DEBUG, EGM_OVERCOMMIT, EGM_SCRUB_ON_FREE, EGM_SHAREABLE, EGM_WAIT_FOR_GPU, args,
    egm_heap_options,
};

/// A heap: suballocates blocks of memory on a node, for the CPU and the GPUs. Any thread may use it, several at a
/// time.
pub struct egm_heap {
    heap: Heap,
    /// The heap's first address.
    start: u64,
    /// Exactly the blocks in use that a C program has: each was turned into numbers by `into_raw`.
    blocks: Blocks,
}

impl egm_heap {
    /// # Safety
    /// The pointers in `options` are null or valid.
    pub(super) unsafe fn create(driver: &Driver, options: &egm_heap_options) -> Outcome<Self> {
        let known =
            EGM_SHAREABLE | EGM_OVERCOMMIT | EGM_SCRUB_ON_FREE | EGM_WAIT_FOR_GPU | EGM_DEBUG;
        check_flags(options.flags, known)?;
        let is = |flag| options.flags & flag != 0;
        let flag = |flag| is(flag).then_some(());
        // SAFETY: the caller's promise.
        let grants = unsafe { read_grants(options.grants, options.grant_count)? };
        // SAFETY: the caller's promise.
        let label = unsafe { args::optional_text(options.label, "label")? };
        let grant =
            |build: HeapOptions, grant: AccessDesc| build.access(grant.location, grant.access);
        let cache =
            nonzero(options.thread_cache).map(|bytes| if bytes == u64::MAX { 0 } else { bytes });
        let build = Heap::on(options.location.read()?)
            .reserve(options.reserve)
            .grow_ahead(options.grow_ahead)
            .handle_types(read_handle_types(options.handle_types)?)
            .overcommit(is(EGM_OVERCOMMIT))
            .scrub_on_free(is(EGM_SCRUB_ON_FREE))
            .wait_for_gpu(is(EGM_WAIT_FOR_GPU))
            .with(grants, |build, grants| {
                let none = build.access_by::<Location>([]);
                grants.into_iter().fold(none, grant)
            })
            .with(nonzero(options.limit), HeapOptions::limit)
            .with(nonzero(options.chunk), HeapOptions::chunk)
            .with(cache, HeapOptions::thread_cache)
            .with(read_backing(options.backing)?, HeapOptions::backing)
            .with(label, HeapOptions::label)
            .with(flag(EGM_SHAREABLE), |build, ()| build.shareable())
            .with(flag(EGM_DEBUG), |build, ()| {
                build.debug(DebugOptions::new().backtraces(true))
            });
        let heap = build.build(driver)?;
        Ok(Self {
            start: heap.device_ptr().0,
            blocks: Blocks::new(heap.limit(), is(EGM_DEBUG))
                .map_err(|error| Error::system("reserving addresses for a heap's table", &error))?,
            heap,
        })
    }

    pub(crate) fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Returns the most bytes of the table of blocks, for a heap that had `backed` bytes at once.
    pub(super) fn metadata(&self, backed: u64) -> u64 {
        self.blocks.metadata(backed)
    }

    #[inline]
    pub(super) fn allocate(&self, size: usize, align: usize) -> Outcome<*mut c_void> {
        let block = self.heap.allocate(self.layout(size, align)?)?;
        self.keep(block)
    }

    pub(super) fn allocate_zeroed(&self, size: usize, align: usize) -> Outcome<*mut c_void> {
        let block = self.heap.allocate_zeroed(self.layout(size, align)?)?;
        self.keep(block)
    }

    /// Returns the layout of a block. A small one has all of its usable bytes, since its page keeps one size for all.
    #[inline]
    fn layout(&self, size: usize, align: usize) -> Outcome<Layout> {
        let align = if align == 0 {
            RawBlock::MIN_ALIGN as usize
        } else {
            align
        };
        let layout = |size| Layout::from_size_align(size, align);
        let asked = layout(size).map_err(|_| wrong_layout(size, align))?;
        if size as u64 > RawBlock::PAGE || size == 0 || self.blocks.is_debug() {
            return Ok(asked);
        }
        match Heap::usable_size(asked) {
            usable @ ..=RawBlock::PAGE => Ok(layout(usable as usize).unwrap_or(asked)),
            _ => Ok(asked),
        }
    }

    /// Notes a block as the program's.
    #[inline]
    fn keep(&self, block: Block) -> Outcome<*mut c_void> {
        let raw = block.into_raw();
        if self.blocks.put(raw) {
            Ok(pointer(self.start + raw.offset))
        } else {
            Err(beyond_the_limit())
        }
    }

    fn offset(&self, block: *const c_void) -> u64 {
        (block.addr() as u64).wrapping_sub(self.start)
    }

    /// Returns the block in use that begins at an address.
    pub(super) fn find(&self, block: *const c_void) -> Outcome<RawBlock> {
        let found = self.blocks.get(self.offset(block));
        found.ok_or_else(|| no_block(block))
    }

    /// Takes a block from the program.
    ///
    /// # Safety
    /// The program no longer uses it.
    #[inline]
    unsafe fn take(&self, block: *mut c_void) -> Outcome<Block> {
        match self.blocks.take(self.offset(block)) {
            // SAFETY: the table has blocks of this heap that were turned into numbers, each until it is taken. Those
            // of small blocks are as requested.
            Some(raw) => Ok(unsafe { Block::from_raw(&self.heap, raw) }),
            None => Err(no_block(block)),
        }
    }

    /// Takes a block from the program and frees it by `free`. Where that fails, the program has it again. A null pointer is left
    /// alone.
    ///
    /// # Safety
    /// No thread uses the block at `block`, if there is one, and no GPU beside the work that `free` waits for.
    #[inline]
    pub(super) unsafe fn free(
        &self,
        block: *mut c_void,
        free: impl FnOnce(Block) -> Result<(), NotFreed>,
    ) -> Outcome {
        if block.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        free(unsafe { self.take(block)? }).or_else(|refused| {
            self.keep(refused.block)?;
            Err((*refused.error).into())
        })
    }

    /// # Safety
    /// Nothing uses the bytes that the block loses, and no other call uses the block.
    pub(super) unsafe fn resize(&self, block: *mut c_void, size: usize) -> Outcome<bool> {
        let raw = self.find(block)?;
        if raw.is_small() && !self.blocks.is_debug() {
            // It has all bytes of its class, and keeps them.
            return Ok(size > 0 && size as u64 <= raw.bytes);
        }
        // SAFETY: in use, as found; it is turned into numbers again below, and leaks if the resize panics.
        let mut block = ManuallyDrop::new(unsafe { Block::from_raw(&self.heap, raw) });
        let resized = block.resize_in_place(size as u64);
        match self.blocks.put(ManuallyDrop::into_inner(block).into_raw()) {
            true => Ok(resized),
            false => Err(beyond_the_limit()),
        }
    }

    /// Calls `send` with a block as memory to share. The block stays the program's.
    pub(crate) fn with_shared(
        &self,
        block: *const c_void,
        send: impl FnOnce(&Shared) -> Outcome,
    ) -> Outcome {
        let raw = self.find(block)?;
        // SAFETY: in use, as found. This owner is never dropped, so the block stays in use; no code reads its bytes
        // through it.
        let block = ManuallyDrop::new(Arc::new(unsafe { Block::from_raw(&self.heap, raw) }));
        let sent = Arc::clone(&block)
            .share_arc()
            .map_err(Failure::from)
            .and_then(|shared| send(&shared));
        // The shared block is dropped: this is the last owner, which ends without freeing.
        match Arc::try_unwrap(ManuallyDrop::into_inner(block)) {
            Ok(block) => {
                block.into_raw();
            }
            // `send` kept an owner. It must not be the last one: it would free a block that the program still has.
            Err(kept) => std::mem::forget(kept),
        }
        sent
    }

    /// Fails while blocks are in use: all of a heap's blocks are the program's.
    pub(super) fn expect_no_blocks(&self) -> Outcome {
        match self.heap.stats().live_blocks {
            0 => Ok(()),
            count => {
                let held = Error::StillHeld {
                    name: "the heap".into(),
                    holders: vec![format!("{count} of its blocks, which are not freed")],
                };
                let remedy = "free the blocks with egm_heap_free, then destroy the heap";
                Err(Failure::from(held).with_remedy(remedy))
            }
        }
    }
}

/// Frees a block that nothing uses.
#[inline]
pub(super) fn free_now(block: Block) -> Result<(), NotFreed> {
    drop(block);
    Ok(())
}

#[cold]
fn wrong_layout(size: usize, align: usize) -> Failure {
    match align.is_power_of_two() {
        false => Failure::invalid("align", format!("{align} is not a power of two")),
        true => {
            let why =
                format!("{size} bytes at a multiple of {align} are more than an address space has");
            Failure::invalid("size", why)
        }
    }
}

#[cold]
fn no_block(block: *const c_void) -> Failure {
    let why = format!("no block of this heap that is in use begins at {block:p}");
    Failure::invalid("block", why)
}

#[cold]
fn beyond_the_limit() -> Failure {
    Failure::panicked(&"a block lies beyond its heap's limit")
}

#[cfg(test)]
mod tests {
    use egmem::Machine;
    use egmem::driver::NodeId;

    use super::*;

    #[test]
    fn a_block_whose_sharing_outlasts_the_call_is_freed_once_and_by_the_program() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let heap = Heap::on(NodeId(0)).limit(64 << 20).shareable();
        let heap = heap.build(&driver).unwrap();
        let heap = egm_heap {
            start: heap.device_ptr().0,
            blocks: Blocks::new(heap.limit(), false).unwrap(),
            heap,
        };
        let ok = |outcome: Outcome| assert!(outcome.is_ok());
        let block = heap.allocate(4096, 0).unwrap_or_else(|_| panic!());
        let mut kept = None;
        ok(heap.with_shared(block, |shared| {
            kept = Some(shared.clone());
            Ok(())
        }));
        drop(kept);
        assert_eq!(heap.heap.stats().live_blocks, 1, "the program has it");
        ok(heap.with_shared(block, |_| Ok(())));
        // SAFETY: nothing uses the block.
        ok(unsafe { heap.free(block, free_now) });
        assert_eq!(heap.heap.stats().live_blocks, 0);
    }
}
