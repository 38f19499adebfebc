//! A ring behaves like a `VecDeque` of limited length under random operations.

use std::collections::VecDeque;

use egmem::shapes::Ring;
use proptest::prelude::*;

use crate::shapes::{grace, node, nothing_held};

/// 4 KiB and a bit, so that a few hundred go around.
type Record = [[u64; 31]; 17];

#[derive(Clone, Debug)]
enum Step {
    Push,
    PushAll(usize),
    PushSome(usize),
    Discard(usize),
    Pop,
    PopInto(usize),
    Release(usize, usize),
    Gpu,
}

fn step() -> impl Strategy<Value = Step> {
    let count = 0..150_usize;
    prop_oneof![
        Just(Step::Push),
        count.clone().prop_map(Step::PushAll),
        count.clone().prop_map(Step::PushSome),
        count.clone().prop_map(Step::Discard),
        Just(Step::Pop),
        count.clone().prop_map(Step::PopInto),
        (count.clone(), count).prop_map(|(most, first)| Step::Release(most, first)),
        Just(Step::Gpu),
    ]
}

fn record(n: usize) -> Record {
    [[(n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15); 31]; 17]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn it_is_a_bounded_queue(capacity in 1..140_usize, steps in prop::collection::vec(step(), 1..60)) {
        let driver = grace();
        let options = Ring::<Record>::on(node(&driver)).records(capacity);
        let Ring { mut producer, mut consumer } = options.create(&driver).unwrap();
        let mut model = VecDeque::new();
        let mut next = 0;
        for step in steps {
            let room = capacity - model.len();
            let new = |count: usize| (next..next + count).map(record).collect::<Vec<_>>();
            match step {
                Step::Push => {
                    prop_assert_eq!(producer.try_push(record(next)).unwrap(), room > 0);
                    let added = room.min(1);
                    model.extend(next..next + added);
                    next += added;
                }
                Step::PushAll(count) => {
                    let result = producer.try_push_all(&new(count));
                    prop_assert_eq!(result.is_err(), count > capacity);
                    let fits = count <= room;
                    prop_assert!(result.is_err() || result == Ok(fits));
                    if fits {
                        model.extend(next..next + count);
                        next += count;
                    }
                }
                Step::PushSome(count) => {
                    let added = producer.push_some(&new(count)).unwrap();
                    prop_assert_eq!(added, count.min(room));
                    model.extend(next..next + added);
                    next += added;
                }
                Step::Discard(count) => {
                    let count = count.min(capacity);
                    let batch = producer.try_reserve(count).unwrap();
                    prop_assert_eq!(batch.is_some(), count <= room);
                    if let Some(mut batch) = batch {
                        batch.write(0, &vec![[[255; 31]; 17]; count]).unwrap();
                    }
                }
                Step::Pop => {
                    let found = consumer.try_pop().unwrap();
                    prop_assert!(found == model.pop_front().map(record));
                }
                Step::PopInto(count) => {
                    let mut to = vec![[[0; 31]; 17]; count];
                    let found = consumer.pop_into(&mut to).unwrap();
                    prop_assert_eq!(found, count.min(model.len()));
                    prop_assert!(to[..found].iter().copied().eq(model.drain(..found).map(record)));
                }
                Step::Release(most, first) => {
                    let records = consumer.peek(most).unwrap();
                    prop_assert_eq!(records.len(), most.min(model.len()));
                    for (index, &n) in model.iter().take(records.len()).enumerate() {
                        prop_assert!(records.get(index).unwrap() == record(n));
                    }
                    let gone = first.min(records.len());
                    records.release_first(first).unwrap();
                    model.drain(..gone);
                }
                Step::Gpu => {
                    producer = producer.into_gpu().into_cpu().unwrap();
                    consumer = consumer.into_gpu().into_cpu().unwrap();
                }
            }
            prop_assert_eq!(consumer.ready(), Ok(model.len()));
            prop_assert_eq!(producer.room(), Ok(capacity - model.len()));
        }
        drop((producer, consumer));
        nothing_held(&driver);
    }
}
