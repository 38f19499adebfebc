//! Deferred frees: many blocks at once, and the wait for all of them.

use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::Location as Caller;
use std::sync::Arc;

use super::debug::blocks;
use super::deferred::Deferred;
use super::inner::HeapInner;
use super::lifetime::Mapped;
use super::piece::Piece;
use super::{Block, Heap};
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
        let pieces = blocks.iter().map(|block| *block.piece());
        let mut list: Vec<Piece> = pieces.clone().collect();
        let put = |deferred: &mut Deferred<Piece>| deferred.after_stream_all(stream, &mut list);
        let freed = heap.free_later(pieces, Caller::caller(), put);
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
    /// shows the blocks as used, and other threads that are short of memory do not get those whose work has
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
        pieces: impl Iterator<Item = Piece> + Clone,
        place: &'static Caller<'static>,
        put: impl FnOnce(&mut Deferred<Piece>) -> Result<()>,
    ) -> Result<()> {
        let watched = || {
            let pieces = pieces.clone();
            pieces.filter_map(|piece| Some((self.watch.as_ref()?, piece.offset)))
        };
        watched().for_each(|(watch, offset)| watch.defer(offset, Some(place)));
        let put = match self.deferral.deferred().as_mut() {
            Some(deferred) => put(deferred),
            None => Ok(()), // unreachable: the blocks keep the heap alive
        };
        match put {
            Ok(()) => pieces
                .clone()
                .for_each(|piece| self.note_freed_later(piece.bytes)),
            Err(_) => watched().for_each(|(watch, offset)| watch.defer(offset, None)),
        }
        put
    }

    /// Implements [`Heap::collect_all`].
    pub(super) fn wait_and_collect(&self) -> Result<usize> {
        // The caller has a handle, so no thread waits for this one to leave.
        let Some(mapped) = self.lifetime.enter() else {
            return Ok(0);
        };
        let take_back = |passed: &[Piece]| self.take_back_all_passed(passed, &mapped);
        let result = self.deferral.wait(take_back);
        drop(mapped);
        // Without a block nothing was taken back.
        if result != Ok(0) {
            self.tell();
        }
        result
    }

    /// Returns blocks whose GPU work has finished to the core.
    pub(super) fn take_back_all_passed(&self, passed: &[Piece], _mapped: &Mapped<'_>) {
        for piece in passed {
            // SAFETY: its user freed it, the GPU's work is done, and the memory stays mapped.
            unsafe { self.take_back_passed(piece) };
        }
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
        let were = if self.blocks.len() == 1 {
            "was"
        } else {
            "were"
        };
        let blocks = blocks(self.blocks.len() as u64);
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
    use std::time::Duration;

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
        let asked = sim.count(Call::EventQuery);
        sim.fail(Call::EventQuery, 1, Code::NOT_READY);
        let first = heap.inner().deferral.turn_to_wait();
        thread::scope(|scope| {
            let second = scope.spawn(|| heap.allocate(all).map(drop));
            while sim.count(Call::EventQuery) == asked {
                thread::yield_now();
            }
            // Gives the thread time to reach its turn.
            thread::sleep(Duration::from_millis(200));
            assert_eq!(heap.collect().unwrap(), 1);
            drop(first);
            second.join().unwrap().unwrap();
        });
    }
}
