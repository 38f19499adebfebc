//! A growable vector behaves like a `Vec` under random operations.

use egmem::shapes::Growable;
use proptest::prelude::*;

use crate::shapes::{grace, node, nothing_held};

#[derive(Clone, Debug)]
enum Step {
    Push(u16),
    Extend(usize),
    Reserve(usize),
    Truncate(usize),
    Shrink,
    Set(usize),
    Keep,
    Forget,
}

fn step() -> impl Strategy<Value = Step> {
    let len = 0..3_000_000_usize;
    prop_oneof![
        any::<u16>().prop_map(Step::Push),
        len.clone().prop_map(Step::Extend),
        len.clone().prop_map(Step::Reserve),
        len.clone().prop_map(Step::Truncate),
        len.prop_map(Step::Set),
        Just(Step::Shrink),
        Just(Step::Keep),
        Just(Step::Forget),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn it_is_a_vec(steps in prop::collection::vec(step(), 1..24)) {
        let driver = grace();
        let options = Growable::<u16>::on(node(&driver)).max_len(8_000_000);
        let mut vector = options.create(&driver).unwrap();
        let (mut model, mut kept) = (Vec::new(), Vec::new());
        for step in steps {
            match step {
                Step::Push(value) => {
                    let fits = model.len() < 8_000_000;
                    prop_assert_eq!(vector.push(value).is_ok(), fits);
                    model.extend(fits.then_some(value));
                }
                Step::Extend(len) => {
                    let values: Vec<u16> = (0..len).map(|n| (n * 7 + model.len()) as u16).collect();
                    let fits = model.len() + len <= 8_000_000;
                    prop_assert_eq!(vector.extend_from_slice(&values).is_ok(), fits);
                    if fits {
                        model.extend(values);
                    }
                }
                Step::Reserve(len) => {
                    let fits = model.len() + len <= 8_000_000;
                    prop_assert_eq!(vector.reserve(len).is_ok(), fits);
                    prop_assert!(!fits || vector.capacity() >= model.len() + len);
                }
                Step::Truncate(len) => {
                    vector.truncate(len);
                    model.truncate(len);
                }
                Step::Shrink => {
                    let before = vector.mapped_bytes();
                    let given = vector.shrink_to_fit().unwrap();
                    prop_assert_eq!(vector.mapped_bytes(), before - given);
                }
                Step::Set(index) => {
                    let result = vector.set(index, 1);
                    prop_assert_eq!(result.is_ok(), index < model.len());
                    if let Some(value) = model.get_mut(index) {
                        *value = 1;
                    }
                }
                Step::Keep => kept.push(vector.prefix()),
                Step::Forget => drop(kept.pop()),
            }
            prop_assert_eq!(vector.len(), model.len());
            prop_assert!(vector.capacity() >= vector.len());
        }
        let mut seen = vec![0_u16; model.len()];
        vector.cpu().unwrap().read_at(0, &mut seen).unwrap();
        prop_assert!(seen == model);
        for prefix in kept {
            // All of it is still mapped.
            let len = prefix.len();
            prop_assert!(len == 0 || prefix.get(len - 1).is_ok());
        }
        drop(vector);
        nothing_held(&driver);
    }
}
