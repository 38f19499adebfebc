use std::collections::BTreeSet;

use super::*;
use crate::ranges::nodes::NodeState;
use crate::ranges::nodes::lend::PAIR;
use proptest::prelude::*;

/// Returns the pairs of the vacant nodes of a list, and whether it has all nodes of each.
fn pairs_of(nodes: &Nodes) -> (BTreeSet<usize>, bool) {
    let listed = std::iter::successors(Some(nodes.vacant), |&node| Some(nodes.get(node).next));
    let listed: Vec<usize> = listed
        .take_while(|&node| node != RangeId::NONE)
        .map(RangeId::index)
        .collect();
    assert_eq!(listed.len(), nodes.vacancies());
    let pairs: BTreeSet<usize> = listed.iter().map(|index| index / PAIR).collect();
    let whole = pairs.len() * PAIR == listed.len();
    (pairs, whole)
}

fn add(nodes: &mut Nodes) -> RangeId {
    nodes.add(0, 1, RangeId::NONE, RangeId::NONE)
}

#[test]
fn shards_get_whole_pairs_of_what_came_back_in_any_order() {
    let mut core = Nodes::new(1 << 16).unwrap();
    let mut numbers = 1_usize;
    let mut below = |end: usize| {
        numbers = numbers
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (numbers >> 33) % end
    };
    let mut own: Vec<RangeId> = (0..500).map(|_| add(&mut core)).collect();
    let mut shards: Vec<Nodes> = (0..3).map(|_| core.split()).collect();
    for round in 0..200 {
        for _ in 0..50 {
            let node = own.swap_remove(below(own.len()));
            core.retire(node);
        }
        let shard = &mut shards[round % 3];
        core.lend(shard);
        shard.give_back(&mut core, below(80));
        own.extend((0..50).map(|_| add(&mut core)));
    }
    own.into_iter().for_each(|node| core.retire(node));
    for shard in &mut shards {
        shard.give_back(&mut core, usize::MAX);
        assert_eq!(shard.vacancies(), 0);
    }
    let len = core.nodes.len();
    assert!(len < 2500, "{len}");
    let mut all = BTreeSet::new();
    for shard in &mut shards {
        (0..3).for_each(|_| core.lend(shard));
        let (mut pairs, whole) = pairs_of(shard);
        assert!(whole && pairs.len() > 3 * MORE / PAIR / 2);
        all.append(&mut pairs);
    }
    assert_eq!(core.nodes.len(), len);
    let lent: usize = shards.iter().map(Nodes::vacancies).sum();
    assert_eq!(all.len() * PAIR, lent);
}

#[test]
fn the_table_ends_growing_although_no_pair_comes_back() {
    let mut core = Nodes::new(1 << 16).unwrap();
    let mut shard = core.split();
    let mut own = Vec::new();
    for _ in 0..400 {
        core.lend(&mut shard);
        let mut lent = Vec::new();
        while shard.vacancies() > 0 {
            lent.push(add(&mut shard));
        }
        for node in lent {
            if node.index() % PAIR == 0 {
                // It stays in use, with a segment that returned.
                core.take_over(&mut shard, 1);
                own.push(node);
            } else {
                shard.retire(node);
            }
        }
        shard.give_back(&mut core, usize::MAX);
        own.drain(..own.len().saturating_sub(500))
            .for_each(|node| core.retire(node));
    }
    assert!(
        core.nodes.len() < 500 * PAIR + 3 * MOST_VACANT,
        "{}",
        core.nodes.len()
    );
    assert!(
        own.iter()
            .all(|&node| core.get(node).state == NodeState::Used)
    );
}

#[test]
fn a_table_that_is_half_full_gives_shards_what_is_vacant() {
    let mut core = Nodes::new(1 << 12).unwrap();
    let mut shard = core.split();
    shard.give_back(&mut core, usize::MAX);
    while core.nodes.is_half_empty() {
        add(&mut core);
    }
    while core.vacancies() > 0 {
        add(&mut core);
    }
    let some = [1, 70, 71].map(RangeId::at);
    some.iter().for_each(|&node| core.retire(node));
    let len = core.nodes.len();
    (0..2).for_each(|_| core.lend(&mut shard));
    assert_eq!((shard.vacancies(), core.nodes.len()), (3, len));
}

proptest! {
    #[test]
    fn what_is_put_is_taken_once_and_pairs_as_a_whole(
        put in proptest::collection::vec(1..300_usize, 0..400),
        whole_pairs in proptest::collection::vec(any::<bool>(), 20),
    ) {
        let (mut spare, mut model) = (Spare::new(), BTreeSet::new());
        let steps = put.chunks(20).zip(&whole_pairs);
        for (put, &whole_pairs) in steps {
            for &index in put {
                spare.put(index);
                model.insert(index);
            }
            let in_pair = |&index: &usize| {
                let first = index / PAIR * PAIR;
                !whole_pairs || (first..first + PAIR).all(|index| model.contains(&index))
            };
            let found: Vec<usize> = model.iter().copied().filter(in_pair).collect();
            let batch = found.first().map(|index| index / BATCH);
            let expected: Vec<usize> = found.into_iter().filter(|at| Some(at / BATCH) == batch).collect();
            let taken = spare.take(whole_pairs).map_or(Vec::new(), |(batch, nodes)| {
                (0..BATCH).filter(|bit| nodes >> bit & 1 == 1).map(|bit| batch * BATCH + bit).collect()
            });
            prop_assert_eq!(&taken, &expected);
            taken.iter().for_each(|index| assert!(model.remove(index)));
        }
    }
}
