//! Searches that are interrupted, repeated, and answered by the results of others.

use proptest::prelude::*;

use super::*;

fn plain(size: u32) -> Need {
    Need {
        size,
        align: 1,
        origin: 0,
    }
}

fn add(nodes: &mut Nodes, start: u64, size: u32) -> RangeId {
    let node = nodes.add(start, size, RangeId::NONE, RangeId::NONE);
    nodes.link(node);
    node
}

/// 128 and 129 granules have the same bin.
#[test]
fn a_search_in_vain_is_repeated_once_a_range_may_fit() {
    let mut nodes = Nodes::new(1 << 20).unwrap();
    let small = add(&mut nodes, 0, 128);
    for _ in 0..3 {
        assert_eq!(nodes.find(plain(129), usize::MAX), Found::Nothing);
        assert_eq!(nodes.find(plain(128), usize::MAX), Found::One(small));
        let large = add(&mut nodes, 0, 129);
        let first = add(&mut nodes, 0, 128);
        assert_eq!(nodes.find(plain(129), usize::MAX), Found::One(large));
        nodes.unlink(large);
        nodes.unlink(first);
    }
}

/// A repeated search looks only at new ranges, also after it has found ranges.
#[test]
fn no_range_is_searched_twice_for_a_request() {
    let mut nodes = Nodes::new(1 << 20).unwrap();
    let mut all: Vec<RangeId> = (0..1000)
        .map(|at| add(&mut nodes, at * 16 + 1, 8))
        .collect();
    let need = Need {
        size: 8,
        align: 16,
        origin: 0,
    };
    let mut slices = 1;
    while nodes.find(need, SLICE) == Found::Unfinished {
        slices += 1;
    }
    assert_eq!(slices, 1000_usize.div_ceil(SLICE));
    // 0: nothing is left to search.
    assert_eq!(nodes.find(need, 0), Found::Nothing);
    let harder = Need {
        size: 9,
        align: 32,
        origin: 0,
    };
    assert_eq!(nodes.find(harder, 0), Found::Nothing);
    for round in 0..500 {
        nodes.unlink(all.swap_remove(round));
        all.push(add(&mut nodes, round as u64 * 16 + 1, 8));
        assert_eq!(nodes.find(need, 0), Found::Nothing);
        let fits = add(&mut nodes, round as u64 * 16, 8);
        all.push(add(&mut nodes, round as u64 * 16 + 1, 8));
        assert_eq!(nodes.find(need, 0), Found::One(fits));
        nodes.unlink(fits);
        assert_eq!(nodes.find(need, 0), Found::Nothing);
        nodes.check_searches();
    }
    let easier = Need {
        size: 7,
        align: 16,
        origin: 0,
    };
    assert_eq!(nodes.find(easier, 0), Found::Unfinished);
}

/// A range that was searched next leaves its list, and may come back, between the parts of a search.
#[test]
fn a_search_goes_on_whatever_changed() {
    let mut numbers = 1_u64;
    let mut below = |end: u64| {
        numbers ^= numbers << 13;
        numbers ^= numbers >> 7;
        numbers ^= numbers << 17;
        numbers % end
    };
    let mut nodes = Nodes::new(1 << 20).unwrap();
    let mut other = nodes.split();
    let mut free = Vec::new();
    for round in 0..20_000 {
        match below(4) {
            0 | 1 => free.push(add(&mut nodes, below(64), 120 + below(20) as u32)),
            2 if !free.is_empty() => {
                let node = free.swap_remove(below(free.len() as u64) as usize);
                nodes.unlink(node);
                nodes.retire(node);
            }
            _ => {
                let (size, align) = (124 + below(3) as u32 * 8, 1 << (below(3) * 3));
                let need = Need {
                    size,
                    align,
                    origin: 0,
                };
                let found = nodes.find(need, below(8) as usize);
                let fits = |&node: &RangeId| nodes.fits(node, &need);
                match found {
                    Found::One(node) => assert!(fits(&node)),
                    Found::Nothing => assert!(!free.iter().any(fits)),
                    Found::Unfinished => {}
                }
            }
        }
        if round % 50 == 0 {
            nodes.lend(&mut other);
            let lent = |node: &RangeId| free.contains(node);
            let mut named = nodes.searches.known.iter().flat_map(|known| &known.fitting);
            assert!(named.all(lent), "another list may have it");
        }
        nodes.check_searches();
        if free.len() > 200 {
            for node in free.drain(50..) {
                nodes.unlink(node);
            }
        }
    }
}

/// Four results that do not answer each other are remembered, and two further requests are searched for in turns.
#[test]
fn searches_in_turns_keep_what_the_other_has_found() {
    let mut nodes = Nodes::new(1 << 20).unwrap();
    for at in 0..3000 {
        add(&mut nodes, at * 4096 + 1, 40);
    }
    let need = |number: u32| Need {
        size: 10 + number,
        align: 4096 >> number,
        origin: 0,
    };
    for number in 1..=MOST_KNOWN as u32 {
        assert_eq!(nodes.find(need(number), usize::MAX), Found::Nothing);
    }
    assert_eq!(nodes.searches.known.len(), MOST_KNOWN);
    let both = [need(0), need(5)];
    for turn in 0..3000 / SLICE {
        for need in both {
            assert_eq!(nodes.find(need, SLICE), Found::Unfinished, "{turn}");
        }
    }
    for need in both {
        assert_eq!(nodes.find(need, SLICE), Found::Nothing);
    }
}

/// Each range at a growable end fits, but one elsewhere might still be found.
#[test]
fn ranges_at_growable_ends_are_collected_a_slice_at_a_time() {
    let mut nodes = Nodes::new(1 << 20).unwrap();
    let many = 100 * SLICE;
    for at in 0..many as u64 {
        let node = nodes.add(at * 16, 8, RangeId::NONE, RangeId::NONE);
        nodes.get_mut(node).growable_end = true;
        nodes.link(node);
    }
    let mut known = Known {
        need: plain(8),
        fitting: Vec::new(),
        rest: Some((bins::GROWABLE_END, nodes.heads[bins::GROWABLE_END])),
        looks: 0,
        left: 0,
    };
    for slice in 1..=100 {
        nodes.look(&mut known, slice * SLICE);
        assert_eq!(known.fitting.len(), slice * SLICE);
        assert_eq!(nodes.choose(&known, &plain(8)), None);
    }
    nodes.look(&mut known, usize::MAX);
    assert!(known.rest.is_none() && known.fitting.len() == many);
    assert!(nodes.choose(&known, &plain(8)).is_some());
}

proptest! {
    #[test]
    fn what_fits_is_found(
        sizes in proptest::collection::vec(1_u32..5000, 0..60),
        gone in proptest::collection::vec(any::<bool>(), 60),
        wanted in 1_u32..5000,
    ) {
        let mut nodes = Nodes::new(1 << 20).unwrap();
        let mut free = Vec::new();
        for &size in &sizes {
            free.push(add(&mut nodes, 0, size));
        }
        let mut gone = gone.into_iter();
        free.retain(|&node| {
            let stays = gone.next() != Some(true);
            if !stays {
                nodes.unlink(node);
            }
            stays
        });
        let found = nodes.find(plain(wanted), usize::MAX);
        let size = |node: RangeId| nodes.get(node).size;
        let largest = free.iter().map(|&node| size(node)).max().unwrap_or(0);
        prop_assert_eq!(nodes.largest(usize::MAX), largest);
        let nearly = nodes.largest(1);
        prop_assert!(nearly <= largest && largest - nearly <= largest / 64, "{} {}", nearly, largest);
        let best = free.iter().map(|&node| size(node)).filter(|&size| size >= wanted).min();
        let found = match found {
            Found::One(node) => Some(size(node)),
            _ => None,
        };
        prop_assert_eq!(found.is_some(), best.is_some());
        if let (Some(found), Some(best)) = (found, best) {
            let exact = bins::is_exact(best);
            prop_assert!(found >= best && (found == best || !exact));
            // In the best one's bin, or in the next that has any.
            let between = free.iter().map(|&node| bins::bin_of(size(node)));
            let between = between.filter(|&bin| bin > bins::bin_of(best) && bin < bins::bin_of(found));
            prop_assert_eq!(between.count(), 0);
        }
        let mut least: Vec<RangeId> = nodes.at_least(wanted).collect();
        free.retain(|&node| size(node) >= wanted);
        least.sort_unstable_by_key(|node| node.number());
        free.sort_unstable_by_key(|node| node.number());
        prop_assert_eq!(least, free);
    }
}
