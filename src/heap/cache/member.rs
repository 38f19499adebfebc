//! A thread's membership in a heap, found without a lock.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use super::biased::Biased;
use super::kept::Kept;
use super::local::Local;
use crate::fork::Generation;

/// The heap that threads are members of.
pub(crate) trait Home: Send + Sync {
    /// Returns the heap's number: unique in this process, never reused, at least 1.
    fn id(&self) -> u64;

    /// Returns a member for the calling thread, or `None` if the heap is closed or caches nothing.
    fn join(&self) -> Option<Arc<Member>>;

    /// Returns the cache of the calling thread, which ends, to the core.
    fn leave(&self, member: &Arc<Member>);
}

/// A thread's cache of one heap, which other threads can take.
///
/// The thread owns it until the thread ends or joins another heap. So a member must not keep the heap's
/// tables, its driver and its users' closures alive.
pub(crate) struct Member {
    heap: Weak<dyn Home>,
    id: u64,
    born: Generation,
    pub(crate) local: Biased<Local>,
    /// The cache's upper bound, readable without taking the cache.
    pub(crate) kept: Arc<Kept>,
}

impl Member {
    /// Creates a member of the heap with the number `id`, which the process `born` created.
    pub(crate) fn new(heap: Weak<dyn Home>, id: u64, born: Generation) -> Self {
        let local = Local::new();
        Self {
            heap,
            id,
            born,
            kept: Arc::clone(&local.kept),
            local: Biased::new(local),
        }
    }

    /// Returns whether the cache is closed; called by its thread. In a forked child, members of the parent
    /// count as closed: another thread may have held the cache at the fork, and the child would wait forever.
    fn is_closed(&self) -> bool {
        if !self.born.is_current() {
            return true;
        }
        // SAFETY: the thread is the only owner and is not inside: only `find` calls this, before it enters.
        unsafe { self.local.owner(|local| local.closed) }
    }
}

/// The size of a thread's direct-mapped table: so many heaps are found at once.
const NEAR: usize = 8;

/// A heap's number, which is never reused, and the thread's member. Heaps are numbered from 1.
type Near = [(u64, *const Member); NEAR];

/// The members of this thread. They leave their heaps when the thread ends.
#[derive(Default)]
struct Memberships(RefCell<Vec<Arc<Member>>>);

thread_local! {
    /// Has no destructor, so that an access need not check whether the value still exists.
    static NEAR_MEMBERS: Cell<Near> = const { Cell::new([(0, std::ptr::null()); NEAR]) };
    static MEMBERSHIPS: Memberships = Memberships::default();
}

impl Drop for Memberships {
    fn drop(&mut self) {
        NEAR_MEMBERS.set([(0, std::ptr::null()); NEAR]);
        for member in self.0.take() {
            // Frees from within this loop find the thread without members. In a forked child other threads'
            // locks are never released, and the heap is the parent's.
            if member.born.is_current()
                && let Some(heap) = member.heap.upgrade()
            {
                heap.leave(&member);
            }
        }
    }
}

/// Calls `f` with the calling thread's cache of `heap`. Returns `None` also if the heap is closed, and while
/// the thread ends: then nothing is cached.
#[inline]
pub(crate) fn with<R>(heap: &impl Home, f: impl FnOnce(&mut Local) -> Option<R>) -> Option<R> {
    let id = heap.id();
    let near = NEAR_MEMBERS.with(|near| {
        // SAFETY: only this thread accesses the cell, and nothing runs between the read and its use.
        unsafe { (*near.as_ptr())[id as usize % NEAR] }
    });
    let member = match near.0 == id {
        true => near.1,
        false => find(heap)?,
    };
    // The thread that closes the heap waits only until the owner is outside: if `f` frees the last block, the
    // heap may be gone from then on. The member is not. SAFETY: the pointer in the cell comes from an Arc in
    // `MEMBERSHIPS`, which lives until it is removed from both (`find`, the thread's end). The thread is the
    // only owner of its member. `f` does not call this again: it is code of this module's users, which calls
    // no user's code.
    unsafe {
        (*member).local.owner(|local| match local.closed {
            false => f(local),
            true => None,
        })
    }
}

/// Finds or creates the member when it is not in the direct-mapped table.
#[cold]
#[inline(never)]
fn find(heap: &impl Home) -> Option<*const Member> {
    let id = heap.id();
    let found = MEMBERSHIPS.try_with(|members| {
        // Already borrowed only if a global allocator allocates from a heap: it goes without a cache. No
        // other user code runs in here, because dropping a member drops no heap.
        let mut members = members.0.try_borrow_mut().ok()?;
        if let Some(member) = members.iter().find(|member| member.id == id) {
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
    near[id as usize % NEAR] = (id, member);
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
