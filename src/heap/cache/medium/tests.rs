use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::cache::shards::FULL;
use crate::ranges::RangeId;

proptest! {
    /// Each step frees or allocates, alone or while threads share the core, which changes from time to time.
    #[test]
    fn it_gives_out_what_it_keeps_at_its_size_and_loses_nothing(
        steps in proptest::collection::vec((0..3, 8_u32..600, 0..40), 0..3000),
        alone in 0_u64..20_000,
        shared in 0_u64..40_000,
    ) {
        let mut medium = Medium::new(Arc::default());
        let mut kept: HashMap<RangeId, u32> = HashMap::new();
        let mut numbers = 0..;
        let mut new = |granules| {
            let number = numbers.next().unwrap();
            let node = RangeId::from_number(number);
            Extent::new(number.into(), node, granules)
        };
        let mut shares = false;
        for (step, size, change) in steps {
            shares ^= change == 0;
            let (budget, largest) = medium.limits(alone, shared);
            if step == 0 && u64::from(size) <= largest {
                let extent = new(size);
                if !medium.keep(extent) {
                    medium.pass_on(extent);
                }
                kept.insert(extent.node(), size);
                if medium.is_over(budget) {
                    for left in medium.take_leaving() {
                        prop_assert!(kept.remove(&left.node()).is_some());
                    }
                }
            } else {
                if let Some(extent) = medium.pop(size) {
                    prop_assert_eq!(kept.remove(&extent.node()), Some(size));
                    prop_assert_eq!(extent.offset, u64::from(extent.node().number()));
                    prop_assert_eq!(extent.granules(), size);
                    continue;
                }
                medium.note_shares(shares);
                for left in medium.take_leaving() {
                    prop_assert!(kept.remove(&left.node()).is_some());
                }
            }
            prop_assert!(medium.granules + medium.leaving_granules <= alone.max(shared));
            let granules: u64 = kept.values().map(|&size| u64::from(size)).sum();
            prop_assert_eq!(medium.granules + medium.leaving_granules, granules);
            let mut each: Vec<(u64, u64)> = Vec::new();
            medium.each(|offset, bytes| each.push((offset, bytes)));
            prop_assert_eq!(each.iter().map(|&(_, bytes)| bytes).sum::<u64>(), medium.granules * GRANULE);
        }
        let mut left: Vec<u32> = medium.take_all().iter().map(|left| left.node().number()).collect();
        let mut expected: Vec<u32> = kept.keys().map(|node| node.number()).collect();
        left.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(left, expected);
        prop_assert!(medium.is_empty());
    }

    /// Blocks for shards leave in order, at the latest when a batch is full.
    #[test]
    fn what_goes_abroad_arrives_once(
        blocks in proptest::collection::vec((1..=20_u8, 8..=4096_u32), 0..600),
        most in 0..=16_384_u64,
    ) {
        let mut medium = Medium::new(Arc::default());
        let shards = Shards::new(1 << 20);
        let posts: Vec<_> = (1..=20).map(|id| (u64::from(id), shards.open(id))).collect();
        let (mut granules, mut all, mut sent) = (0, Vec::new(), Vec::new());
        for (number, &(shard, size)) in (0..).zip(&blocks) {
            let node = RangeId::from_number(number);
            let extent = Extent::new(u64::from(shard), node, size);
            all.push(extent);
            granules += u64::from(size);
            medium.send_out(shard, extent, most, &shards);
            for (id, post) in &posts {
                let before = sent.len();
                post.open(|block| sent.push(block));
                prop_assert!(sent.len() - before <= FULL && post.bytes() == 0);
                prop_assert!(sent[before..].iter().all(|block| block.offset == *id));
            }
            let left: u64 = sent.iter().map(|block| u64::from(block.granules())).sum();
            prop_assert_eq!(medium.bytes(), (granules - left) * GRANULE);
            prop_assert!(medium.bytes() <= most * GRANULE);
        }
        prop_assert_eq!(medium.is_empty(), sent.len() == all.len());
        sent.extend(medium.take_all());
        prop_assert!(medium.is_empty());
        sent.sort_unstable_by_key(|block| block.node().number());
        prop_assert_eq!(sent, all);
    }
}

/// A bin of large blocks has several sizes.
#[test]
fn a_block_behind_others_of_its_bin_is_found() {
    let mut medium = Medium::new(Arc::default());
    let sizes = [4099, 4098, 4097, 4096];
    assert!(sizes.iter().all(|&size| bin_of(size) == bin_of(4096)));
    let extents = (0..)
        .zip(sizes)
        .map(|(number, granules)| Extent::new(0, RangeId::from_number(number), granules));
    extents.clone().for_each(|extent| medium.push(extent));
    for extent in extents {
        assert_eq!(medium.pop(extent.granules()), Some(extent));
    }
    assert!(medium.is_empty() && medium.pop(4096).is_none());
}

#[test]
fn a_thread_alone_returns_all_blocks_before_the_core_gets_a_larger_request() {
    for (bytes, left) in [(4097, 0), (4096, 3)] {
        let mut medium = Medium::new(Arc::default());
        for number in 0..3 {
            let node = RangeId::from_number(number);
            medium.push(Extent::new(0, node, 40));
        }
        medium.make_way(bytes);
        assert_eq!(medium.granules, left * 40, "{bytes}");
        assert_eq!(medium.take_leaving().len() as u64, 3 - left);
        medium.note_shares(true);
        assert_eq!(medium.granules, left * 40);
        medium.note_shares(false);
        assert_eq!(medium.granules, 0);
    }
}
