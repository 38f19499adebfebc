//! A list where threads leave items for a structure that they do not enter.

use std::marker::PhantomData;
use std::ptr::null_mut;

use super::sync::{AtomicPtr, Ordering};

/// A stack that any thread pushes to and that is drained as a whole (R. K. Treiber, "Systems programming:
/// coping with parallelism", 1986).
///
/// No thread pops a single node, so no thread follows a pointer that another may free, and a node that comes
/// back at the same address does no harm (no ABA problem). Several threads may drain at a time: each item
/// goes to one of them.
// The word is on a cache line of its own; 128 bytes, since x86 fetches lines in pairs.
#[repr(align(128))]
pub(crate) struct Inbox<T> {
    newest: AtomicPtr<Node<T>>,
    items: PhantomData<T>,
}

/// An item and its link.
pub(crate) struct Node<T> {
    /// The node pushed before; of no meaning while the node is in no list.
    older: *mut Node<T>,
    pub(super) item: T,
}

// SAFETY: the link is used only while the node is in a list, which then owns both ends.
unsafe impl<T: Send> Send for Node<T> {}

impl<T> Node<T> {
    pub(crate) fn new(item: T) -> Box<Self> {
        let older = null_mut();
        Box::new(Self { older, item })
    }
}

// SAFETY: an item moves from one thread to another, and no two access it at a time.
unsafe impl<T: Send> Sync for Inbox<T> {}

impl<T> Inbox<T> {
    pub(crate) fn new() -> Self {
        Self {
            newest: AtomicPtr::new(null_mut()),
            items: PhantomData,
        }
    }

    /// Pushes an item; this allocates its node.
    pub(crate) fn push(&self, item: T) {
        self.push_node(Node::new(item));
    }

    /// Pushes an item with its node.
    pub(crate) fn push_node(&self, node: Box<Node<T>>) {
        let mut newest = self.newest.load(Ordering::Relaxed);
        let node = Box::into_raw(node);
        loop {
            // SAFETY: it comes from a box, and no other thread has it before the exchange succeeds.
            unsafe { (*node).older = newest };
            // Releases the node to the thread that drains. Later pushes belong to the same release sequence,
            // so a thread that acquires a later one has this one's contents too.
            match self.newest.compare_exchange_weak(
                newest,
                node,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => newest = now,
            }
        }
    }

    /// Takes all items, the newest first. Dropping the iterator drops the rest.
    pub(crate) fn take_all(&self) -> Taken<T> {
        let newest = if self.is_empty() {
            null_mut()
        } else {
            // Acquires all nodes in the chain.
            self.newest.swap(null_mut(), Ordering::Acquire)
        };
        Taken {
            newest,
            items: PhantomData,
        }
    }

    /// Returns whether the inbox seems empty: a hint, which only reads.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.newest.load(Ordering::Relaxed).is_null()
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        drop(self.take_all());
    }
}

/// The items taken from an [`Inbox`], the newest first.
pub(crate) struct Taken<T> {
    newest: *mut Node<T>,
    items: PhantomData<T>,
}

// SAFETY: the chain belongs to this value alone.
unsafe impl<T: Send> Send for Taken<T> {}

impl<T> Taken<T> {
    /// Takes the newest item with its node.
    pub(crate) fn next_node(&mut self) -> Option<Box<Node<T>>> {
        if self.newest.is_null() {
            return None;
        }
        // SAFETY: chains consist of nodes from boxes in `push_node`, and one swap took this one for this value
        // alone.
        let node = unsafe { Box::from_raw(self.newest) };
        self.newest = node.older;
        Some(node)
    }
}

impl<T> Iterator for Taken<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        self.next_node().map(|node| node.item)
    }
}

impl<T> Drop for Taken<T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;

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
    fn what_is_left_is_dropped_with_it() {
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
}

#[cfg(all(test, loom))]
mod under_loom {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

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
    fn what_is_left_is_dropped_with_it() {
        loom::model(|| {
            let inbox = Arc::new(Inbox::new());
            let pusher = pusher(&inbox, &[0]);
            inbox.push(Item::new(1));
            drop(inbox.take_all());
            pusher.join().unwrap();
        });
    }
}
