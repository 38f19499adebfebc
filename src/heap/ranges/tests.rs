//! Compares the core with a plain map of blocks in use.

use std::collections::BTreeMap;
use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::classes::CLASSES;

mod layout;
mod refusals;
mod shards;

const LIMIT: u64 = MAX_RANGE + 8 * CHUNK;
const CHUNK: u64 = 2 << 20;

/// The blocks in use, kept naively.
#[derive(Default)]
struct Model {
    /// From the first byte of each block to the byte after its last.
    used: BTreeMap<u64, u64>,
    backed: BTreeMap<u64, u64>,
    joins: bool,
}

impl Model {
    fn take(&mut self, block: Range<u64>) {
        let before = self.used.range(..block.end).next_back();
        if let Some((&start, &end)) = before {
            assert!(end <= block.start, "{block:?} overlaps {start}..{end}");
        }
        let mut at = block.start;
        let (&start, _) = self.backed.range(..=at).next_back().expect("backed");
        let mut chunk = start;
        while at < block.end {
            let end = *self.backed.get(&chunk).expect("backed to the end");
            assert!(self.joins || block.end <= end, "{block:?} crosses {end}");
            assert!(at < end);
            (at, chunk) = (end, end);
        }
        self.used.insert(block.start, block.end);
    }

    fn is_free(&self, range: &Range<u64>) -> bool {
        let before = self.used.range(..range.end).next_back();
        before.is_none_or(|(_, &end)| end <= range.start)
    }

    /// Returns the longest free range at an aligned address.
    fn longest(&self, origin: u64, align: u64) -> u64 {
        let mut holes: Vec<Range<u64>> = Vec::new();
        for (&start, &end) in &self.backed {
            match holes.last_mut() {
                Some(last) if self.joins && last.end == start => last.end = end,
                _ => holes.push(start..end),
            }
        }
        let mut longest = 0;
        for hole in holes {
            let mut at = hole.start;
            let used = self.used.range(hole.clone()).map(|(&s, &e)| (s, e));
            for (start, end) in used.chain([(hole.end, hole.end)]) {
                let aligned = (at + origin).next_multiple_of(align) - origin;
                longest = longest.max(start.saturating_sub(aligned));
                at = end;
            }
        }
        longest
    }
}

fn has_page(hole: &Range<u64>) -> bool {
    hole.start.next_multiple_of(PAGE) + PAGE <= hole.end
}

struct Both {
    core: Core,
    model: Model,
    origin: u64,
    ranges: Vec<(Extent, u64)>,
    small: Vec<(u64, Class)>,
    /// The threads' stripes, which take turns.
    owns: [OwnStripe; 3],
    failed: u64,
}

impl Both {
    fn new(origin: u64, joins: bool) -> Self {
        Self {
            core: Core::new(origin, LIMIT).unwrap(),
            model: Model {
                joins,
                ..Model::default()
            },
            origin,
            ranges: Vec::new(),
            small: Vec::new(),
            owns: [0, 1, 7].map(OwnStripe::claimed),
            failed: 0,
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Add(chunk) => self.add(chunk),
            Step::Remove(chunk) => self.remove(chunk),
            Step::Allocate(bytes, log) => self.allocate(bytes, 1 << log),
            Step::Fill(class, count) => self.fill(Class::all().nth(class).unwrap(), count),
            Step::Free(which) => self.free_nth(which),
            Step::Give(which) => self.give_nth(which),
            Step::Resize(which, bytes) => self.resize_nth(which, bytes),
        }
    }

    fn add(&mut self, chunk: u64) {
        let range = chunk * CHUNK..(chunk + 1) * CHUNK;
        if self.model.backed.contains_key(&range.start) {
            return;
        }
        self.model.backed.insert(range.start, range.end);
        self.core.add(range, self.model.joins);
    }

    fn remove(&mut self, chunk: u64) {
        let range = chunk * CHUNK..(chunk + 1) * CHUNK;
        let can = self.model.backed.contains_key(&range.start) && self.model.is_free(&range);
        // To the core, a slab without blocks is in use.
        let did = self.core.remove(range.clone());
        assert!(can || !did);
        if did {
            self.model.backed.remove(&range.start);
        } else if can {
            self.core.release_empty_slabs();
            let did = self.core.remove(range.clone());
            assert!(
                did || !self.small.is_empty(),
                "a slab may reach into the chunk"
            );
            if did {
                self.model.backed.remove(&range.start);
            }
        }
    }

    fn allocate(&mut self, bytes: u64, align: u64) {
        let size = Core::range_bytes(bytes).unwrap();
        let mut found = self.core.allocate(bytes, align);
        if found.is_none() {
            self.core.release_empty_slabs();
            found = self.core.exhaustively(|core| core.allocate(bytes, align));
        }
        let Some(extent) = found else {
            // Bytes between the blocks of a slab are free only in the model.
            self.failed += 1;
            if self.small.is_empty() && self.failed % 8 == 1 {
                assert!(self.model.longest(self.origin, align) < size);
            }
            return;
        };
        assert_eq!((extent.offset + self.origin) % align, 0);
        let owner = Owner::Range(extent.node());
        self.core.slabs().pages.set(extent.offset, owner);
        assert_eq!(
            self.core.at(extent.offset),
            Some(Found::Range(extent.node(), size))
        );
        self.model.take(extent.offset..extent.offset + size);
        self.ranges.push((extent, size));
    }

    fn fill(&mut self, class: Class, count: usize) {
        let mut out = vec![0; count];
        let own = &self.owns[count % self.owns.len()];
        let filled = self
            .core
            .exhaustively(|core| core.fill(own, class, &mut out));
        for &offset in &out[..filled] {
            assert_eq!(self.core.at(offset), Some(Found::Small(class)));
            self.model.take(offset..offset + class.bytes());
            self.small.push((offset, class));
        }
        // Fewer only if no page is free: the smallest slab takes one.
        assert!(
            filled == count
                || !self
                    .core
                    .all_ranges()
                    .any(|(range, used)| !used && has_page(&range)),
            "{class:?}: {filled} of {count}"
        );
    }

    fn free_nth(&mut self, which: usize) {
        if !self.ranges.is_empty() {
            let (extent, _) = self.ranges.swap_remove(which % self.ranges.len());
            self.core.free(extent.node());
            self.model.used.remove(&extent.offset);
            assert_eq!(self.core.at(extent.offset), None);
        }
    }

    /// A block grows only into free bytes, and only if they suffice.
    fn resize_nth(&mut self, which: usize, bytes: u64) {
        let Some(at) = which.checked_rem(self.ranges.len()) else {
            return;
        };
        let (extent, size) = self.ranges[at];
        let wanted = Core::range_bytes(bytes).unwrap();
        let free = self.core.ranges.free_bytes();
        if wanted <= size {
            assert!(self.core.extend(extent.node(), bytes));
            assert_eq!(
                self.core.ranges.free_bytes(),
                free,
                "extending never gives back"
            );
            self.core.shrink(extent.node(), bytes);
        } else if !self.core.extend(extent.node(), bytes) {
            assert_eq!(
                self.core.ranges.free_bytes(),
                free,
                "refused, but something changed"
            );
            let end = extent.offset + size;
            let beside = self.model.joins || !end.is_multiple_of(CHUNK);
            let mut holes = self.core.all_ranges().filter(|(_, used)| beside && !used);
            let hole = holes.find(|(hole, _)| hole.start == end);
            let room = hole.map_or(0, |(hole, _)| hole.end - hole.start);
            assert!(room < wanted - size, "{room} bytes behind it were free");
            return;
        }
        assert_eq!(self.core.ranges.free_bytes() + wanted, free + size);
        self.model.used.remove(&extent.offset);
        self.model.take(extent.offset..extent.offset + wanted);
        self.ranges[at].1 = wanted;
    }

    fn give_nth(&mut self, which: usize) {
        if !self.small.is_empty() {
            let (offset, _) = self.small.swap_remove(which % self.small.len());
            assert_eq!(self.core.give(&[offset], 1), 0);
            assert_eq!(self.core.give(&[offset], 1), 1, "given back twice");
            self.model.used.remove(&offset);
        }
    }

    fn check(&self) {
        self.core.ranges.check(self.model.joins);
        let used: u64 = self.ranges.iter().map(|(_, size)| size).sum();
        let backed = self.model.backed.len() as u64 * CHUNK;
        let slabs = self.core.slabs().hold();
        let ((free_in_slabs, ends), counts) = (slabs.bytes(), slabs.class_counts());
        let in_slabs: u64 = Class::all()
            .zip(counts)
            .map(|(class, (_, all))| all * class.bytes())
            .sum();
        assert_eq!(self.core.ranges.total(), backed);
        assert_eq!(
            self.core.ranges.free_bytes() + used + in_slabs + ends,
            backed
        );
        let small: u64 = self.small.iter().map(|(_, class)| class.bytes()).sum();
        assert_eq!(free_in_slabs + small, in_slabs);
        let by_class: u64 = Class::all()
            .zip(counts)
            .map(|(class, (free, all))| (all - free) * class.bytes())
            .sum();
        assert_eq!(by_class, small);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add(u64),
    Remove(u64),
    Allocate(u64, u32),
    Fill(usize, usize),
    Free(usize),
    Give(usize),
    Resize(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<usize>;
    let few = || prop_oneof![Just(9_000_u64), Just(70_000), Just(900_000)];
    let bytes = || prop_oneof![1_u64..40_000, 1_u64..600_000, 1_u64..6_000_000, few()];
    let log = || prop_oneof![3 => Just(0_u32), 1 => 0_u32..23, 1 => 13_u32..16];
    prop_oneof![
        2 => (0_u64..12).prop_map(Step::Add),
        2 => (0_u64..12).prop_map(Step::Remove),
        8 => (bytes(), log()).prop_map(|(bytes, log)| Step::Allocate(bytes, log)),
        2 => (0..CLASSES, 1_usize..70).prop_map(|(class, count)| Step::Fill(class, count)),
        8 => index().prop_map(Step::Free),
        60 => index().prop_map(Step::Give),
        8 => (index(), bytes()).prop_map(|(which, bytes)| Step::Resize(which, bytes)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn it_agrees_with_a_plain_map(
        steps in proptest::collection::vec(step(), 1..1000),
        joins in any::<bool>(),
        origin in (0_u64..1 << 12).prop_map(|pages| pages * PAGE),
    ) {
        let mut both = Both::new(origin, joins);
        for (number, step) in steps.into_iter().enumerate() {
            both.run(step);
            if number % 64 == 0 {
                both.check();
            }
        }
        both.check();
    }
}

/// Pseudo-random numbers that repeat in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

#[test]
#[cfg_attr(
    egmem_slow,
    ignore = "takes minutes where everything runs slowly, and has one thread"
)]
fn it_agrees_with_a_plain_map_for_a_million_operations() {
    for joins in [false, true] {
        let mut both = Both::new(5 * PAGE, joins);
        let mut numbers = Numbers(0x5eed);
        let mut done = 0_u64;
        while done < 500_000 {
            match numbers.below(100) {
                0 => both.add(numbers.below(12)),
                1 => both.remove(numbers.below(12)),
                2..9 => {
                    let bytes = [9_000, 70_000, 900_000][numbers.below(3) as usize];
                    both.allocate(bytes, 1 << (12 + numbers.below(5)));
                }
                9..40 => {
                    let most = [40_000, 600_000, 6_000_000][numbers.below(3) as usize];
                    let log = [0, numbers.below(23)][numbers.below(2) as usize];
                    both.allocate(1 + numbers.below(most), 1 << log);
                }
                40..44 => {
                    let count = 1 + numbers.below(30) as usize;
                    let class = Class::all().nth(numbers.below(CLASSES as u64) as usize);
                    both.fill(class.unwrap(), count);
                    done += count as u64;
                }
                44..72 => both.free_nth(numbers.below(1 << 32) as usize),
                72..80 => {
                    let most = [40_000, 600_000, 6_000_000][numbers.below(3) as usize];
                    both.resize_nth(numbers.below(1 << 32) as usize, 1 + numbers.below(most));
                }
                _ => {
                    for _ in 0..4 {
                        both.give_nth(numbers.below(1 << 32) as usize);
                    }
                    done += 3;
                }
            }
            done += 1;
            if done.is_multiple_of(5000) {
                both.check();
            }
        }
        both.check();
    }
}
