use proptest::prelude::*;

use super::*;

#[test]
fn no_page_has_more_users_than_can_be_counted() {
    let key = Key::new([1; Key::BYTES]);
    let mut table = Table::new(1, 1).unwrap();
    let reserved = table.reserve(&[key]).unwrap();
    table.commit(&[reserved.placed[0].1]).unwrap();
    table.slots[0].users = u32::MAX - 1;
    assert!(table.pin(&[key, key]).is_err());
    assert_eq!(table.slots[0].users, u32::MAX - 1, "nothing has changed");
    let pages = table.pin(&[key]).unwrap();
    assert!(table.begin_copy(&pages, Direction::Load).is_err());
    assert_eq!(table.slots[0].users, u32::MAX);
}

/// A step of a tier that grows.
#[derive(Clone, Debug)]
enum Step {
    Grow(u32),
    Store(Vec<u8>),
    Remove(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..4_u32).prop_map(Step::Grow),
        prop::collection::vec(0..40_u8, 0..6).prop_map(Step::Store),
        (0..40_u8).prop_map(Step::Remove),
    ]
}

proptest! {
    /// Only pages with memory are given out, each to one key at a time, and the first ones first.
    #[test]
    fn a_table_grows_at_any_time(steps in prop::collection::vec(step(), 0..60)) {
        const PAGES: u32 = 24;
        let mut table = Table::without_memory(PAGES, 1).unwrap();
        let (mut usable, mut taken) = (0, 0);
        let key = |number: u8| Key::new([number; Key::BYTES]);
        for step in steps {
            match step {
                Step::Grow(more) => {
                    usable = (usable + more).min(PAGES);
                    table.grow_to(usable);
                    // What is there already changes nothing.
                    table.grow_to(usable / 2);
                }
                Step::Remove(number) => drop(table.remove(&[key(number)])),
                Step::Store(numbers) => {
                    let keys: Vec<Key> = numbers.into_iter().map(key).collect();
                    match table.reserve(&keys) {
                        Ok(reserved) => {
                            let pages: Vec<PageId> =
                                reserved.placed.iter().map(|&(_, page)| page).collect();
                            for page in &pages {
                                prop_assert!(page.number() < usable);
                                // A page is taken for the first time after all before it.
                                prop_assert!(page.number() <= taken);
                                taken = taken.max(page.number() + 1);
                            }
                            prop_assert!(table.commit(&pages).is_ok());
                        }
                        Err(Error::Full { needed, available, missing, pages, .. }) => {
                            prop_assert!(needed > available && available <= usable as usize);
                            prop_assert_eq!((missing, pages), ((PAGES - usable) as usize, PAGES as usize));
                        }
                        Err(error) => prop_assert!(false, "{}", error),
                    }
                }
            }
            let stats = table.stats();
            prop_assert_eq!((stats.pages, stats.usable), (PAGES.into(), usable.into()));
            prop_assert_eq!(stats.free + stats.ready, u64::from(usable));
            prop_assert_eq!((stats.writing, stats.pinned), (0, 0));
        }
    }
}
