//! Changes of keys, for those who watch them.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egmem::kv::{Events, Key, Subscription, Tier, TierEvent, TierEventKind, Verify};

use crate::kv::drivers::{grace, nothing_held};
use crate::kv::setup::{key, keys, store_nothing, tier};

fn taken(events: &Events) -> Vec<(TierEventKind, Vec<Key>)> {
    let all = std::iter::from_fn(|| events.try_next());
    all.map(|event| (event.kind, event.keys)).collect()
}

#[test]
fn each_change_is_an_event() {
    let driver = grace();
    let node = egmem::driver::NodeId(0);
    let tier = Tier::on(node)
        .pages(4)
        .page_bytes(64)
        .verify(Verify::Always);
    let tier = tier.create(&driver).unwrap();
    store_nothing(&tier, &keys(90..91));
    let events = tier.events(100);
    let later = tier.clone().events(100);
    store_nothing(&tier, &keys(0..3));
    drop(tier.prepare_store(&keys(3..5)).unwrap());
    store_nothing(&tier, &[]);
    tier.touch(&keys(0..3));
    assert_eq!(tier.remove(&keys(0..2)).unwrap(), 2);
    assert_eq!(tier.remove(&keys(0..2)).unwrap(), 0);
    store_nothing(&tier, &keys(7..8));
    let load = tier.prepare_load(&keys(7..8)).unwrap();
    load.view(0).unwrap().fill(9, 1, 3).unwrap();
    drop(load);
    assert!(tier.prepare_load(&[key(7), key(7)]).is_err());
    use TierEventKind::{Damaged, Evicted, Removed, Stored};
    let first = events.try_next().unwrap();
    assert_eq!((first.kind, first.group), (Stored, 0));
    let second = events.try_next().unwrap();
    assert_eq!(second.number, first.number + 1);
    assert_eq!((second.kind, second.keys), (Evicted, vec![key(90), key(2)]));
    let rest = [
        (Removed, keys(0..2)),
        (Stored, keys(7..8)),
        (Damaged, keys(7..8)),
    ];
    assert_eq!(taken(&events), rest);
    assert_eq!((taken(&later).len(), later.lost()), (5, 0));
    // A subscription that is over receives nothing, and another one goes on.
    drop(events);
    store_nothing(&tier, &keys(0..1));
    assert_eq!(taken(&later), [(Stored, keys(0..1))]);
}

#[test]
fn keys_that_do_not_fit_are_counted() {
    let driver = grace();
    let tier = tier(&driver, 20, 64);
    let (events, none) = (tier.events(3), tier.events(0));
    store_nothing(&tier, &keys(0..2));
    store_nothing(&tier, &keys(2..5));
    store_nothing(&tier, &keys(5..9));
    assert_eq!((events.lost(), none.lost()), (6, 9));
    let kind = TierEventKind::Stored;
    assert_eq!(
        events.try_next().map(|event| event.keys),
        Some(keys(0..2)),
        "what came first is kept"
    );
    store_nothing(&tier, &keys(9..10));
    assert_eq!(taken(&events), [(kind, keys(2..3)), (kind, keys(9..10))]);
    store_nothing(&tier, &keys(10..13));
    assert_eq!(taken(&events), [(kind, keys(10..13))]);
    assert_eq!((events.lost(), none.lost()), (6, 13));
    assert_eq!(none.try_next(), None);
}

#[test]
fn a_thread_waits_for_events_until_the_tier_is_gone() {
    let driver = grace();
    let tier = tier(&driver, 8, 64);
    let events = tier.events(100);
    assert_eq!(events.next_timeout(Duration::from_millis(1)), None);
    let seen = std::thread::scope(|scope| {
        let watcher = scope.spawn(move || events.flat_map(|event| event.keys).collect::<Vec<_>>());
        for number in 0..4 {
            store_nothing(&tier, &keys(number..number + 1));
        }
        drop(tier);
        watcher.join().unwrap()
    });
    assert_eq!(seen, keys(0..4));
}

/// A set that follows the events has the tier's keys in the end, for any order of the threads.
#[test]
fn events_have_the_order_of_the_changes() {
    let driver = grace();
    let tier = tier(&driver, 2, 64);
    let events = tier.events(usize::MAX);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let tier = &tier;
            scope.spawn(move || {
                for round in 0..5000 {
                    let key = [key(round % 5)];
                    if thread == 0 && round % 3 == 0 {
                        tier.remove(&key).unwrap();
                    } else if let Ok(mut store) = tier.prepare_store(&key) {
                        store.commit().unwrap();
                    }
                }
            });
        }
    });
    let mut ready = HashSet::new();
    for (number, event) in (0..).zip(std::iter::from_fn(|| events.try_next())) {
        assert_eq!(event.number, number);
        for key in event.keys {
            let is_change = match event.kind {
                TierEventKind::Stored => ready.insert(key),
                _ => ready.remove(&key),
            };
            assert!(is_change, "event {number}: {:?} {key}", event.kind);
        }
    }
    let found: HashSet<Key> = tier.keys().into_iter().map(|(key, _)| key).collect();
    assert_eq!(ready, found);
}

#[test]
fn a_function_may_use_the_tier_and_end_its_subscription() {
    let driver = grace();
    let tier = tier(&driver, 2, 64);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let own: Arc<Mutex<Option<Subscription>>> = Arc::default();
    let function = {
        let (tier, seen, own) = (tier.clone(), Arc::clone(&seen), Arc::clone(&own));
        let caller = std::thread::current().id();
        move |event: &TierEvent| {
            assert_eq!(std::thread::current().id(), caller);
            seen.lock().unwrap().push((event.kind, event.keys.clone()));
            if event.kind == TierEventKind::Evicted {
                // Before the call that made the change returns.
                assert_eq!(tier.stats().writing, 1);
                own.lock().unwrap().take();
            } else {
                assert_eq!(tier.lookup(&event.keys), event.keys.len());
                drop(tier.prepare_load(&event.keys).unwrap());
                drop(tier.on_event(|_| ()));
            }
        }
    };
    *own.lock().unwrap() = Some(tier.on_event(function));
    store_nothing(&tier, &keys(0..2));
    let mut store = tier.prepare_store(&keys(2..3)).unwrap();
    assert!(own.lock().unwrap().is_none());
    store.commit().unwrap();
    let expected = [
        (TierEventKind::Stored, keys(0..2)),
        (TierEventKind::Evicted, keys(1..2)),
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
    drop((tier, store));
    nothing_held(&driver);
}

/// A change stays made, and its pages are released, if a function panics.
#[test]
fn a_panic_of_a_function_is_one_of_the_call() {
    let driver = grace();
    let tier = tier(&driver, 1, 64);
    store_nothing(&tier, &keys(0..1));
    let subscription = tier.on_event(|_| panic!("a function's own"));
    let call = std::panic::AssertUnwindSafe(|| drop(tier.prepare_store(&keys(1..2))));
    assert!(std::panic::catch_unwind(call).is_err());
    assert_eq!((tier.stats().free, tier.keys().len()), (1, 0));
    drop(subscription);
    store_nothing(&tier, &keys(0..1));
}
