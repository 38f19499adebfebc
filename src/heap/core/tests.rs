//! Compares the core with a plain map of blocks in use.

use std::collections::BTreeMap;
use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::classes::MAX_SMALL;

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
            failed: 0,
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Add(chunk) => self.add(chunk),
            Step::Remove(chunk) => self.remove(chunk),
            Step::Allocate(bytes, log) => self.allocate(bytes, 1 << log),
            Step::Search(bytes, log) => {
                self.core.search_on(&Request::new(bytes, 1 << log));
            }
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
            found = self.core.allocate(bytes, align);
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
        self.core.pages().set(extent.offset, owner);
        assert_eq!(
            self.core.at(extent.offset),
            Some(Found::Range(extent.node(), size))
        );
        self.model.take(extent.offset..extent.offset + size);
        self.ranges.push((extent, size));
    }

    fn fill(&mut self, class: Class, count: usize) {
        let mut out = vec![0; count];
        let filled = self.core.thoroughly(|core| core.fill(class, &mut out));
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
        let free = self.core.free_bytes();
        if wanted <= size {
            assert!(self.core.extend(extent.node(), bytes));
            assert_eq!(self.core.free_bytes(), free, "extending never gives back");
            self.core.shrink(extent.node(), bytes);
        } else if !self.core.extend(extent.node(), bytes) {
            assert_eq!(
                self.core.free_bytes(),
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
        assert_eq!(self.core.free_bytes() + wanted, free + size);
        self.model.used.remove(&extent.offset);
        self.model.take(extent.offset..extent.offset + wanted);
        self.ranges[at].1 = wanted;
    }

    fn give_nth(&mut self, which: usize) {
        if !self.small.is_empty() {
            let (offset, _) = self.small.swap_remove(which % self.small.len());
            assert!(self.core.give(offset));
            assert!(!self.core.give(offset), "given back twice");
            self.model.used.remove(&offset);
        }
    }

    fn check(&self) {
        self.core.ranges.check(self.model.joins);
        let used: u64 = self.ranges.iter().map(|(_, size)| size).sum();
        let backed = self.model.backed.len() as u64 * CHUNK;
        let (free_in_slabs, ends) = self.core.slab_bytes();
        let counts = self.core.class_counts();
        let in_slabs: u64 = Class::all()
            .zip(counts)
            .map(|(class, (_, all))| all * class.bytes())
            .sum();
        assert_eq!(self.core.total(), backed);
        assert_eq!(self.core.free_bytes() + used + in_slabs + ends, backed);
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
    Search(u64, u32),
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
        4 => (few(), log()).prop_map(|(bytes, log)| Step::Search(bytes, log)),
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

/// The blocks that threads keep, about which [`Core::rules_out`] is asked between steps.
#[derive(Default)]
struct Kept {
    ranges: Vec<(Extent, u64)>,
    small: Vec<(u64, Class)>,
    ruled_out: u64,
}

impl Kept {
    fn outside(&self, class: Option<Class>) -> Outside {
        let ranges: u64 = self.ranges.iter().map(|(_, size)| size).sum();
        let small: u64 = self.small.iter().map(|(_, class)| class.bytes()).sum();
        Outside {
            bytes: ranges + small,
            larger: ranges > 0,
            of_class: self.small.iter().any(|&(_, other)| Some(other) == class),
        }
    }

    /// A user frees a block, and a thread keeps it.
    fn keep(&mut self, both: &mut Both, which: usize) {
        if which.is_multiple_of(2) && !both.ranges.is_empty() {
            let at = which / 2 % both.ranges.len();
            self.ranges.push(both.ranges.swap_remove(at));
        } else if !both.small.is_empty() {
            let at = which / 2 % both.small.len();
            self.small.push(both.small.swap_remove(at));
        }
    }

    fn give_all(&mut self, core: &mut Core) {
        for (extent, _) in self.ranges.drain(..) {
            assert!(core.free(extent.node()));
        }
        for (offset, _) in self.small.drain(..) {
            assert!(core.give(offset));
        }
        core.release_empty_slabs();
    }

    /// Asks as the heap does. A request that is ruled out must still fail once the core has all blocks.
    fn ask(&mut self, core: &mut Core, bytes: u64, align: u64) {
        let request = Request::new(bytes, align);
        let met = |core: &mut Core| match Class::of(bytes, align) {
            Some(class) => {
                let mut out = [0];
                let filled = core.thoroughly(|core| core.fill(class, &mut out));
                (filled == 1).then(|| assert!(core.give(out[0]))).is_some()
            }
            None => {
                let found = core.allocate(bytes, align);
                found
                    .inspect(|found| assert!(core.free(found.node())))
                    .is_some()
            }
        };
        if met(core) {
            return;
        }
        let ruled_out = core.rules_out(&request, self.outside(Class::of(bytes, align)));
        self.ruled_out += u64::from(ruled_out);
        self.give_all(core);
        let found = met(core);
        assert!(!(ruled_out && found), "{bytes} bytes at {align} were there");
        if !found {
            core.remember_refusal(request);
        }
    }
}

#[derive(Clone, Debug)]
enum Turn {
    Step(Step),
    Keep(usize),
    Ask(u64, u32),
}

fn turn() -> impl Strategy<Value = Turn> {
    let bytes = prop_oneof![1_u64..2048, 2048_u64..100_000, 1_u64..6_000_000];
    prop_oneof![
        4 => step().prop_map(Turn::Step),
        3 => any::<usize>().prop_map(Turn::Keep),
        3 => (bytes, prop_oneof![3 => Just(0_u32), 1 => 0_u32..20]).prop_map(|(bytes, log)| Turn::Ask(bytes, log)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn nothing_is_ruled_out_that_could_be_had(
        turns in proptest::collection::vec(turn(), 1..600),
        joins in any::<bool>(),
    ) {
        let mut both = Both::new(5 * PAGE, joins);
        let mut kept = Kept::default();
        // A heap nearly full of blocks of many sizes.
        both.add(0);
        both.add(1);
        let mut numbers = Numbers(turns.len() as u64 + 1);
        for _ in 0..150 {
            both.fill(Class::from_index(numbers.below(CLASSES as u64) as usize), 20);
            both.allocate(1 + numbers.below(60_000), 1);
        }
        for turn in turns {
            match turn {
                // The model counts blocks that threads keep as used.
                Turn::Step(Step::Remove(_)) => {}
                Turn::Step(step) => both.run(step),
                Turn::Keep(which) => kept.keep(&mut both, which),
                Turn::Ask(bytes, log) => {
                    let gone: Vec<u64> = kept.ranges.iter().map(|(extent, _)| extent.offset)
                        .chain(kept.small.iter().map(|&(offset, _)| offset)).collect();
                    kept.ask(&mut both.core, bytes, 1 << log);
                    if kept.ranges.is_empty() && kept.small.is_empty() {
                        for offset in gone {
                            both.model.used.remove(&offset);
                        }
                    }
                }
            }
        }
    }
}

/// Every second of many blocks is free, and threads keep some small ones.
#[test]
fn a_refusal_for_fragments_holds_until_enough_comes_free() {
    let mut core = Core::new(0, 1 << 30).unwrap();
    core.add(0..CHUNK, true);
    let blocks: Vec<Extent> = std::iter::from_fn(|| core.allocate(65_536, 1)).collect();
    for block in blocks.iter().step_by(2) {
        core.free(block.node());
    }
    let request = Request::new(65_537, 1);
    let outside = |bytes| Outside {
        bytes,
        larger: true,
        of_class: false,
    };
    assert!(!core.rules_out(&request, outside(0)), "nobody has looked");
    core.remember_refusal(request);
    let larger = Request::new(100_000, 4096);
    for request in [request, larger] {
        assert!(core.rules_out(&request, outside(60_000)));
        assert!(!core.rules_out(&request, outside(65_536)));
    }
    // A smaller request, a small block, and requests after memory was added.
    assert!(!core.rules_out(&Request::new(65_000, 1), outside(0)));
    assert!(!core.rules_out(&Request::new(1, 1), outside(0)));
    core.free(blocks[1].node());
    assert!(!core.rules_out(&request, outside(0)));
    assert!(core.allocate(65_537, 1).is_some());
    core.add(CHUNK..2 * CHUNK, true);
    assert!(!core.rules_out(&larger, outside(0)));
    // A request beyond all memory needs no search.
    assert!(core.rules_out(&Request::new(4 * CHUNK, 1), outside(60_000)));
}

/// A slab between free ranges, one of whose blocks is in use or in a cache.
#[test]
fn a_request_that_an_emptied_slab_could_serve_is_not_ruled_out() {
    const SIZE: u64 = 65_536;
    let mut core = Core::new(0, 1 << 30).unwrap();
    core.add(0..CHUNK, true);
    let class = Class::of(500, 1).unwrap();
    let before = core.allocate(SIZE, 1).unwrap();
    let mut cached = [0];
    assert_eq!(core.fill(class, &mut cached), 1);
    let after: Vec<Extent> = std::iter::from_fn(|| core.allocate(SIZE, 1)).collect();
    while core.allocate(PAGE, 1).is_some() {}
    core.free(before.node());
    core.free(after[0].node());
    let outside = |bytes, larger| Outside {
        bytes,
        larger,
        of_class: false,
    };
    let request = |bytes| Request::new(bytes, 1);
    assert!(core.allocate(2 * SIZE, 1).is_none());
    // The slab has a page.
    assert!(!core.rules_out(&request(2 * SIZE + PAGE), outside(512, false)));
    assert!(core.rules_out(&request(2 * SIZE + PAGE), outside(511, false)));
    assert!(core.rules_out(&request(2 * SIZE + PAGE + 1), outside(512, false)));
    // Blocks above the small ones may lie anywhere.
    let two_pages = request(2 * SIZE + 2 * PAGE);
    assert!(core.rules_out(&two_pages, outside(2 * PAGE, false)));
    assert!(!core.rules_out(&two_pages, outside(2 * PAGE, true)));
    assert!(core.give(cached[0]));
    core.release_empty_slabs();
    assert!(core.allocate(2 * SIZE + PAGE, 1).is_some());
}

/// Nothing free begins at a multiple of the alignment; then something does.
#[test]
fn an_aligned_request_is_searched_for_again_once_a_range_is_free() {
    let mut core = Core::new(0, 1 << 30).unwrap();
    core.add(0..CHUNK, true);
    let blocks: Vec<Extent> = std::iter::from_fn(|| core.allocate(PAGE, 1)).collect();
    core.free(blocks[1].node());
    for _ in 0..3 {
        assert!(core.allocate(PAGE, 2 * PAGE).is_none());
    }
    core.free(blocks[4].node());
    let found = core.allocate(PAGE, 2 * PAGE).unwrap();
    assert_eq!(found.offset, 4 * PAGE);
}

/// Holes as large as the request, none of which has room at a multiple of its alignment.
#[test]
fn a_refusal_for_the_alignment_holds_until_enough_comes_free() {
    const SIZE: u64 = 16 << 10;
    let mut core = Core::new(5 * PAGE, 1 << 30).unwrap();
    core.add(0..CHUNK, true);
    let blocks: Vec<Extent> = std::iter::from_fn(|| core.allocate(SIZE, 1)).collect();
    for block in blocks.iter().step_by(2) {
        core.free(block.node());
    }
    let request = Request::new(SIZE, 2 * SIZE);
    assert!(core.allocate(SIZE, 2 * SIZE).is_none());
    core.remember_refusal(request);
    let outside = |bytes| Outside {
        bytes,
        larger: true,
        of_class: false,
    };
    assert!(core.rules_out(&request, outside(SIZE - 1)));
    assert!(!core.rules_out(&request, outside(SIZE)));
    core.free(blocks[1].node());
    assert!(!core.rules_out(&request, outside(0)));
    assert!(core.allocate(SIZE, 2 * SIZE).is_some());
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
                2..6 => {
                    let bytes = [9_000, 70_000, 900_000][numbers.below(3) as usize];
                    let request = Request::new(bytes, 1 << (12 + numbers.below(5)));
                    both.core.search_on(&request);
                }
                6..9 => {
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

#[test]
fn all_memory_is_one_range_again_when_all_is_free() {
    let mut core = Core::new(0, LIMIT).unwrap();
    for chunk in [3, 1, 0, 2] {
        core.add(chunk * CHUNK..(chunk + 1) * CHUNK, true);
    }
    let blocks: Vec<Extent> = std::iter::from_fn(|| core.allocate(9000, 1)).collect();
    assert!(blocks.len() as u64 >= 4 * CHUNK / 9216 - 1);
    assert!(core.ranges().largest_free() < 9216);
    core.free_all(&blocks);
    assert_eq!(core.ranges().largest_free(), 4 * CHUNK);
    assert_eq!(core.all_ranges().count(), 1);
}

#[test]
fn a_range_between_range_limits_is_as_long_as_can_be() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..MAX_RANGE + 3 * CHUNK, true);
    assert_eq!(core.total(), MAX_RANGE + 3 * CHUNK);
    assert_eq!(core.ranges().largest_free(), MAX_RANGE);
    assert!(core.allocate(MAX_RANGE + 1, 1).is_none());
    let all = core.allocate(MAX_RANGE, 1).unwrap();
    core.add(MAX_RANGE + 3 * CHUNK..MAX_RANGE + 4 * CHUNK, true);
    assert_eq!(core.ranges().largest_free(), 4 * CHUNK);
    core.free(all.node());
    core.ranges.check(true);
}

/// Growth relies on this.
#[test]
fn where_memory_ends_one_span_does_not_depend_on_what_came_first() {
    let parts = [(0, 2), (2, 3), (3, 5)]
        .map(|(from, to)| MAX_RANGE - 2 * CHUNK + from * CHUNK..MAX_RANGE - 2 * CHUNK + to * CHUNK);
    for order in [[0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 2, 0]] {
        let mut core = Core::new(0, LIMIT).unwrap();
        for part in order {
            core.add(parts[part].clone(), true);
        }
        assert_eq!(core.all_ranges().count(), 2, "{order:?}");
        assert_eq!(core.ranges().largest_free(), 3 * CHUNK, "{order:?}");
        assert_eq!(core.ranges().free_before(MAX_RANGE), 2 * CHUNK);
        assert_eq!(core.ranges().free_after(MAX_RANGE), 3 * CHUNK);
        core.ranges.check(true);
        for part in parts.clone() {
            assert!(core.remove(part));
        }
        assert_eq!(core.total(), 0);
    }
}

#[test]
fn a_range_takes_what_is_free_behind_it_to_the_last_granule() {
    let mut core = Core::new(0, CHUNK).unwrap();
    core.add(0..CHUNK, true);
    let block = core.allocate(9000, 1).unwrap();
    let wall = core.allocate(CHUNK / 2, 1).unwrap();
    assert!(core.extend(block.node(), 9216));
    assert!(!core.extend(block.node(), 9217), "the next range is in use");
    core.free(wall.node());
    assert!(!core.extend(block.node(), CHUNK + 1), "memory ends");
    assert!(core.extend(block.node(), CHUNK));
    assert_eq!((core.free_bytes(), core.all_ranges().count()), (0, 1));
    core.shrink(block.node(), 1);
    assert_eq!(core.ranges().largest_free(), CHUNK - PAGE);
    core.ranges.check(true);
}

#[test]
fn what_lies_at_a_growable_end_is_taken_last() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..4 * CHUNK, true);
    let hole = core.allocate(2 * CHUNK, 1).unwrap();
    let wall = core.allocate(CHUNK, 1).unwrap();
    core.free(hole.node());
    // The chunk at the growable end would be the better fit.
    let block = core.allocate(CHUNK / 2, 1).unwrap();
    assert_eq!(block.offset, hole.offset);
    core.free(block.node());
    // The growable end moves behind memory that is added, and in front of memory that is removed.
    core.add(4 * CHUNK..8 * CHUNK, true);
    let all = core.allocate(5 * CHUNK, 1).unwrap();
    assert_eq!(all.offset, 3 * CHUNK);
    core.free(all.node());
    assert!(core.remove(4 * CHUNK..8 * CHUNK));
    let block = core.allocate(CHUNK / 2, 1).unwrap();
    assert_eq!(block.offset, hole.offset);
    core.free(wall.node());
    core.free(block.node());
    core.ranges.check(true);
}

#[test]
fn of_two_parts_beside_removed_memory_the_one_behind_it_is_taken_first() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..3 * CHUNK, true);
    assert!(core.remove(CHUNK..2 * CHUNK));
    assert_eq!(core.allocate(CHUNK, 1).unwrap().offset, 2 * CHUNK);
    assert_eq!(core.allocate(CHUNK, 1).unwrap().offset, 0);
}

#[test]
fn near_full_the_search_is_exact() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..64 << 20, true);
    // Holes in one bin: the one that fits is deep in the list.
    let mut holes = Vec::new();
    let mut walls = Vec::new();
    for hole in 0..30_u64 {
        let granules = if hole == 0 { 1055 } else { 1040 };
        holes.push(core.allocate(granules * GRANULE, 1).unwrap());
        walls.push(core.allocate(8192, 1).unwrap());
    }
    while core.allocate(8192, 1).is_some() {}
    core.free_all(&holes);
    let found = core.allocate(1050 * GRANULE, 1).unwrap();
    assert_eq!(found.offset, holes[0].offset);
    assert_eq!(core.allocate(1050 * GRANULE, 1), None);
}

#[test]
fn small_blocks_use_every_hole_to_the_last_page() {
    // Only one in four of the holes of the second size contains a page.
    for (class, hole) in Class::all().flat_map(|class| [(class, 3 * PAGE), (class, 2304)]) {
        let mut core = Core::new(0, LIMIT).unwrap();
        core.add(0..CHUNK, true);
        // So many that the next slab would be large.
        let slab = class.slabs(u64::MAX).next().unwrap();
        let mut out = vec![0; 4 * slab as usize];
        assert_eq!(core.fill(class, &mut out), out.len());
        let holes: Vec<Extent> = std::iter::from_fn(|| core.allocate(hole, 1)).collect();
        for pair in holes.chunks(2) {
            core.free(pair[0].node());
        }
        let pages = |core: &Core| {
            let holes = core
                .all_ranges()
                .filter(|(hole, used)| !used && has_page(hole));
            holes.count()
        };
        assert!(pages(&core) > 40);
        while core.thoroughly(|core| core.fill(class, &mut out[..1])) > 0 {}
        assert_eq!(pages(&core), 0, "{class:?}");
        core.ranges.check(true);
    }
}

#[test]
fn blocks_that_are_none_are_not_taken_back() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..CHUNK, true);
    let class = Class::of(48, 1).unwrap();
    let mut out = [0; 3];
    assert_eq!(core.fill(class, &mut out), 3);
    assert!(!core.give(out[0] + 1));
    assert!(!core.give(CHUNK + 48));
    assert!(core.give(out[1]));
    assert!(!core.give(out[1]));
    assert_eq!(core.at(out[1]), None);
    assert_eq!(core.at(out[2] + 16), None);
    let block = core.allocate(MAX_SMALL + 1, 1).unwrap();
    assert!(!core.give(block.offset));
    assert_eq!(core.at(block.offset + GRANULE), None);
}
