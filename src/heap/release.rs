//! How blocks are freed: at once, as the options require, or once GPU work has run.

use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::Location as Caller;
use std::sync::Arc;

use super::debug::{Left, blocks};
use super::deferred::Deferred;
use super::inner::HeapInner;
use super::piece::Piece;
use super::{Block, Heap};
use crate::driver::DevicePtr;
use crate::{Error, Result, Stream};

impl Heap {
    /// Frees many blocks once all work submitted to `stream` so far has run: like [`Block::free_after`], with
    /// one event for all of them.
    ///
    /// Source: `cuEventRecord`, `cuEventQuery`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another heap's block, for another driver's stream, and for one that is
    /// being captured into a graph; the driver's errors. The error then contains all of the blocks, and none
    /// is freed: see [`Block::free_after`].
    #[track_caller]
    pub fn free_all_after(
        &self,
        blocks: impl IntoIterator<Item = Block>,
        stream: &Stream,
    ) -> Result<(), NotAllFreed> {
        let blocks: Vec<Block> = blocks.into_iter().collect();
        let heap = self.inner();
        if let Err(error) = heap.expect_this_process() {
            return Err(NotAllFreed::new(error, blocks));
        }
        let foreign = |block: &Block| !std::ptr::eq(block.heap(), &**heap);
        if let Some(at) = blocks.iter().position(foreign) {
            let why = format!("number {at} of them, counted from 0, is another heap's");
            return Err(NotAllFreed::new(Error::invalid("blocks", why), blocks));
        }
        let blocks = ManuallyDrop::new(blocks);
        let pieces: Vec<Piece> = blocks.iter().map(|block| *block.piece()).collect();
        let mut list = pieces.clone();
        let put = |deferred: &mut Deferred<Piece>| deferred.after_stream(stream, &mut list);
        let freed = heap.free_later(&pieces, Caller::caller(), put);
        let blocks = ManuallyDrop::into_inner(blocks);
        match freed {
            Ok(()) => blocks.into_iter().for_each(std::mem::forget),
            Err(error) => return Err(NotAllFreed::new(error, blocks)),
        }
        Ok(())
    }

    /// Waits for the GPU work that blocks were [freed after](Block::free_after), and collects them; returns
    /// their number. Blocks that other threads free meanwhile need not be among them.
    ///
    /// The wait holds no lock of the heap: other threads allocate and free. It never ends if the GPU work
    /// waits for something that this thread has yet to do. Until it ends, [`occupancy`](Self::occupancy)
    /// shows the blocks as used (in [debug mode](super::debug) as deferred), and other threads that are short of memory do not get those whose work has
    /// finished, unless they [wait](super::HeapOptions::wait_for_gpu) too.
    ///
    /// Source: `cuEventSynchronize`.
    ///
    /// # Errors
    /// The driver's errors; blocks whose work has finished are collected anyway, and the rest stay
    /// deferred.
    pub fn collect_all(&self) -> Result<usize> {
        self.inner().expect_this_process()?;
        self.inner().wait_and_collect()
    }
}

impl HeapInner {
    /// Calls `put`, which adds `pieces` to the blocks that wait for GPU work, and counts them as freed. After an error of
    /// `put` they are in use as before.
    pub(super) fn free_later(
        self: &Arc<Self>,
        pieces: &[Piece],
        place: &'static Caller<'static>,
        put: impl FnOnce(&mut Deferred<Piece>) -> Result<()>,
    ) -> Result<()> {
        // Before another thread can find that their work has passed.
        if let Some(watch) = &self.watch {
            watch.defer(pieces, Some(place));
        }
        let put = match self.deferral.deferred().as_mut() {
            Some(deferred) => put(deferred),
            None => Ok(()), // unreachable: the blocks keep the heap alive
        };
        match (&put, &self.watch) {
            (Ok(()), _) => pieces
                .iter()
                .for_each(|piece| self.note_freed_later(piece.bytes)),
            (Err(_), Some(watch)) => watch.defer(pieces, None),
            (Err(_), None) => {}
        }
        put
    }

    /// Implements [`Heap::collect_all`].
    pub(super) fn wait_and_collect(&self) -> Result<usize> {
        let result = self.deferral.wait(|passed| self.take_back_passed(passed));
        // Without a block nothing was taken back.
        if result != Ok(0) {
            self.tell();
        }
        result
    }

    /// Collects the blocks whose GPU work has finished; returns their number.
    pub(super) fn collect_passed(&self) -> Result<usize> {
        let take_back = |passed: &[Piece]| self.take_back_passed(passed);
        let result = self.deferral.collect(take_back);
        self.tell();
        result
    }

    /// Returns blocks whose GPU work has finished to the core. The caller has a turn of the deferral, which keeps the memory
    /// mapped.
    fn take_back_passed(&self, passed: &[Piece]) {
        for piece in passed {
            match &self.watch {
                Some(watch) => {
                    watch.free(piece.offset, false, &|left| self.take_back_left(&left));
                }
                // SAFETY: its user freed it, the GPU's work is done, and the memory stays mapped.
                None => unsafe { self.take_back_scrubbed(piece) },
            }
        }
    }

    /// Frees a block as the heap's options require. Does nothing in a forked child.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    #[inline]
    pub(super) unsafe fn release(&self, piece: &Piece) {
        if self.facts.plain_in.is_current() {
            // SAFETY: the caller's promise.
            unsafe { self.free(piece) }
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.release_with_care(piece) }
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn release_with_care(&self, piece: &Piece) {
        if !self.facts.born.is_current() {
            // In a forked child: locks may never be released, and the bytes are the parent's.
            return;
        }
        if let Some(watch) = &self.watch {
            // Keeps the heap alive until this returns.
            let Some(this) = self.this.upgrade() else {
                return; // unreachable: the block keeps the heap alive
            };
            if watch.free(piece.offset, true, &|left| self.take_back_left(&left)) {
                this.count_freed(piece.bytes);
            }
            this.tell();
            return;
        }
        // SAFETY: the caller promises that the block is no longer used.
        if unsafe { self.may_be_used_again(piece) } {
            // SAFETY: the caller's promise.
            unsafe { self.free(piece) }
        } else if let Some(this) = self.this.upgrade() {
            this.note_freed_later(piece.bytes);
            this.tell();
        }
    }

    /// Returns a block directly to the core, scrubbed if the heap scrubs.
    ///
    /// # Safety
    /// The piece has no owner any more.
    unsafe fn take_back_scrubbed(&self, piece: &Piece) {
        // SAFETY: the caller's promise.
        if unsafe { self.may_be_used_again(piece) } {
            self.take_back(*piece);
        }
    }

    /// Returns a block that has left the debug mode's quarantine directly to the core.
    pub(super) fn take_back_left(&self, left: &Left) {
        // SAFETY: the block was freed and has left the table, so nothing else uses it.
        unsafe { self.take_back_scrubbed(left.piece()) };
    }

    /// Scrubs the block if the heap scrubs; returns whether it may be given to another owner.
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    unsafe fn may_be_used_again(&self, piece: &Piece) -> bool {
        if !self.facts.scrub {
            return true;
        }
        // SAFETY: the caller's promise.
        match unsafe { self.zero(piece) } {
            Ok(()) => true,
            Err(error) => {
                // Leaking the block is better than letting its next owner read the bytes.
                let bytes = piece.bytes;
                self.reports.add(move || {
                    tracing::error!(%error, bytes, "a block cannot be scrubbed and is withheld from reuse");
                });
                false
            }
        }
    }

    /// Overwrites all bytes that a block takes with zeros and waits for the end. In debug mode, leaves the
    /// bytes beside the block's own.
    ///
    /// # Errors
    /// As [`ByteAccess::fill`](super::bytes::ByteAccess::fill).
    ///
    /// # Safety
    /// The piece is in use, and nothing else uses it.
    pub(super) unsafe fn zero(&self, piece: &Piece) -> Result<()> {
        let bytes = match self.watch {
            Some(_) => piece.bytes,
            None => piece.taken(),
        };
        // SAFETY: the caller's promise.
        unsafe { self.zero_range(piece.offset, bytes) }
    }

    /// Overwrites a part of a block: `bytes` from `offset`, counted from the heap's start, both multiples of
    /// 16.
    ///
    /// # Errors
    /// As [`ByteAccess::fill`](super::bytes::ByteAccess::fill).
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    pub(super) unsafe fn zero_range(&self, offset: u64, bytes: u64) -> Result<()> {
        let start = DevicePtr(self.facts.start + offset);
        // SAFETY: the heap's memory is mapped and granted while it has blocks. The caller promises that nothing else uses
        // this one.
        unsafe { self.facts.bytes().fill(start, bytes, 0) }
    }
}

/// The blocks that were not freed, and the reason.
#[derive(Debug)]
pub struct NotAllFreed {
    /// The heap's or the driver's error.
    pub error: Box<Error>,
    /// The blocks, unchanged.
    pub blocks: Vec<Block>,
}

impl NotAllFreed {
    fn new(error: Error, blocks: Vec<Block>) -> Self {
        Self {
            error: Box::new(error),
            blocks,
        }
    }

    /// Returns the error and leaks the blocks, as [`NotFreed::forget`](super::NotFreed::forget) does.
    pub fn forget(self) -> Error {
        self.blocks.into_iter().for_each(std::mem::forget);
        *self.error
    }
}

impl fmt::Display for NotAllFreed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.blocks.len() as u64;
        let (blocks, were) = (blocks(number), if number == 1 { "was" } else { "were" });
        write!(f, "{blocks} {were} not given back: {}", self.error)
    }
}

impl std::error::Error for NotAllFreed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::Layout;
    use std::thread;
    use std::time::{Duration, Instant};

    use crate::driver::sim::Machine;
    use crate::driver::{Call, Code, NodeId};
    use crate::{Driver, Heap, Stream};

    #[test]
    fn who_waits_behind_another_has_what_that_one_takes_back() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let heap = Heap::on(NodeId(0))
            .limit(8 << 20)
            .wait_for_gpu(true)
            .build(&driver)
            .unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let all = Layout::new::<[u8; 8 << 20]>();
        let block = heap.allocate(all).unwrap();
        block.free_after(&stream).unwrap();
        let sim = driver.sim().unwrap();
        sim.fail(Call::EventQuery, 1, Code::NOT_READY);
        let first = heap.inner().deferral.turn_to_wait();
        thread::scope(|scope| {
            let second = scope.spawn(|| heap.allocate(all).map(drop));
            let deadline = Instant::now() + Duration::from_secs(60);
            // It has found no block whose work is done, and has nothing to do before it has the turn.
            while heap.inner().deferral.arrived() == 0 && Instant::now() < deadline {
                thread::yield_now();
            }
            assert_eq!(heap.inner().deferral.arrived(), 1);
            assert_eq!(heap.collect().unwrap(), 1);
            drop(first);
            second.join().unwrap().unwrap();
        });
    }
    /// The thread that has the turn stands for the background thread while it scrubs a block.
    #[test]
    fn a_heap_unmaps_nothing_while_a_thread_has_a_turn() {
        for waits in [false, true] {
            let driver = Driver::simulated(Machine::gh200()).unwrap();
            let unmapped = || driver.sim().unwrap().count(Call::MemUnmap);
            let heap = Heap::on(NodeId(0)).limit(8 << 20).build(&driver).unwrap();
            let block = heap.allocate(Layout::new::<[u8; 1 << 20]>()).unwrap();
            let inner = std::sync::Arc::clone(heap.inner());
            let turn = if waits {
                inner.deferral.turn_to_wait()
            } else {
                inner.deferral.turn_to_collect()
            };
            thread::scope(|scope| {
                let ending = scope.spawn(|| drop((block, heap)));
                let until = Instant::now() + Duration::from_millis(100);
                while Instant::now() < until {
                    assert_eq!(unmapped(), 0, "memory is unmapped while a thread uses it");
                    assert!(!ending.is_finished());
                    thread::yield_now();
                }
                drop(turn);
            });
            assert!(unmapped() > 0);
        }
    }

    #[test]
    fn after_the_end_no_block_is_collected() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let heap = Heap::on(NodeId(0)).limit(8 << 20).build(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let block = heap.allocate(Layout::new::<[u8; 1 << 20]>()).unwrap();
        block.free_after(&stream).unwrap();
        let inner = std::sync::Arc::clone(heap.inner());
        drop(heap);
        assert_eq!(inner.collect_passed().unwrap(), 0);
        assert_eq!(inner.wait_and_collect().unwrap(), 0);
        assert!(
            inner.deferral.end().is_none(),
            "only the first caller ends it"
        );
    }
}
