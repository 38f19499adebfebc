//! An appender is a `Vec` to which kernels add the records that memory is mapped for, through all operations.

use std::time::Duration;

use egmem::shapes::Appender;
use proptest::prelude::*;

use crate::shapes::append_threads::{Record, Threads, record};
use crate::shapes::{MIB, grace, node, nothing_held};

const MOST: usize = 300_000;

#[derive(Clone, Debug)]
enum Step {
    Kernel(Vec<usize>),
    Pump,
    Collect,
    Cpu(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let batches = prop::collection::vec(1..60_000_usize, 1..5);
    prop_oneof![
        3 => batches.prop_map(Step::Kernel),
        2 => Just(Step::Pump),
        2 => Just(Step::Collect),
        1 => (0..60_000_usize).prop_map(Step::Cpu),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn it_is_a_vec_with_the_records_that_fit(steps in prop::collection::vec(step(), 1..30), ahead in 1..50_000_usize) {
        let driver = grace();
        let options = Appender::<Record>::on(node(&driver)).max_len(MOST).step(2 * MIB);
        let mut appender = options.ahead(ahead).create(&driver).unwrap();
        // SAFETY: the appender is dropped after the last use.
        let gpu = unsafe { Threads::open(appender.device_ptr()) };
        // The collected items, those that came since, and the count of those missed since.
        let (mut model, mut since, mut missed) = (Vec::new(), Vec::new(), 0);
        let mut item = 0;
        for step in steps {
            match step {
                Step::Kernel(batches) => for batch in batches {
                    let items: Vec<u64> = (item..item + batch as u64).collect();
                    item += batch as u64;
                    let capacity = appender.records().capacity();
                    let came = gpu.append(&items, Duration::ZERO);
                    // Closed once, it stays so until it is collected.
                    let room = match missed {
                        0 => capacity - model.len() - since.len(),
                        _ => 0,
                    };
                    let fits = room.min(batch);
                    prop_assert!(came.iter().enumerate().all(|(n, &came)| came == (n < fits)));
                    since.extend(&items[..fits]);
                    missed += (batch - fits) as u64;
                },
                Step::Pump => {
                    let mapped = appender.pump();
                    prop_assert!(mapped <= MOST && mapped >= (model.len() + ahead).min(MOST));
                }
                Step::Collect => {
                    let came = appender.collect().unwrap();
                    prop_assert_eq!(came.records, model.len()..model.len() + since.len());
                    prop_assert_eq!((came.missed, came.stopped), (missed, None));
                    model.append(&mut since);
                    missed = 0;
                }
                Step::Cpu(count) => {
                    let items = item..item + count as u64;
                    let new: Vec<Record> = items.clone().map(record).collect();
                    let result = appender.append(&new);
                    prop_assert_eq!(result.is_ok(), since.is_empty() && missed == 0);
                    let fits = count.min(MOST - model.len());
                    if let Ok(added) = result {
                        prop_assert_eq!(added, fits);
                        model.extend(items.take(fits));
                        item += count as u64;
                    }
                }
            }
            prop_assert_eq!(appender.records().len(), model.len());
        }
        let mut seen = vec![[0; 2]; model.len()];
        appender.records().cpu().unwrap().read_at(0, &mut seen).unwrap();
        prop_assert!(seen.into_iter().eq(model.into_iter().map(record)));
        drop(appender);
        nothing_held(&driver);
    }
}
