use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

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
        let mut new = || {
            let number = numbers.next().unwrap();
            let node = RangeId::from_number(number);
            Extent { offset: number.into(), node }
        };
        let mut shares = false;
        for (step, size, change) in steps {
            shares ^= change == 0;
            let (budget, largest) = medium.limits(alone, shared);
            if step == 0 && u64::from(size) <= largest {
                let extent = new();
                let node = extent.node;
                match medium.keeps() {
                    true => medium.put(size, extent),
                    false => medium.pass_on(size, node),
                }
                kept.insert(node, size);
                if medium.is_over(size, budget) {
                    for left in medium.take_leaving() {
                        prop_assert!(kept.remove(&left).is_some());
                    }
                }
            } else {
                // Once, or as a thread that needs many of a size.
                for _ in 0..if step == 1 { 1 } else { 12 } {
                    let most = if medium.shares && size >= 16 { size.max((size - 1) * 9 / 8) } else { size };
                    if let Some((extent, has)) = medium.pop(size) {
                        prop_assert_eq!(kept.remove(&extent.node), Some(has));
                        prop_assert_eq!(extent.offset, u64::from(extent.node.number()));
                        prop_assert!((size..=most).contains(&has), "{} for {}", has, size);
                        continue;
                    }
                    medium.note_shares(shares, size);
                    let (budget, _) = medium.limits(alone, shared);
                    let more = medium.more(size, budget);
                    for left in medium.take_leaving() {
                        prop_assert!(kept.remove(&left).is_some());
                    }
                    for _ in 0..more {
                        let extent = new();
                        kept.insert(extent.node, size);
                        medium.push(size, extent);
                    }
                    prop_assert!(medium.granules <= budget.max(alone));
                }
            }
            prop_assert!(medium.granules + medium.leaving_granules <= alone.max(shared));
            let granules: u64 = kept.values().map(|&size| u64::from(size)).sum();
            prop_assert_eq!(medium.granules + medium.leaving_granules, granules);
            let mut each: Vec<(u64, u64)> = Vec::new();
            medium.each(|offset, bytes| each.push((offset, bytes)));
            prop_assert_eq!(each.iter().map(|&(_, bytes)| bytes).sum::<u64>(), medium.granules * GRANULE);
        }
        let mut left: Vec<u32> = medium.take_all().iter().map(|node| node.number()).collect();
        let mut expected: Vec<u32> = kept.keys().map(|node| node.number()).collect();
        left.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(left, expected);
        prop_assert!(medium.is_empty());
    }

    #[test]
    fn while_threads_share_the_core_a_block_serves_what_it_is_at_most_an_eighth_too_large_for(
        has in 8..=(MAX_CACHED / GRANULE) as u32, size in 8..=(MAX_CACHED / GRANULE) as u32, near in 0_u32..300, shares: bool,
    ) {
        for size in [size, (has - has * near / 1000).max(8)] {
            let mut medium = Medium::new(Arc::default());
            medium.note_shares(shares, 0);
            let extent = Extent { offset: 0, node: RangeId::from_number(0) };
            medium.push(has, extent);
            let most = if shares && size >= 16 { size.max((size - 1) * 9 / 8) } else { size };
            let fits = (size..=most).contains(&has);
            prop_assert_eq!(medium.pop(size), fits.then_some((extent, has)));
        }
    }
}

/// A bin of large blocks has several sizes; the next bin is not looked at by a thread that is alone.
#[test]
fn a_block_behind_others_of_its_bin_is_found() {
    for shares in [false, true] {
        let mut medium = Medium::new(Arc::default());
        medium.note_shares(shares, 0);
        let extent = |number| Extent {
            offset: 0,
            node: RangeId::from_number(number),
        };
        let sizes = [4099, 4098, 4097, 4096];
        assert!(sizes.iter().all(|&size| bin_of(size) == bin_of(4096)));
        for (number, size) in (0..).zip(sizes) {
            medium.push(size, extent(number));
        }
        for (number, size) in (0..).zip(sizes) {
            assert_eq!(medium.pop(size), Some((extent(number), size)));
        }
        assert!(medium.is_empty() && medium.pop(4096).is_none());
    }
}

#[test]
fn more_is_fetched_of_what_is_missed_again_and_again() {
    let mut medium = Medium::new(Arc::default());
    let ample = 1 << 20;
    let wanted: Vec<u32> = (0..6).map(|_| medium.wanted(16, ample)).collect();
    assert_eq!(wanted, [1, 2, 4, 8, 16, 16]);
    assert_eq!(medium.wanted(17, ample), 1);
    assert_eq!(medium.wanted(17, 8 * 17), 2);
    assert_eq!(
        medium.wanted(17, 8 * 17),
        2,
        "no more than a fourth of the budget"
    );
    assert_eq!(medium.wanted(17, 0), 1);
}

#[test]
fn a_thread_alone_returns_all_blocks_before_the_core_gets_a_larger_request() {
    for (shares, size, left) in [(false, 17, 0), (false, 16, 3), (true, 17, 3)] {
        let mut medium = Medium::new(Arc::default());
        medium.note_shares(shares, 0);
        for number in 0..3 {
            let node = RangeId::from_number(number);
            medium.push(40, Extent { offset: 0, node });
        }
        medium.note_shares(shares, size);
        assert_eq!(medium.granules, left * 40, "{shares} {size}");
        assert_eq!(medium.take_leaving().len() as u64, 3 - left);
    }
}
