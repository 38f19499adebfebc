//! Places where threads leave boxes and items for each other, without locks: slots ([`Depot`]), and a list ([`Inbox`]).

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

    /// Returns the number of boxes; approximate while other threads put and take. What a thread wrote before it took a box
    /// that is not counted is visible afterwards.
    pub(crate) fn len(&self) -> usize {
        let full = |Place(place): &&Place<T>| !place.load(Ordering::Acquire).is_null();
        self.places.iter().filter(full).count()
    }

    /// Takes a box, if there is one.
    pub(crate) fn take(&self) -> Option<Box<T>> {
        for Place(place) in self.around() {
            if place.load(Ordering::Relaxed).is_null() {
                continue;
            }
            // Acquires the box's contents, and releases what this thread noted before to `len`. Another thread may have
            // taken it since the load.
            let full = place.swap(null_mut(), Ordering::AcqRel);
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

#[cfg(test)]
mod tests;
