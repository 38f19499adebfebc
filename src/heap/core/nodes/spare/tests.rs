use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

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
