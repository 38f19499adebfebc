//! A few slots where threads leave full boxes for each other.

use std::marker::PhantomData;
use std::ptr::null_mut;

use super::sync::{AtomicPtr, Ordering};

/// Boxes that any thread puts and any thread takes, without locks and in no particular order.
///
/// A slot changes from empty to a box by compare-and-swap, and from any content to empty by a swap. No thread
/// reads a box's contents before it owns the box, so it does not matter if a box that was taken comes back at
/// the same address (no ABA problem). Checking empty slots only reads.
///
/// Each thread starts its search at its own slot, so that threads rarely contend for one. It also finds its
/// own last box first, which is still in its CPU's caches.
pub(crate) struct Depot<T> {
    places: Box<[Place<T>]>,
    boxes: PhantomData<Box<T>>,
}

/// A slot on a cache line of its own; 128 bytes, since x86 fetches lines in pairs.
#[repr(align(128))]
struct Place<T>(AtomicPtr<T>);

// SAFETY: a box moves from one thread to another, and no two access its contents at a time.
unsafe impl<T: Send> Sync for Depot<T> {}

impl<T> Depot<T> {
    /// Creates this many empty slots; 0 is allowed.
    pub(crate) fn new(places: usize) -> Self {
        Self {
            places: (0..places)
                .map(|_| Place(AtomicPtr::new(null_mut())))
                .collect(),
            boxes: PhantomData,
        }
    }

    /// Leaves a box for another thread.
    ///
    /// # Errors
    /// The box, if all slots are taken.
    pub(crate) fn put(&self, full: Box<T>) -> Result<(), Box<T>> {
        let full = Box::into_raw(full);
        for Place(place) in self.around() {
            // Releases the box's contents to the thread that takes it.
            if place.load(Ordering::Relaxed).is_null()
                && place
                    .compare_exchange(null_mut(), full, Ordering::Release, Ordering::Relaxed)
                    .is_ok()
            {
                return Ok(());
            }
        }
        // SAFETY: it came from a box above, and no slot has it.
        Err(unsafe { Box::from_raw(full) })
    }

    /// Returns the number of boxes; approximate while other threads put and take.
    pub(crate) fn len(&self) -> usize {
        let full = |Place(place): &&Place<T>| !place.load(Ordering::Relaxed).is_null();
        self.places.iter().filter(full).count()
    }

    /// Takes a box, if there is one.
    pub(crate) fn take(&self) -> Option<Box<T>> {
        for Place(place) in self.around() {
            if place.load(Ordering::Relaxed).is_null() {
                continue;
            }
            // Acquires the box's contents. Another thread may have taken it since the load.
            let full = place.swap(null_mut(), Ordering::Acquire);
            if !full.is_null() {
                // SAFETY: slots contain only pointers from boxes in `put`, and the swap gives each to one
                // thread alone.
                return Some(unsafe { Box::from_raw(full) });
            }
        }
        None
    }

    /// Iterates over all slots once, from this thread's first one on.
    fn around(&self) -> impl Iterator<Item = &Place<T>> {
        let first = this_thread() % self.places.len().max(1);
        let (end, start) = self.places.split_at(first);
        start.iter().chain(end)
    }
}

impl<T> Drop for Depot<T> {
    fn drop(&mut self) {
        while self.take().is_some() {}
    }
}

/// Returns a number that is constant within a thread and usually differs between threads.
#[cfg(not(loom))]
fn this_thread() -> usize {
    use std::sync::atomic::AtomicUsize;

    static THREADS: AtomicUsize = AtomicUsize::new(0);
    std::thread_local! {
        static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    // It has no destructor, so it exists until the thread's very end.
    NUMBER.with(|number| *number)
}

/// Every thread starts at the first slot: the most contention.
#[cfg(loom)]
fn this_thread() -> usize {
    0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::thread;

    use super::*;

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
    fn what_is_left_is_dropped_with_it() {
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
        fn boxed(number: usize) -> Box<Self> {
            let item = Self {
                number: UnsafeCell::new(0),
                _leaks_are_found: loom::alloc::Track::new(()),
            };
            // SAFETY: no other thread has it.
            item.number.with_mut(|pointer| unsafe { *pointer = number });
            Box::new(item)
        }

        /// Also writes, because the thread that has the item has it alone.
        fn number(&self) -> usize {
            // SAFETY: loom stops the test if another access is possible at the same time.
            self.number.with_mut(|pointer| unsafe { *pointer })
        }
    }

    fn taken(depot: &Depot<Item>) -> Vec<usize> {
        depot.take().map(|item| item.number()).into_iter().collect()
    }

    #[test]
    fn each_box_is_taken_once() {
        loom::model(|| {
            let depot = Arc::new(Depot::new(2));
            let threads: Vec<_> = (0..2)
                .map(|number| {
                    let depot = depot.clone();
                    thread::spawn(move || {
                        let refused = depot.put(Item::boxed(number)).err();
                        assert!(refused.is_none(), "there is a slot for each");
                        taken(&depot)
                    })
                })
                .collect();
            let mut all = taken(&depot);
            for thread in threads {
                all.extend(thread.join().unwrap());
            }
            all.extend(taken(&depot));
            all.extend(taken(&depot));
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        });
    }

    #[test]
    fn one_place_is_given_to_one() {
        loom::model(|| {
            let depot = Arc::new(Depot::new(1));
            depot.put(Item::boxed(0)).ok().unwrap();
            let threads: Vec<_> = (1..3)
                .map(|number| {
                    let depot = depot.clone();
                    thread::spawn(move || {
                        let mut mine = taken(&depot);
                        let refused = depot.put(Item::boxed(number)).err();
                        mine.extend(refused.map(|item| item.number()));
                        mine
                    })
                })
                .collect();
            let mut all = Vec::new();
            for thread in threads {
                all.extend(thread.join().unwrap());
            }
            all.extend(taken(&depot));
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2]);
        });
    }

    #[test]
    fn what_is_left_is_dropped_with_it() {
        loom::model(|| {
            let depot = Arc::new(Depot::new(2));
            let other = {
                let depot = depot.clone();
                thread::spawn(move || depot.put(Item::boxed(1)).is_ok())
            };
            assert!(depot.put(Item::boxed(0)).is_ok());
            assert!(other.join().unwrap());
        });
    }
}
