//! A thread's part in a heap, found without a lock.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use super::{Biased, Kept, Local};
use crate::fork::Generation;
use crate::heap::shared::Shared;

/// A thread's cache of one heap, which other threads can take hold of.
///
/// Its thread has it until it ends or joins another heap, so it does not keep the heap's books, its driver
/// and its users' closures.
pub(in crate::heap) struct Member {
    heap: Weak<Shared>,
    id: u64,
    born: Generation,
    pub(in crate::heap) local: Biased<Local>,
    /// What may be in there, without taking it.
    pub(in crate::heap) kept: Arc<Kept>,
}

impl Member {
    pub(in crate::heap) fn new(heap: &Shared) -> Self {
        let local = Local::new();
        Self {
            heap: Weak::clone(&heap.this),
            id: heap.id,
            born: heap.born,
            kept: Arc::clone(&local.kept),
            local: Biased::new(local),
        }
    }

    /// Whether nothing is kept here any more; asked by its thread. In a forked child that is so of what its
    /// parent had: another thread may have held the cache, and would hold it for ever.
    fn is_closed(&self) -> bool {
        if !self.born.is_current() {
            return true;
        }
        // SAFETY: the thread is the only owner, and is not inside: it comes here from `find` alone, which
        // it reaches before it enters.
        unsafe { self.local.owner(|local| local.closed) }
    }
}

/// Where a thread looks first: as many heaps as these it finds at once.
const NEAR: usize = 8;

/// A heap's number, which is never used again, and the thread's member. Heaps are numbered from 1.
type Near = [(u64, *const Member); NEAR];

/// The members of this thread. At the thread's end they leave their heaps.
#[derive(Default)]
struct Members(RefCell<Vec<Arc<Member>>>);

thread_local! {
    /// Has no end of its own, so that looking costs no check whether it is still there.
    static NEAR_MEMBERS: Cell<Near> = const { Cell::new([(0, std::ptr::null()); NEAR]) };
    static MEMBERS: Members = Members::default();
}

impl Drop for Members {
    fn drop(&mut self) {
        NEAR_MEMBERS.set([(0, std::ptr::null()); NEAR]);
        for member in self.0.take() {
            // Whatever is freed in here finds the thread without members. In a forked child other threads'
            // locks are never released, and the heap is the parent's.
            if member.born.is_current()
                && let Some(heap) = member.heap.upgrade()
            {
                heap.leave(&member);
            }
        }
    }
}

/// What `f` gets from the calling thread's cache of `heap`. None also where the heap is closed, and at
/// the thread's end: then nothing is cached.
#[inline]
pub(in crate::heap) fn with<R>(
    heap: &Shared,
    f: impl FnOnce(&mut Local) -> Option<R>,
) -> Option<R> {
    let near = NEAR_MEMBERS.with(|near| {
        // SAFETY: this thread alone has the cell, and nothing runs between the read and its use.
        unsafe { (*near.as_ptr())[heap.id as usize % NEAR] }
    });
    let member = match near.0 == heap.id {
        true => near.1,
        false => find(heap)?,
    };
    // Who closes the heap waits until the owner is outside, and does not wait for more: where `f` frees
    // the last block, the heap may be gone from then on. The member is not.
    // SAFETY: what stands in the cell is an Arc's in `MEMBERS`, which lives until it is taken out of
    // both (`find`, the thread's end). The thread is the only owner of its member, and `f` does not
    // come here again: it is code of this module's users that calls no user's.
    unsafe {
        (*member).local.owner(|local| match local.closed {
            false => f(local),
            true => None,
        })
    }
}

/// The member, if it is none of those that are near: an old one, or a new one.
#[cold]
#[inline(never)]
fn find(heap: &Shared) -> Option<*const Member> {
    let found = MEMBERS.try_with(|members| {
        // Taken already only where a global allocator draws from a heap: then without a cache. No other
        // code of a user's runs in here: members that go keep no heap.
        let mut members = members.0.try_borrow_mut().ok()?;
        if let Some(member) = members.iter().find(|member| member.id == heap.id) {
            return Some(Arc::as_ptr(member));
        }
        members.retain(|member| {
            let open = !member.is_closed();
            if !open {
                forget_near(member.id);
            }
            open
        });
        let member = heap.join()?;
        members.push(Arc::clone(&member));
        Some(Arc::as_ptr(&member))
    });
    let member = found.ok().flatten()?;
    let mut near = NEAR_MEMBERS.get();
    near[heap.id as usize % NEAR] = (heap.id, member);
    NEAR_MEMBERS.set(near);
    Some(member)
}

fn forget_near(id: u64) {
    let mut near = NEAR_MEMBERS.get();
    let entry = &mut near[id as usize % NEAR];
    if entry.0 == id {
        *entry = (0, std::ptr::null());
    }
    NEAR_MEMBERS.set(near);
}
