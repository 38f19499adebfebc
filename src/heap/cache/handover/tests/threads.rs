use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;

use super::super::*;

#[test]
fn it_takes_as_many_as_it_has_places() {
    for places in 0..4 {
        let depot = Depot::new(places);
        assert!(depot.take().is_none());
        for number in 0..places {
            depot.put(Box::new(number)).unwrap();
        }
        assert_eq!(depot.put(Box::new(places)), Err(Box::new(places)));
        let taken: HashSet<_> = std::iter::from_fn(|| depot.take()).collect();
        assert_eq!(taken.len(), places);
    }
}

#[test]
fn what_is_left_in_a_depot_is_dropped_with_it() {
    let item = Arc::new(());
    let depot = Depot::new(3);
    depot.put(Box::new(item.clone())).unwrap();
    depot.put(Box::new(item.clone())).unwrap();
    assert_eq!(Arc::strong_count(&item), 3);
    drop(depot);
    assert_eq!(Arc::strong_count(&item), 1);
}

#[test]
fn each_box_goes_to_one() {
    const BOXES: usize = 5_000;
    let depot = &Depot::new(3);
    let mut all: Vec<usize> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    for number in 0..BOXES {
                        let full = Box::new(thread * BOXES + number);
                        // If the depot is full, the box is this thread's own. Each box is read at once,
                        // before anything else could order the two threads.
                        mine.extend(depot.put(full).err().map(|full| *full));
                        if number % 2 == 0 {
                            mine.extend(depot.take().map(|full| *full));
                        }
                    }
                    mine
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    all.extend(std::iter::from_fn(|| depot.take()).map(|full| *full));
    all.sort_unstable();
    assert!(all.into_iter().eq(0..4 * BOXES));
}

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
