//! In every order of events (`ci/loom`).

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::super::*;

/// Loom fails if a thread reads an item without acquiring what its creator wrote, or if an item still
/// exists at the end.
struct Item {
    number: UnsafeCell<usize>,
    _leaks_are_found: loom::alloc::Track<()>,
}

impl Item {
    fn new(number: usize) -> Self {
        let item = Self {
            number: UnsafeCell::new(0),
            _leaks_are_found: loom::alloc::Track::new(()),
        };
        // SAFETY: no other thread has it.
        item.number.with_mut(|pointer| unsafe { *pointer = number });
        item
    }

    /// Also writes, because the thread that has the item has it alone.
    fn number(&self) -> usize {
        // SAFETY: loom stops the test if another access is possible at the same time.
        self.number.with_mut(|pointer| unsafe { *pointer })
    }
}

fn drain(inbox: &Inbox<Item>) -> Vec<usize> {
    inbox.take_all().map(|item| item.number()).collect()
}

fn pusher(inbox: &Arc<Inbox<Item>>, numbers: &'static [usize]) -> thread::JoinHandle<()> {
    let inbox = inbox.clone();
    thread::spawn(move || {
        numbers
            .iter()
            .for_each(|number| inbox.push(Item::new(*number)))
    })
}

#[test]
fn two_pushers_and_a_drainer() {
    loom::model(|| {
        let inbox = Arc::new(Inbox::new());
        let pushers = [pusher(&inbox, &[0, 1]), pusher(&inbox, &[2])];
        let mut all = drain(&inbox);
        for pusher in pushers {
            pusher.join().unwrap();
        }
        all.extend(drain(&inbox));
        assert!(inbox.is_empty());
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2]);
    });
}

#[test]
fn a_pusher_and_two_drainers() {
    loom::model(|| {
        let inbox = Arc::new(Inbox::new());
        let pusher = pusher(&inbox, &[0, 1]);
        let other = {
            let inbox = inbox.clone();
            thread::spawn(move || drain(&inbox))
        };
        let mut all = drain(&inbox);
        pusher.join().unwrap();
        all.extend(other.join().unwrap());
        all.extend(drain(&inbox));
        all.sort_unstable();
        assert_eq!(all, [0, 1]);
    });
}

#[test]
fn what_is_left_in_an_inbox_is_dropped_with_it() {
    loom::model(|| {
        let inbox = Arc::new(Inbox::new());
        let pusher = pusher(&inbox, &[0]);
        inbox.push(Item::new(1));
        drop(inbox.take_all());
        pusher.join().unwrap();
    });
}
