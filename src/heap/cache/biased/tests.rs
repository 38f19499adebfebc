//! With real threads and the kernel: no two threads are ever inside at once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::thread;

use super::*;

/// Two counts that are equal whenever no thread is inside.
#[derive(Debug, Default, PartialEq)]
struct Pair(u64, u64);

impl Pair {
    fn step(&mut self) {
        assert_eq!(self.0, self.1, "two threads are inside at a time");
        self.0 += 1;
        std::hint::black_box(&mut *self);
        self.1 += 1;
    }
}

fn everybody_counts(fence: Fence) {
    const OWNERS: u64 = 100_000;
    const HOLDERS: u64 = 2_000;
    let pair = Biased::with_fence(Pair::default(), fence);
    let start = Barrier::new(3);
    thread::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            for _ in 0..OWNERS {
                // SAFETY: this thread alone is the owner.
                unsafe { pair.owner(Pair::step) };
            }
        });
        scope.spawn(|| {
            start.wait();
            for _ in 0..HOLDERS {
                pair.hold().step();
            }
        });
        scope.spawn(|| {
            start.wait();
            for _ in 0..HOLDERS {
                for mut held in Biased::hold_all([&pair, &pair]) {
                    held.step();
                }
            }
        });
    });
    let all = OWNERS + 2 * HOLDERS;
    assert_eq!(*pair.hold(), Pair(all, all));
}

#[test]
fn no_two_are_inside_and_no_count_is_lost() {
    everybody_counts(Fence::of_process());
}

#[test]
fn nor_where_the_kernel_has_no_membarrier() {
    everybody_counts(Fence::Mutual);
}

#[test]
fn all_are_held_whatever_the_order_they_are_named_in() {
    const CAPACITY: u64 = 2_000;
    let pairs: [_; 3] = std::array::from_fn(|_| Biased::new(Pair::default()));
    let (pairs, start) = (&pairs, &Barrier::new(3));
    thread::scope(|scope| {
        for backwards in [false, true] {
            scope.spawn(move || {
                start.wait();
                for _ in 0..CAPACITY {
                    let held = if backwards {
                        Biased::hold_all(pairs.iter().rev())
                    } else {
                        Biased::hold_all(pairs)
                    };
                    assert_eq!(held.len(), pairs.len());
                    held.into_iter().for_each(|mut pair| pair.step());
                }
            });
        }
        scope.spawn(move || {
            start.wait();
            for _ in 0..10 * CAPACITY {
                // SAFETY: this thread alone is the owner.
                unsafe { pairs[1].owner(Pair::step) };
            }
        });
    });
    let counts: Vec<_> = pairs.iter().map(|pair| pair.hold().0).collect();
    assert_eq!(counts, [2 * CAPACITY, 12 * CAPACITY, 2 * CAPACITY]);
}

#[test]
fn the_owner_waits_for_a_holder_and_sees_what_it_did() {
    let value = &Biased::new(0);
    let inside = &Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut held = value.hold();
            inside.wait();
            for _ in 0..100 {
                *held += 1;
                yield_now();
            }
        });
        inside.wait();
        // SAFETY: this thread alone is the owner.
        assert_eq!(unsafe { value.owner(|value| *value) }, 100);
    });
}

#[test]
fn a_panic_inside_leaves_it_usable() {
    let value = &Biased::new(1);
    // SAFETY: this thread alone is the owner.
    let owner = || unsafe { value.owner(|_| panic!("on purpose")) };
    assert!(catch_unwind(AssertUnwindSafe(owner)).is_err());
    assert_eq!(*value.hold(), 1);
    let held = || {
        let _held = value.hold();
        panic!("on purpose")
    };
    assert!(catch_unwind(AssertUnwindSafe(held)).is_err());
    // SAFETY: this thread alone is the owner.
    assert_eq!(unsafe { value.owner(|value| *value) }, 1);
    assert_eq!(*value.hold(), 1);
}

#[test]
fn a_panic_of_an_owner_in_turn_leaves_it_usable() {
    let value = &Biased::new(1);
    value.wanted.store(true, Ordering::Relaxed);
    // SAFETY: this thread alone is the owner.
    let owner = || unsafe { value.owner(|_| panic!("on purpose")) };
    assert!(catch_unwind(AssertUnwindSafe(owner)).is_err());
    value.wanted.store(false, Ordering::Relaxed);
    assert_eq!(*value.hold(), 1);
}

#[test]
#[cfg(debug_assertions)]
fn a_thread_is_inside_of_one_alone() {
    let (one, other) = (&Biased::new(1), &Biased::new(2));
    let held = one.hold();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(other.hold()))).is_err());
    // SAFETY: this thread alone is the owner.
    let owner = || unsafe { other.owner(|_| ()) };
    assert!(catch_unwind(AssertUnwindSafe(owner)).is_err());
    drop(held);
    drop(Biased::hold_all([one, other]));
    assert_eq!(*other.hold(), 2);
}

#[test]
fn its_words_share_a_cache_line_with_nobody() {
    assert_eq!(align_of::<Biased<u8>>(), 128);
    assert_eq!(size_of::<Biased<u8>>() % 128, 0);
}
