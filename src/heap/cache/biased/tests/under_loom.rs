//! In every order of events (`ci/loom`).

use loom::sync::Arc;
use loom::thread;

use super::super::*;

fn count(value: &mut usize) {
    *value += 1;
}

/// Loom watches the value: it fails if two threads are inside at once, or if one thread's access does not
/// happen after the previous one's.
#[test]
fn an_owner_and_two_holders() {
    loom::model(|| {
        let value = Arc::new(Biased::new(0));
        let holders: Vec<_> = (0..2)
            .map(|_| {
                let value = value.clone();
                thread::spawn(move || count(&mut value.hold()))
            })
            .collect();
        for _ in 0..2 {
            // SAFETY: this thread alone is the owner.
            unsafe { value.owner(count) };
        }
        for holder in holders {
            holder.join().unwrap();
        }
        assert_eq!(*value.hold(), 4);
    });
}

#[test]
fn a_holder_comes_again() {
    loom::model(|| {
        let value = Arc::new(Biased::new(0));
        let holder = {
            let value = value.clone();
            thread::spawn(move || {
                count(&mut value.hold());
                count(&mut value.hold());
            })
        };
        for _ in 0..3 {
            // SAFETY: this thread alone is the owner.
            unsafe { value.owner(count) };
        }
        holder.join().unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { value.owner(|value| *value) }, 5);
    });
}

#[test]
fn two_hold_all_and_an_owner() {
    loom::model(|| {
        let values = Arc::new([Biased::new(0), Biased::new(0)]);
        let holder = {
            let values = values.clone();
            thread::spawn(move || {
                let all = Biased::hold_all(values.iter().rev());
                all.into_iter().for_each(|mut value| count(&mut value));
            })
        };
        let owner = {
            let values = values.clone();
            // SAFETY: this thread alone is the owner.
            thread::spawn(move || unsafe { values[1].owner(count) })
        };
        let all = Biased::hold_all(values.iter());
        all.into_iter().for_each(|mut value| count(&mut value));
        holder.join().unwrap();
        owner.join().unwrap();
        assert_eq!([*values[0].hold(), *values[1].hold()], [2, 3]);
    });
}
