//! Replays a trace on an allocator: once slowly for its other figures, then again and again for time.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::trace::{Event, Trace};
use egmem_replay::contestants::Contestant;

/// A trace with the layouts that allocators take.
pub struct Script<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// One for each event.
    pub layouts: Vec<Layout>,
}

impl<'a> Script<'a> {
    /// All blocks aligned to `align` bytes, a power of two up to 1 GiB.
    pub fn new(trace: &'a Trace, align: usize) -> Option<Self> {
        let layout = |event: &Event| Layout::from_size_align(event.size as usize, align).ok();
        Some(Self {
            trace,
            layouts: trace.events.iter().map(layout).collect::<Option<_>>()?,
        })
    }

    /// Events with their layouts.
    fn steps(&self) -> impl Iterator<Item = (&Event, Layout)> {
        self.trace.events.iter().zip(self.layouts.iter().copied())
    }
}

/// Figures of an allocator at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sight {
    /// 1 − largest free range / all free bytes, of memory that it has.
    pub fragmentation: Option<f64>,
}

/// Figures of a replay besides time.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Facts {
    /// The most bytes that lived at once, without those of refused allocations.
    pub peak_live: u64,
    /// From the first byte ever given out to the end of the last.
    pub peak_span: u64,
    /// Allocations that found no room.
    pub failed: u64,
    /// Blocks that were given out on top of live ones: an allocator with any is broken.
    pub overlaps: u64,
    /// The worst that was seen.
    pub worst_fragmentation: Option<f64>,
    /// Over the trace's course.
    #[serde(skip)]
    pub samples: Vec<Sample>,
}

/// The greatest values of some neighbouring events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// The last of the events.
    pub event: usize,
    /// Live bytes.
    pub live: u64,
    /// From the first live byte to the end of the last.
    pub span: u64,
}

/// How many samples there are at most.
const SAMPLES: usize = 400;

/// Replays once and looks on. `look` is asked some hundred times, and after the event at which most bytes
/// live, which the second argument tells.
pub fn observe<C: Contestant>(
    contestant: &mut C,
    script: &Script,
    mut look: impl FnMut(&mut C, bool) -> Sight,
) -> Facts {
    let trace = script.trace;
    let every = trace.events.len().div_ceil(SAMPLES).max(1);
    let mut slots = Slots::new(trace);
    let mut live = Live::default();
    let mut facts = Facts::default();
    let mut sample = Sample::default();
    for (index, (event, layout)) in script.steps().enumerate() {
        if event.frees {
            if let Some((block, start)) = slots.0[event.slot as usize].take() {
                live.remove(start);
                // SAFETY: this contestant made it with this layout, and it left its slot.
                unsafe { contestant.free(block, layout) };
            }
        } else if let Some(block) = contestant.allocate(layout) {
            let start = contestant.start(&block);
            facts.overlaps += u64::from(!live.insert(start, event.size));
            slots.0[event.slot as usize] = Some((block, start));
        } else {
            facts.failed += 1;
        }
        sample.event = index;
        sample.live = sample.live.max(live.bytes);
        sample.span = sample.span.max(live.span());
        let ends = (index + 1) % every == 0 || index + 1 == trace.events.len();
        if ends {
            facts.samples.push(std::mem::take(&mut sample));
        }
        if ends || index == trace.peak_event {
            let sight = look(contestant, index == trace.peak_event);
            let worst = facts.worst_fragmentation.into_iter();
            facts.worst_fragmentation = worst.chain(sight.fragmentation).reduce(f64::max);
        }
        facts.peak_live = facts.peak_live.max(live.bytes);
    }
    facts.peak_span = live.ever.map_or(0, |(first, end)| end - first);
    slots.end(script, |block, layout| {
        // SAFETY: this contestant made it with this layout, and it left its slot.
        unsafe { contestant.free(block.0, layout) };
    });
    facts
}

/// Replays once by the clock.
pub fn time<C: Contestant>(contestant: &mut C, script: &Script) -> Duration {
    let mut slots = Slots::new(script.trace);
    let begun = Instant::now();
    for (event, layout) in script.steps() {
        let slot = &mut slots.0[event.slot as usize];
        if !event.frees {
            *slot = contestant.allocate(layout);
        } else if let Some(block) = slot.take() {
            // SAFETY: this contestant made it with this layout, and it left its slot.
            unsafe { contestant.free(block, layout) };
        }
    }
    let took = begun.elapsed();
    slots.end(script, |block, layout| {
        // SAFETY: this contestant made it with this layout, and it left its slot.
        unsafe { contestant.free(block, layout) };
    });
    took
}

/// Live blocks by slot.
struct Slots<B>(Vec<Option<B>>);

impl<B> Slots<B> {
    fn new(trace: &Trace) -> Self {
        Self((0..trace.slots).map(|_| None).collect())
    }

    /// Hands over the blocks that the trace never frees.
    fn end(mut self, script: &Script, mut free: impl FnMut(B, Layout)) {
        // The last event of a slot that still holds something allocated it.
        for (event, &layout) in script.trace.events.iter().zip(&script.layouts).rev() {
            if let Some(block) = self.0[event.slot as usize].take() {
                free(block, layout);
            }
        }
    }
}

/// Where live blocks lie.
#[derive(Default)]
struct Live {
    /// From start to end.
    blocks: BTreeMap<u64, u64>,
    bytes: u64,
    ever: Option<(u64, u64)>,
}

impl Live {
    /// False if some of its bytes are another block's.
    fn insert(&mut self, start: u64, size: u64) -> bool {
        let end = start.saturating_add(size);
        let before = self.blocks.range(..end).next_back();
        let apart = before.is_none_or(|(_, &end)| end <= start);
        self.blocks.insert(start, end);
        self.bytes = self.bytes.saturating_add(size);
        let (first, last) = self.ever.unwrap_or((start, end));
        self.ever = Some((first.min(start), last.max(end)));
        apart
    }

    fn remove(&mut self, start: u64) {
        if let Some(end) = self.blocks.remove(&start) {
            self.bytes = self.bytes.saturating_sub(end - start);
        }
    }

    fn span(&self) -> u64 {
        let first = self.blocks.first_key_value();
        let last = self.blocks.last_key_value();
        match (first, last) {
            (Some((first, _)), Some((_, end))) => end - first,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Shape, generate};
    use crate::read::{Reading, read};

    /// Gives out one address after the other; counts the bytes that it has given out and got back.
    #[derive(Default)]
    struct Bump {
        next: u64,
        given: u64,
        back: u64,
        /// Refuse larger requests.
        most: Option<usize>,
        /// Give out the same addresses again and again.
        broken: bool,
    }

    impl Contestant for Bump {
        type Block = (u64, Layout);
        fn allocate(&mut self, layout: Layout) -> Option<Self::Block> {
            if self.most.is_some_and(|most| layout.size() > most) {
                return None;
            }
            let start = self.next;
            if !self.broken {
                self.next += layout.size() as u64;
            }
            self.given += 1;
            Some((start, layout))
        }
        unsafe fn free(&mut self, block: Self::Block, layout: Layout) {
            assert_eq!(block.1, layout, "freed with another layout");
            self.back += 1;
        }
        fn start(&self, block: &Self::Block) -> u64 {
            block.0
        }
    }

    fn blind(_: &mut Bump, _: bool) -> Sight {
        Sight::default()
    }

    fn log(text: &str) -> Trace {
        read(text.as_bytes(), Reading::default()).unwrap()
    }

    const FIVE: &str = "1,,allocate,0x100,100,0\n1,,allocate,0x200,50,0\n1,,free,0x100,100,0\n\
                        1,,allocate,0x100,30,0\n1,,free,0x200,50,0\n";

    #[test]
    fn the_figures_match_the_replay() {
        let trace = log(FIVE);
        let script = Script::new(&trace, 1).unwrap();
        let mut bump = Bump::default();
        let mut peaks = 0;
        let facts = observe(&mut bump, &script, |bump, peak| {
            peaks += u64::from(peak);
            assert!(!peak || bump.next == 150);
            Sight {
                fragmentation: Some(1.0 / (1.0 + bump.next as f64)),
            }
        });
        assert_eq!(peaks, 1);
        assert_eq!((facts.peak_live, facts.peak_span), (150, 180));
        assert_eq!((facts.failed, facts.overlaps), (0, 0));
        assert_eq!(facts.worst_fragmentation, Some(1.0 / 101.0));
        let seen: Vec<_> = facts.samples.iter().map(|at| (at.live, at.span)).collect();
        assert_eq!(seen, [(100, 100), (150, 150), (50, 50), (80, 80), (30, 30)]);
        // The block that the trace never frees is given back too.
        assert_eq!((bump.given, bump.back), (3, 3));
        time(&mut bump, &script);
        assert_eq!((bump.given, bump.back), (6, 6));
    }

    #[test]
    fn refused_blocks_are_not_freed() {
        let trace = log(FIVE);
        let script = Script::new(&trace, 1).unwrap();
        let mut bump = Bump {
            most: Some(60),
            ..Bump::default()
        };
        let facts = observe(&mut bump, &script, blind);
        assert_eq!((facts.failed, facts.peak_live), (1, 80));
        time(&mut bump, &script);
        assert_eq!((bump.given, bump.back), (4, 4));
    }

    #[test]
    fn an_allocator_that_gives_bytes_twice_is_found() {
        let trace = log(FIVE);
        let script = Script::new(&trace, 1).unwrap();
        let mut bump = Bump {
            broken: true,
            ..Bump::default()
        };
        assert_eq!(observe(&mut bump, &script, blind).overlaps, 1);
    }

    #[test]
    fn samples_are_few_and_hold_the_peak() {
        let text = generate(Shape::Dataframe, 1, 5000);
        let trace = log(&text);
        let script = Script::new(&trace, 256).unwrap();
        let facts = observe(&mut Bump::default(), &script, blind);
        assert!(facts.samples.len() <= SAMPLES);
        let highest = facts.samples.iter().map(|sample| sample.live).max();
        assert_eq!(highest, Some(trace.peak));
        assert_eq!(facts.peak_live, trace.peak);
    }
}
