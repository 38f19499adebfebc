//! Runs a sequence on a contestant, on one thread.

use std::alloc::Layout;
use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::entrant::Entrant;
use crate::sequence::{Event, Sequence};
use egmem_replay::contestants::{Contestant, Room, Visitor};

/// The work of one thread while the clock runs.
#[derive(Clone)]
pub enum Work {
    /// Allocates and frees one block of `layout`, `count` times.
    Pairs {
        /// The block.
        layout: Layout,
        /// How many times.
        count: u64,
    },
    /// A sequence, all blocks aligned to the second.
    Events(Arc<Sequence>, usize),
}

impl Work {
    /// The divisor of a pass's time: pairs, or allocations and frees together.
    pub fn operations(&self) -> u64 {
        match self {
            Self::Pairs { count, .. } => *count,
            Self::Events(sequence, _) => sequence.timed.len() as u64,
        }
    }

    /// Room in plenty: twice the peak of live bytes, and 64 MiB.
    pub fn room(&self) -> Room {
        match self {
            Self::Pairs { layout, .. } => Room {
                capacity: (2 * layout.size() as u64).max(64 << 20),
                blocks: 16,
                align: layout.align() as u64,
            },
            Self::Events(sequence, align) => Room {
                capacity: 2 * sequence.peak + (64 << 20),
                blocks: sequence.blocks,
                align: *align as u64,
            },
        }
    }
}

/// Figures of a sequence besides time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Facts {
    /// Allocations that found no room.
    pub failures: u64,
    /// From the first byte ever given out to the last, in bytes.
    pub span: u64,
}

/// A contestant with work.
pub trait Runner {
    /// Does it all once, for its figures.
    fn look(&mut self) -> Facts;
    /// Does it all; returns the duration of the timed part.
    fn time(&mut self) -> Duration;
}

/// Makes a contestant for `work`.
///
/// # Errors
/// If the contestant cannot be made.
pub fn start(kind: Entrant, room: Room, work: &Work) -> io::Result<Box<dyn Runner>> {
    kind.with(room, Start(work.clone()))
}

struct Start(Work);

impl Visitor for Start {
    type Output = Box<dyn Runner>;

    fn visit<C: Contestant + Send + 'static>(self, contestant: C) -> Box<dyn Runner> {
        match self.0 {
            Work::Pairs { layout, count } => Box::new(Pairs {
                contestant,
                layout,
                count,
            }),
            Work::Events(sequence, align) => Box::new(Events {
                contestant,
                slots: Slots::new(sequence.slots, align),
                sequence,
            }),
        }
    }
}

struct Pairs<C> {
    contestant: C,
    layout: Layout,
    count: u64,
}

/// Allocates and frees, `count` times.
#[inline]
pub fn pairs<C: Contestant>(contestant: &mut C, layout: Layout, count: u64) {
    for _ in 0..count {
        let block = contestant
            .allocate(black_box(layout))
            .expect("room for a block");
        // The compiler knows malloc and free, and would leave out both.
        black_box(contestant.start(&block));
        // SAFETY: just allocated here.
        unsafe { contestant.free(block, layout) };
    }
}

impl<C: Contestant> Runner for Pairs<C> {
    fn look(&mut self) -> Facts {
        pairs(&mut self.contestant, self.layout, self.count);
        Facts::default()
    }

    fn time(&mut self) -> Duration {
        let started = clock::thread();
        pairs(&mut self.contestant, self.layout, self.count);
        clock::thread() - started
    }
}

/// Where a sequence's blocks are kept.
pub struct Slots<B> {
    blocks: Vec<Option<B>>,
    align: usize,
}

impl<B> Slots<B> {
    /// All empty.
    pub fn new(slots: usize, align: usize) -> Self {
        assert!(align.is_power_of_two());
        Self {
            blocks: (0..slots).map(|_| None).collect(),
            align,
        }
    }

    fn layout(&self, event: Event) -> Layout {
        // SAFETY: the alignment was checked, and a u32's worth of bytes is far from overflow.
        unsafe { Layout::from_size_align_unchecked(event.size(), self.align) }
    }

    /// Plays `events`, and returns how many allocations found no room. Their frees are left out.
    #[inline]
    pub fn run<C: Contestant<Block = B>>(&mut self, contestant: &mut C, events: &[Event]) -> u64 {
        let mut failures = 0;
        for &event in events {
            let layout = self.layout(event);
            let slot = &mut self.blocks[event.slot()];
            if event.is_free() {
                if let Some(block) = slot.take() {
                    // SAFETY: the slot's block, which this contestant allocated with the event's size.
                    unsafe { contestant.free(block, layout) };
                }
            } else {
                *slot = contestant.allocate(layout);
                failures += u64::from(slot.is_none());
            }
        }
        failures
    }

    /// As [`run`](Self::run), looking at where blocks are.
    pub fn look<C: Contestant<Block = B>>(
        &mut self,
        contestant: &mut C,
        events: &[Event],
        range: &mut (u64, u64),
    ) -> u64 {
        let mut failures = 0;
        for event in events {
            failures += self.run(contestant, std::slice::from_ref(event));
            if let Some(block) = &self.blocks[event.slot()] {
                let start = contestant.start(block);
                range.0 = range.0.min(start);
                range.1 = range.1.max(start + event.size() as u64);
            }
        }
        failures
    }
}

struct Events<C: Contestant> {
    contestant: C,
    slots: Slots<C::Block>,
    sequence: Arc<Sequence>,
}

impl<C: Contestant> Runner for Events<C> {
    fn look(&mut self) -> Facts {
        let Sequence {
            before,
            timed,
            after,
            ..
        } = &*self.sequence;
        let mut range = (u64::MAX, 0);
        let mut failures = 0;
        for events in [before, timed, after] {
            failures += self.slots.look(&mut self.contestant, events, &mut range);
        }
        Facts {
            failures,
            span: range.1.saturating_sub(range.0),
        }
    }

    fn time(&mut self) -> Duration {
        let Sequence {
            before,
            timed,
            after,
            ..
        } = &*self.sequence;
        self.slots.run(&mut self.contestant, before);
        let started = clock::thread();
        self.slots.run(&mut self.contestant, timed);
        let elapsed = clock::thread() - started;
        self.slots.run(&mut self.contestant, after);
        elapsed
    }
}
