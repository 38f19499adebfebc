//! Arenas: many allocations that end together.

use std::alloc::Layout;
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;

use super::heap::no_bytes;
use super::piece::{Key, Piece};
use super::{Block, Heap, NotAllFreed};
use crate::{Error, Result, Stream};

/// The sizes of an arena's first block, and of its largest, in bytes. Each has at least twice as many as the one
/// before.
const FIRST: u64 = 64 << 10;
const MOST: u64 = 4 << 20;

/// The alignment of every allocation: no two share a word, which the CPU's views need.
const UNIT: u64 = 16;

/// Allocates for a request, a step or a frame, and frees all at once: an allocation moves a pointer within a block of
/// the heap, from 64 KiB on and up to 4 MiB each, and is not freed by itself. [`Heap::arena`] creates one.
///
/// [`reset`](Self::reset) frees all and keeps the last block for the next time; dropping the arena frees that too.
/// Both are host-ordered, as [dropping a block](Block#dropping-is-host-ordered) is: GPU work on the allocations must
/// have ended, or be named by [`free_all_after`](Self::free_all_after).
///
/// An arena is [`Send`], not [`Sync`]: each thread has its own. Its allocations are both.
///
/// ```
/// use std::alloc::Layout;
/// use egmem::driver::NodeId;
/// use egmem::{Driver, Heap, Machine, Stream};
///
/// let driver = Driver::simulated(Machine::gh200())?;
/// let heap = Heap::on(NodeId(0)).limit(1 << 30).build(&driver)?;
/// let stream = Stream::new(&driver, 0)?;
/// let mut arena = heap.arena();
/// for request in 0..3_u64 {
///     let ids = arena.allocate(Layout::new::<[u64; 100]>())?;
///     let rows = arena.allocate(Layout::new::<[f32; 5000]>())?;
///     ids.put(0, request)?;
///     // … kernels on `stream` use rows.device_ptr()
///     arena.free_all_after(&stream).map_err(egmem::heap::NotAllFreed::forget)?;
/// }
/// # Ok::<(), egmem::Error>(())
/// ```
pub struct Arena {
    heap: Heap,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Blocks of one allocation each, and those of several, the last of which is the one that allocations come from.
    own: Vec<Block>,
    shared: Vec<Block>,
    /// The free part of that block, in bytes from the heap's start; empty if there is none.
    at: u64,
    end: u64,
    /// The least size of the next one, unless that is the first.
    next: u64,
}

impl State {
    /// Returns the offset of `bytes` in the present block, at a multiple of `align` of an address, if there is room.
    fn bump(&mut self, start: u64, bytes: u64, align: u64) -> Option<u64> {
        let at = (start + self.at).checked_next_multiple_of(align)? - start;
        let end = at.checked_add(bytes)?;
        if end > self.end {
            return None;
        }
        self.at = end;
        Some(at)
    }
}

impl Heap {
    /// Creates an arena, which takes nothing of the heap before its first allocation.
    pub fn arena(&self) -> Arena {
        Arena {
            heap: self.clone(),
            state: RefCell::default(),
        }
    }
}

impl Arena {
    /// Allocates `layout`'s size at a multiple of its alignment. The bytes are not initialised. They are free again
    /// when the arena is reset or dropped, which no allocation outlives.
    ///
    /// # Errors
    /// As [`Heap::allocate`].
    pub fn allocate(&self, layout: Layout) -> Result<ArenaBlock<'_>> {
        let (bytes, align) = (layout.size() as u64, (layout.align() as u64).max(UNIT));
        if bytes == 0 {
            return Err(no_bytes());
        }
        let inner = self.heap.inner();
        // A forked child must get no bytes that its parent may get too.
        inner.expect_this_process()?;
        let mut state = self.state.borrow_mut();
        let padded = bytes.next_multiple_of(UNIT); // a layout has less than 2^63
        let offset = match state.bump(inner.facts.start, padded, align) {
            Some(offset) => offset,
            None => self.more(&mut state, padded, align)?,
        };
        let key = Key::NONE;
        let piece = Piece { offset, bytes, key };
        // SAFETY: the piece is part of a block of the arena, and of no other allocation since the last reset. It is
        // never dropped, so it is not freed by itself.
        let block = ManuallyDrop::new(unsafe { Block::new(inner, piece) });
        Ok(ArenaBlock {
            block,
            arena: PhantomData,
        })
    }

    /// Allocates from a new block of the heap: one of its own for more than half of the largest block.
    #[cold]
    fn more(&self, state: &mut State, bytes: u64, align: u64) -> Result<u64> {
        let is_own = bytes > MOST / 2;
        let size = if is_own {
            bytes
        } else {
            state.next.max(FIRST).max((2 * bytes).next_power_of_two())
        };
        let layout = Layout::from_size_align(size as usize, align as usize).map_err(|_| {
            Error::invalid("size", format!("{size} bytes exceed the address space"))
        })?;
        let block = self.heap.allocate(layout)?;
        let offset = block.offset();
        if is_own {
            state.own.push(block);
        } else {
            (state.at, state.end) = (offset + bytes, offset + size);
            state.next = (size * 2).min(MOST);
            state.shared.push(block);
        }
        Ok(offset)
    }

    /// Frees all allocations, and keeps the last block that is not one allocation's alone.
    pub fn reset(&mut self) {
        let state = self.state.get_mut();
        state.own.clear();
        let before_last = state.shared.len().saturating_sub(1);
        state.shared.drain(..before_last);
        if let [block] = &state.shared[..] {
            state.at = block.offset();
        }
    }

    /// Frees all allocations, with all blocks, once all work submitted to `stream` so far has run: like
    /// [`Heap::free_all_after`], with one event for all of them.
    ///
    /// # Errors
    /// As [`Heap::free_all_after`]. The error then has the arena's blocks, and the arena is empty anyway.
    #[track_caller]
    pub fn free_all_after(&mut self, stream: &Stream) -> Result<(), NotAllFreed> {
        let State { own, shared, .. } = std::mem::take(self.state.get_mut());
        self.heap
            .free_all_after(own.into_iter().chain(shared), stream)
    }

    /// Returns the bytes of the heap's blocks that the arena has.
    pub fn taken(&self) -> u64 {
        let state = self.state.borrow();
        state.own.iter().chain(&state.shared).map(Block::len).sum()
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("heap", &self.heap)
            .field("taken", &self.taken())
            .finish()
    }
}

/// An allocation of an [`Arena`], used as a [`Block`]. Dropping it frees nothing.
#[derive(Debug)]
pub struct ArenaBlock<'a> {
    block: ManuallyDrop<Block>,
    /// The arena gives these bytes to no other allocation until it is reset or dropped. Both need the end of this
    /// borrow.
    arena: PhantomData<&'a Block>,
}

impl Deref for ArenaBlock<'_> {
    type Target = Block;

    fn deref(&self) -> &Block {
        &self.block
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::NodeId;
    use crate::{Driver, Machine};

    fn layout(bytes: u64, align: u64) -> Layout {
        Layout::from_size_align(bytes as usize, align as usize).unwrap()
    }

    fn heap() -> Heap {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap()
    }

    proptest::proptest! {
        #![proptest_config(proptest::test_runner::Config::with_cases(48))]
        #[test]
        fn allocations_share_no_byte_and_lie_in_the_arenas_blocks(
            rounds in proptest::collection::vec(
                proptest::collection::vec((0_u32..18, 1_u64..300, 0_u32..13), 1..60),
                1..4,
            ),
        ) {
            let heap = heap();
            let mut arena = heap.arena();
            for (round, requests) in rounds.iter().enumerate() {
                let mut all: Vec<ArenaBlock<'_>> = Vec::new();
                for &(log, part, align) in requests {
                    let bytes = (((1 << log) * part) / 256).max(1);
                    let block = arena.allocate(layout(bytes, 1 << align)).unwrap();
                    assert_eq!(block.len(), bytes);
                    assert!(block.device_ptr().0.is_multiple_of(1 << align));
                    block.write_at(0, &vec![all.len() as u8; bytes as usize]).unwrap();
                    all.push(block);
                }
                for (index, block) in all.iter().enumerate() {
                    let mut bytes = vec![0; block.len() as usize];
                    block.read_at(0, &mut bytes).unwrap();
                    assert!(bytes.iter().all(|&byte| byte == index as u8));
                    let state = arena.state.borrow();
                    let end = block.offset() + block.len();
                    let holds = |own: &Block| own.offset() <= block.offset() && end <= own.offset() + own.len();
                    assert!(state.own.iter().chain(&state.shared).any(holds));
                }
                assert_eq!(heap.stats().live, arena.taken());
                drop(all);
                if round % 2 == 0 {
                    arena.reset();
                    assert!(heap.stats().live_blocks <= 1);
                }
            }
            drop(arena);
            assert_eq!(heap.stats().live_blocks, 0);
        }
    }

    #[test]
    fn blocks_double_and_a_reset_keeps_the_last_of_them() {
        let heap = heap();
        let mut arena = heap.arena();
        assert_eq!(heap.stats().live_blocks, 0);
        let small = layout(1 << 10, 1);
        let mut sizes = Vec::new();
        for _ in 0..9 << 10 {
            arena.allocate(small).unwrap();
            if sizes.last() != Some(&arena.taken()) {
                sizes.push(arena.taken());
            }
        }
        let expected = [64, 192, 448, 960, 1984, 4032, 8128, 12224].map(|kib| kib << 10);
        assert_eq!(sizes, expected);
        // Of its own, and not the one that is kept.
        arena.allocate(layout(10 << 20, 1)).unwrap();
        arena.reset();
        assert_eq!((arena.taken(), heap.stats().live_blocks), (4 << 20, 1));
        for _ in 0..4 << 10 {
            arena.allocate(small).unwrap();
        }
        assert_eq!(arena.taken(), 4 << 20);
        arena.allocate(small).unwrap();
        assert_eq!(arena.taken(), 8 << 20);
    }

    #[test]
    fn a_request_like_the_one_before_needs_nothing_of_the_heap() {
        let heap = heap();
        let mut arena = heap.arena();
        for _ in 0..10 {
            for bytes in [8_000, 80_000, 1 << 20] {
                arena.allocate(layout(bytes, 64)).unwrap();
            }
            arena.reset();
        }
        // 64 KiB, 256 KiB and 2 MiB, the last of which then does for all three.
        assert_eq!((heap.stats().allocated_blocks, arena.taken()), (3, 2 << 20));
    }

    #[test]
    fn large_ones_alone_leave_nothing_after_a_reset() {
        let heap = heap();
        let mut arena = heap.arena();
        arena.allocate(layout(10 << 20, 4096)).unwrap();
        arena.reset();
        assert_eq!((arena.taken(), heap.stats().live_blocks), (0, 0));
        for layout in [layout(0, 1), layout(isize::MAX as u64 & !15, 1)] {
            let error = arena.allocate(layout).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
        assert_eq!((arena.taken(), heap.stats().live_blocks), (0, 0));
    }

    #[test]
    fn all_is_freed_after_a_stream_with_one_event() {
        use crate::driver::{Call, Code};
        let heap = heap();
        let stream = Stream::new(heap.driver(), 0).unwrap();
        let mut arena = heap.arena();
        for _ in 0..100 {
            arena.allocate(layout(20 << 10, 1)).unwrap();
        }
        let blocks = heap.stats().live_blocks;
        let sim = heap.driver().sim().unwrap();
        let records = sim.count(Call::EventRecord);
        arena.free_all_after(&stream).unwrap();
        assert_eq!(sim.count(Call::EventRecord), records + 1);
        assert_eq!((arena.taken(), heap.stats().deferred_blocks), (0, blocks));
        arena.allocate(layout(1, 1)).unwrap();
        sim.fail(Call::EventRecord, 1, Code::UNKNOWN);
        let refused = arena.free_all_after(&stream).unwrap_err();
        assert_eq!((refused.blocks.len(), arena.taken()), (1, 0));
        assert_eq!(heap.collect_all(), Ok(blocks as usize));
    }
}
