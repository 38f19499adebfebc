//! Compares a core and its shards with a plain map of blocks in use.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const CHUNK: u64 = 2 << 20;
const CHUNKS: u64 = 16;
const SHARDS: usize = 3;

/// The core, if there is no such shard.
type Part = usize;

#[derive(Clone, Debug)]
enum Step {
    Feed(Part, u64),
    Allocate(Part, u64),
    Free(usize),
    Resize(usize, u64),
    TakeSegment(Part, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let part = || 0..=SHARDS;
    let bytes = || prop_oneof![1_u64..10_000, 1_u64..600_000];
    let index = any::<usize>;
    prop_oneof![
        3 => (0..SHARDS, 1..4_u64).prop_map(|(part, units)| Step::Feed(part, units)),
        40 => (part(), bytes()).prop_map(|(part, bytes)| Step::Allocate(part, bytes)),
        30 => index().prop_map(Step::Free),
        10 => (index(), bytes()).prop_map(|(which, bytes)| Step::Resize(which, bytes)),
        3 => (0..SHARDS, index()).prop_map(|(part, number)| Step::TakeSegment(part, number)),
    ]
}

struct All {
    core: Core,
    shards: Vec<Ranges>,
    joins: bool,
    /// The shard of each unit of addresses.
    of_unit: BTreeMap<u64, Part>,
    blocks: Vec<Extent>,
}

impl All {
    fn new(joins: bool) -> Self {
        let mut core = Core::new(0, CHUNKS * CHUNK).unwrap();
        // With a gap.
        core.add(0..8 * CHUNK, joins);
        core.add(9 * CHUNK..12 * CHUNK, joins);
        core.add(12 * CHUNK..CHUNKS * CHUNK, joins);
        let shards = (0..SHARDS).map(|_| core.new_shard().unwrap().1).collect();
        Self {
            core,
            shards,
            joins,
            of_unit: BTreeMap::new(),
            blocks: Vec::new(),
        }
    }

    fn part_of(&self, extent: &Extent) -> Part {
        let unit = extent.offset / CHUNK;
        self.of_unit.get(&unit).copied().unwrap_or(SHARDS)
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Feed(part, units) => {
                let fed = self.core.feed(&mut self.shards[part], units * CHUNK, CHUNK);
                if let Some(range) = fed {
                    assert_eq!(range.end - range.start, units * CHUNK);
                    for unit in range.start / CHUNK..range.end / CHUNK {
                        assert_eq!(self.of_unit.insert(unit, part), None);
                    }
                }
            }
            Step::Allocate(part, bytes) => {
                let found = match self.shards.get_mut(part) {
                    Some(shard) => {
                        if shard.needs_nodes() {
                            self.core.lend_nodes(shard);
                        }
                        shard.allocate_in_shard(bytes)
                    }
                    None => self.core.allocate(bytes, 1),
                };
                if let Some(extent) = found {
                    assert_eq!(u64::from(extent.granules()), Core::range_granules(bytes));
                    assert_eq!(self.part_of(&extent), part);
                    self.blocks.push(extent);
                }
            }
            Step::Free(which) => {
                if let Some(at) = which.checked_rem(self.blocks.len()) {
                    let extent = self.blocks.swap_remove(at);
                    assert!(self.free(&extent));
                }
            }
            Step::Resize(which, bytes) => self.resize(which, bytes),
            Step::TakeSegment(part, number) => {
                let segments = self.shards[part].segments();
                if let Some(number) = number.checked_rem(segments.len()) {
                    self.take_segment(part, segments[number].0);
                }
            }
        }
    }

    fn free(&mut self, extent: &Extent) -> bool {
        match self.part_of(extent) {
            SHARDS => self.core.free(extent.node()),
            part => self.shards[part].free(extent.node()),
        }
    }

    fn resize(&mut self, which: usize, bytes: u64) {
        let Some(at) = which.checked_rem(self.blocks.len()) else {
            return;
        };
        let part = self.part_of(&self.blocks[at]);
        let Extent { offset, .. } = self.blocks[at];
        let (node, granules) = (self.blocks[at].node(), self.blocks[at].granules());
        if let Some(shard) = self
            .shards
            .get_mut(part)
            .filter(|shard| shard.needs_nodes())
        {
            self.core.lend_nodes(shard);
        }
        let wanted = Core::range_granules(bytes) as u32;
        if wanted < granules {
            match self.shards.get_mut(part) {
                Some(shard) => shard.shrink(node, bytes),
                None => self.core.shrink(node, bytes),
            }
        } else if !match self.shards.get_mut(part) {
            Some(shard) => shard.extend(node, bytes),
            None => self.core.extend(node, bytes),
        } {
            return;
        }
        self.blocks[at] = Extent::new(offset, node, wanted);
    }

    fn take_segment(&mut self, part: Part, start: u64) {
        let shard = &mut self.shards[part];
        let range = self.core.take_segment(shard, start).unwrap();
        for unit in range.start / CHUNK..range.end / CHUNK {
            assert_eq!(self.of_unit.remove(&unit), Some(part));
        }
    }

    fn check(&self) {
        self.core.ranges.check(self.joins);
        self.shards.iter().for_each(|shard| shard.check(false));
        let mut blocks: Vec<Range<u64>> = self.blocks.iter().map(range_of).collect();
        blocks.sort_unstable_by_key(|block| block.start);
        assert!(blocks.windows(2).all(|two| two[0].end <= two[1].start));
        let used: u64 = blocks.iter().map(|block| block.end - block.start).sum();
        let total: u64 = self.shards.iter().map(Ranges::total).sum();
        assert_eq!(total, self.of_unit.len() as u64 * CHUNK);
        let free: u64 = self.shards.iter().map(Ranges::free_bytes).sum();
        assert_eq!(
            free + self.core.ranges.free_bytes() + used,
            self.core.ranges.total()
        );
        for shard in &self.shards {
            let free = shard.free_ranges().map(|range| range.end - range.start);
            assert_eq!(free.sum::<u64>(), shard.free_bytes());
            for start in empty(shard) {
                assert!(shard.free_ranges().any(|range| range.start == start));
            }
        }
    }
}

/// Returns the starts of the segments that have no block.
fn empty(shard: &Ranges) -> Vec<u64> {
    let segments = shard.segments().into_iter();
    let empty = segments.filter(|(_, is_empty)| *is_empty);
    empty.map(|(start, _)| start).collect()
}

fn range_of(extent: &Extent) -> Range<u64> {
    extent.offset..extent.offset + u64::from(extent.granules()) * GRANULE
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    /// A core that has all segments back is as one that never gave any, for any shards and blocks in between.
    #[test]
    fn a_core_and_its_shards_agree_with_a_plain_map(
        steps in proptest::collection::vec(step(), 1..800),
        stay in 0..4_usize,
        joins in any::<bool>(),
    ) {
        let mut all = All::new(joins);
        for (number, step) in steps.into_iter().enumerate() {
            all.run(step);
            if number % 64 == 0 {
                all.check();
            }
        }
        all.check();
        for part in 0..SHARDS {
            for (start, _) in all.shards[part].segments() {
                all.take_segment(part, start);
                all.check();
            }
        }
        prop_assert!(all.shards.iter().all(|shard| shard.free_bytes() + shard.total() == 0));
        while all.blocks.len() > stay {
            let extent = all.blocks.pop().unwrap();
            prop_assert!(all.free(&extent));
            prop_assert!(!all.free(&extent), "freed twice");
        }
        all.check();
        if stay == 0 {
            let ranges: Vec<_> = all.core.all_ranges().collect();
            let ends = if joins { vec![8, 16] } else { vec![8, 12, 16] };
            prop_assert_eq!(ranges.iter().map(|(range, _)| range.end / CHUNK).collect::<Vec<_>>(), ends);
            prop_assert!(ranges.iter().all(|(_, used)| !used));
        }
    }
}

#[test]
fn an_empty_segment_is_found() {
    let mut core = Core::new(0, CHUNKS * CHUNK).unwrap();
    core.add(0..4 * CHUNK, true);
    let (_, mut shard) = core.new_shard().unwrap();
    assert!(empty(&shard).is_empty());
    core.feed(&mut shard, CHUNK, CHUNK).unwrap();
    let all = shard.allocate_in_shard(CHUNK).unwrap();
    assert!(empty(&shard).is_empty());
    core.feed(&mut shard, CHUNK, CHUNK).unwrap();
    let [(one, _), (other, _)] = shard.segments()[..] else {
        panic!("two segments");
    };
    let (first, second) = if all.offset == one {
        (one, other)
    } else {
        (other, one)
    };
    assert_eq!(empty(&shard), [second]);
    let part = shard.allocate_in_shard(1).unwrap();
    assert!(empty(&shard).is_empty());
    shard.free(all.node());
    assert_eq!(empty(&shard), [first]);
    let place = |start| Some(start..start + CHUNK);
    assert_eq!(core.take_segment(&mut shard, first), place(first));
    assert!(shard.free(part.node()));
    assert_eq!(core.take_segment(&mut shard, second), place(second));
    assert_eq!(core.take_segment(&mut shard, second), None);
    assert_eq!(core.ranges.free_bytes(), core.ranges.largest_free());
}

#[test]
fn nodes_that_shards_no_longer_need_return() {
    let mut core = Core::new(0, CHUNKS * CHUNK).unwrap();
    core.add(0..4 * CHUNK, true);
    let (id, mut shard) = core.new_shard().unwrap();
    let fill = |core: &mut Core, shard: &mut Ranges| {
        core.feed(shard, CHUNK, CHUNK).unwrap();
        let blocks: Vec<Extent> = std::iter::from_fn(|| {
            if shard.needs_nodes() {
                core.lend_nodes(shard);
            }
            shard.allocate_in_shard(1)
        })
        .collect();
        assert_eq!(blocks.len() as u64, CHUNK / PAGE);
        assert!(blocks.iter().all(|block| shard.free(block.node())));
        let start = shard.segments()[0].0;
        core.take_segment(shard, start).unwrap();
    };
    fill(&mut core, &mut shard);
    let bytes = core.metadata();
    for _ in 0..100 {
        core.end_shard(id, shard);
        shard = core.new_shard().unwrap().1;
        assert!(shard.needs_nodes());
        fill(&mut core, &mut shard);
    }
    assert_eq!(core.metadata(), bytes);
}
