use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::thread;

use super::*;

fn owner<T>(value: &Reserved<T>) -> u64 {
    value.visitor.load(Ordering::Relaxed)
}

fn step(value: &mut [u64; 2]) -> u64 {
    assert_eq!(value[0], value[1], "two are inside at a time");
    value[0] += 1;
    std::hint::black_box(&mut *value);
    value[1] += 1;
    1
}

fn count_with(fence: Fence) {
    const CAPACITY: u64 = 20_000;
    let value = &Reserved::made([0_u64; 2], fence, 3);
    let start = &Barrier::new(3);
    thread::scope(|scope| {
        for thread in 0..3_u64 {
            scope.spawn(move || {
                let mut visitor = Visitor::new();
                start.wait();
                let mut done = 0;
                while done < CAPACITY {
                    // One of them never enters as a visitor.
                    let inside = match (thread, done % 64) {
                        (0, _) => Some(step(&mut value.lock())),
                        (_, 0..48) => Some(step(&mut value.visit(&mut visitor))),
                        _ => value
                            .try_visit(&mut visitor)
                            .map(|mut value| step(&mut value)),
                    };
                    done += inside.unwrap_or(0);
                    if thread == 0 && done.is_multiple_of(16) {
                        thread::yield_now();
                    }
                }
            });
        }
    });
    assert_eq!(*value.lock(), [3 * CAPACITY; 2]);
}

#[test]
fn no_two_are_inside_and_no_count_is_lost() {
    count_with(Fence::of_process());
}

#[test]
fn nor_where_the_kernel_has_no_membarrier() {
    count_with(Fence::Mutual);
}

#[test]
fn who_comes_again_and_again_has_it_reserved_until_another_comes() {
    let value = Reserved::new(0);
    let (mut one, mut other) = (Visitor::new(), Visitor::new());
    for _ in 0..FIRST {
        *value.visit(&mut one) += 1;
        assert_eq!(owner(&value), 0);
    }
    *value.visit(&mut one) += 1;
    assert_eq!(owner(&value), one.name);
    *value.visit(&mut one) += 1;
    // Others turn away for a while, and then revoke the reservation.
    for _ in 0..PATIENCE {
        assert!(value.try_visit(&mut other).is_none());
    }
    let inside = value.try_visit(&mut other).map(|value| *value);
    assert_eq!(inside, Some(FIRST + 2));
    assert_eq!(owner(&value), 0);
    // The next reservation takes twice as many entries.
    for _ in 0..2 * FIRST {
        drop(value.visit(&mut one));
        assert_eq!(owner(&value), 0);
    }
    drop(value.visit(&mut one));
    assert_eq!(owner(&value), one.name);
    drop(value.visit(&mut other));
    assert_eq!(owner(&value), 0);
}

#[test]
fn who_takes_turns_has_it_never() {
    let value = Reserved::new(());
    let mut visitors = [Visitor::new(), Visitor::new()];
    for round in 0..10 * FIRST as usize {
        drop(value.visit(&mut visitors[round % 2]));
        drop(value.lock());
        assert_eq!(owner(&value), 0);
    }
}

#[test]
fn while_it_is_locked_trying_fails_and_changes_nothing() {
    let value = Reserved::new(1);
    let mut visitor = Visitor::new();
    let held = value.lock();
    assert!(value.try_visit(&mut visitor).is_none());
    drop(held);
    let inside = value.try_visit(&mut visitor).map(|value| *value);
    assert_eq!(inside, Some(1));
}

#[test]
fn a_panic_inside_leaves_it_usable() {
    let value = Reserved::made(1, Fence::of_process(), 1);
    let mut visitor = Visitor::new();
    for _ in 0..4 {
        let panics = || {
            let _inside = value.visit(&mut visitor);
            panic!("on purpose");
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    }
    assert_eq!(owner(&value), visitor.name);
    assert_eq!(*value.lock(), 1);
}

#[test]
fn it_is_crowded_while_visitors_take_turns() {
    let lock = Reserved::new(0);
    let (mut one, mut other) = (Visitor::new(), Visitor::new());
    let visit = |visitor: &mut Visitor| *lock.visit(visitor) += 1;
    visit(&mut one);
    drop(lock.lock());
    visit(&mut one);
    assert!(!lock.is_crowded(), "there was one visitor");
    visit(&mut other);
    assert!(lock.is_crowded());
    (1..FIRST - 1).for_each(|_| visit(&mut other));
    assert!(lock.is_crowded());
    visit(&mut other);
    assert!(!lock.is_crowded(), "the other is gone");
    visit(&mut one);
    assert!(lock.is_crowded());
}
