//! In every order of events (`ci/loom`).

use loom::sync::Arc;
use loom::thread;

use super::super::*;

/// Returns a value that two visits have reserved, and their visitor. `needed` is how many visits in a row reserve it.
fn reserved_for_one(needed: u32) -> (Arc<Reserved<i32>>, Visitor) {
    let value = Arc::new(Reserved::made(0, Fence::of_process(), needed));
    let mut visitor = Visitor::new();
    *value.visit(&mut visitor) += 1;
    *value.visit(&mut visitor) += 1;
    assert_eq!(value.visitor.load(Ordering::Relaxed), visitor.name);
    (value, visitor)
}

/// Loom watches the value: it fails if two threads are inside at once, or if one thread's access does not
/// happen after the previous one's.
#[test]
fn one_has_it_reserved_and_another_takes_it() {
    loom::model(|| {
        let (value, mut visitor) = reserved_for_one(1);
        let other = {
            let value = value.clone();
            thread::spawn(move || *value.lock() += 1)
        };
        *value.visit(&mut visitor) += 1;
        *value.visit(&mut visitor) += 1;
        other.join().unwrap();
        assert_eq!(*value.visit(&mut visitor), 5);
    });
}

/// The reservation moves from one visitor to another while the first is about to enter.
#[test]
fn a_visitor_that_comes_too_late_leaves_the_next_one_alone() {
    loom::model(|| {
        let (value, mut visitor) = reserved_for_one(0);
        let other = {
            let value = value.clone();
            thread::spawn(move || {
                let mut visitor = Visitor::new();
                // Enters, gets the reservation, and enters by it.
                (0..3).for_each(|_| *value.visit(&mut visitor) += 1);
            })
        };
        *value.visit(&mut visitor) += 1;
        other.join().unwrap();
        assert_eq!(*value.lock(), 6);
    });
}

#[test]
fn two_have_it_reserved_in_turn() {
    loom::model(|| {
        let value = Arc::new(Reserved::made(0, Fence::of_process(), 1));
        let other = {
            let value = value.clone();
            thread::spawn(move || {
                let mut visitor = Visitor::new();
                *value.visit(&mut visitor) += 1;
                *value.visit(&mut visitor) += 1;
                *value.visit(&mut visitor) += 1;
            })
        };
        let mut visitor = Visitor::new();
        *value.visit(&mut visitor) += 1;
        *value.visit(&mut visitor) += 1;
        if let Some(mut value) = value.try_visit(&mut visitor) {
            *value -= 1;
            *value += 1;
        }
        other.join().unwrap();
        assert_eq!(*value.lock(), 5);
    });
}
