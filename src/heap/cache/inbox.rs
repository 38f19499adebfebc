//! A list where threads leave items for each other, without a lock.

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

#[cfg(test)]
mod tests;
