use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;

use super::super::*;

#[test]
fn the_newest_comes_first() {
    let inbox = Inbox::new();
    assert!(inbox.is_empty());
    assert_eq!(inbox.take_all().next(), None);
    (0..5).for_each(|number| inbox.push(number));
    assert!(!inbox.is_empty());
    let taken = inbox.take_all();
    assert!(inbox.is_empty());
    inbox.push(5);
    assert!(taken.eq([4, 3, 2, 1, 0]));
    assert!(inbox.take_all().eq([5]));
}

#[test]
fn what_is_left_in_an_inbox_is_dropped_with_it() {
    let item = Arc::new(());
    let inbox = Inbox::new();
    (0..4).for_each(|_| inbox.push(item.clone()));
    let mut taken = inbox.take_all();
    assert!(taken.next().is_some());
    (0..2).for_each(|_| inbox.push(item.clone()));
    assert_eq!(Arc::strong_count(&item), 6);
    drop(taken);
    assert_eq!(Arc::strong_count(&item), 3);
    drop(inbox);
    assert_eq!(Arc::strong_count(&item), 1);
}

#[test]
fn each_item_arrives_once_and_in_order() {
    const ITEMS: usize = 5_000;
    const PUSHERS: usize = 3;
    let (inbox, arrived) = (&Inbox::new(), &AtomicUsize::new(0));
    let mut all: Vec<(usize, usize)> = thread::scope(|scope| {
        for pusher in 0..PUSHERS {
            scope.spawn(move || (0..ITEMS).for_each(|number| inbox.push((pusher, number))));
        }
        let drainers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    while arrived.load(Ordering::Relaxed) < PUSHERS * ITEMS {
                        let taken: Vec<_> = inbox.take_all().collect();
                        for pusher in 0..PUSHERS {
                            let numbers = taken.iter().filter(|item| item.0 == pusher);
                            assert!(numbers.rev().is_sorted_by(|one, next| one.1 < next.1));
                        }
                        arrived.fetch_add(taken.len(), Ordering::Relaxed);
                        mine.extend(taken);
                        thread::yield_now();
                    }
                    mine
                })
            })
            .collect();
        drainers
            .into_iter()
            .flat_map(|drainer| drainer.join().unwrap())
            .collect()
    });
    all.sort_unstable();
    let pushed = (0..PUSHERS).flat_map(|pusher| (0..ITEMS).map(move |number| (pusher, number)));
    assert!(all.into_iter().eq(pushed));
}
