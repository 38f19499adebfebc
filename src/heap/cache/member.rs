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

/// A heap's number, which is never reused, and the thread's member. Heaps are numbered from 1.
type Entry = (u64, *const Member);
const EMPTY: Entry = (0, std::ptr::null());

/// The size of a thread's direct-mapped table, where the heaps used last are found.
const NEAR: usize = 8;

/// The members of this thread. They leave their heaps when the thread ends.
#[derive(Default)]
struct Memberships(RefCell<All>);

#[derive(Default)]
struct All {
    members: Vec<Arc<Member>>,
    /// Finds all members: a hash table with open addressing, at most half full, its size a power of two.
    table: Box<[Entry]>,
}

thread_local! {
    // These two have no destructor, so that an access need not check whether the value still exists.
    static NEAR_MEMBERS: Cell<[Entry; NEAR]> = const { Cell::new([EMPTY; NEAR]) };
    /// The table in `MEMBERSHIPS`, while that exists.
    static TABLE: Cell<*const [Entry]> = const { Cell::new(&[]) };
    static MEMBERSHIPS: Memberships = Memberships::default();
}

impl Drop for Memberships {
    fn drop(&mut self) {
        let all = self.0.take();
        publish(&[]);
        for member in all.members {
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
    // heap may be gone from then on. The member is not. SAFETY: the pointer in the table comes from an Arc in
    // `MEMBERSHIPS`, which lives until it is removed from both tables (`join`, the thread's end). The thread is
    // the only owner of its member. `f` does not call this again: it is code of this module's users, which calls
    // no user's code.
    unsafe {
        (*member).local.owner(|local| match local.closed {
            false => f(local),
            true => None,
        })
    }
}

/// Finds or creates the member when it is not in the direct-mapped table.
#[inline(never)]
fn find(heap: &impl Home) -> Option<*const Member> {
    let id = heap.id();
    let member = match known(id) {
        Some(member) => member,
        None => join(heap)?,
    };
    NEAR_MEMBERS.with(|near| {
        // SAFETY: as in `with`.
        unsafe { (*near.as_ptr())[id as usize % NEAR] = (id, member) }
    });
    Some(member)
}

/// Looks a member up in the table of all.
fn known(id: u64) -> Option<*const Member> {
    // SAFETY: `publish` stores the table that `MEMBERSHIPS` has, or an empty one before that is dropped. Only
    // this thread replaces it, not while this runs.
    let table = unsafe { &*TABLE.get() };
    let mask = table.len().wrapping_sub(1);
    let mut at = id as usize;
    loop {
        // An empty table has no entry; others are at most half full, so the search ends.
        let &(found, member) = table.get(at & mask)?;
        match found {
            0 => return None,
            _ if found == id => return Some(member),
            _ => at += 1,
        }
    }
}

#[cold]
fn join(heap: &impl Home) -> Option<*const Member> {
    let joined = MEMBERSHIPS.try_with(|all| {
        // Already borrowed only if a global allocator allocates from a heap: it goes without a cache. No
        // other user code runs in here, because dropping a member drops no heap.
        let mut all = all.0.try_borrow_mut().ok()?;
        // Before a member is dropped that the tables name.
        publish(&[]);
        all.members.retain(|member| !member.is_closed());
        let member = heap.join();
        all.members.extend(member.clone());
        all.rebuild();
        publish(&all.table);
        member.map(|member| Arc::as_ptr(&member))
    });
    joined.ok().flatten()
}

/// Makes forked children find no member of their parents', so that [`with`] need not ask which process it runs in. Called
/// before a process has its first member.
#[cfg(not(any(loom, miri)))]
pub(crate) fn forget_members_in_children() {
    extern "C" fn in_child() {
        publish(&[]);
    }
    static REGISTERED: std::sync::Once = std::sync::Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler sets two thread-locals without a destructor. It takes no lock, as required in a child of
        // a process with several threads.
        let code = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if code != 0 {
            let error = std::io::Error::from_raw_os_error(code);
            tracing::warn!(%error, "forked children may allocate from their parent's heaps");
        }
    });
}

/// Neither forks.
#[cfg(any(loom, miri))]
pub(crate) fn forget_members_in_children() {}

/// Makes `table` the one that this thread searches.
fn publish(table: &[Entry]) {
    NEAR_MEMBERS.set([EMPTY; NEAR]);
    TABLE.set(&raw const *table);
}

impl All {
    fn rebuild(&mut self) {
        let size = (2 * self.members.len()).next_power_of_two();
        self.table = vec![EMPTY; size].into_boxed_slice();
        for member in &self.members {
            let mut at = member.id as usize;
            while self.table[at & (size - 1)].0 != 0 {
                at += 1;
            }
            self.table[at & (size - 1)] = (member.id, Arc::as_ptr(member));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Counts how often threads joined.
    struct Club {
        id: u64,
        this: Weak<Self>,
        members: Mutex<Vec<Arc<Member>>>,
        left: Mutex<u64>,
    }

    impl Club {
        fn new(id: u64) -> Arc<Self> {
            Arc::new_cyclic(|this| Self {
                id,
                this: Weak::clone(this),
                members: Mutex::default(),
                left: Mutex::default(),
            })
        }
    }

    impl Home for Club {
        fn id(&self) -> u64 {
            self.id
        }

        fn join(&self) -> Option<Arc<Member>> {
            let member = Member::new(self.this.clone(), self.id, Generation::current());
            let member = Arc::new(member);
            self.members.lock().unwrap().push(Arc::clone(&member));
            Some(member)
        }

        fn leave(&self, member: &Arc<Member>) {
            assert_eq!(member.id, self.id);
            *self.left.lock().unwrap() += 1;
        }
    }

    /// Counts a visit in the thread's cache and returns how many there were.
    fn visit(club: &Club) -> Option<u64> {
        with(club, |local| {
            local.tally.allocate(club.id);
            assert_eq!(local.tally.allocated_bytes, local.tally.allocated * club.id);
            Some(local.tally.allocated)
        })
    }

    #[cfg(not(miri))]
    #[test]
    fn a_forked_child_finds_no_member_of_its_parents() {
        forget_members_in_children();
        let club = Club::new(12_345);
        assert_eq!((visit(&club), visit(&club)), (Some(1), Some(2)));
        // SAFETY: the child's thread uses what only this thread uses, and the C library's allocator, and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
        if child == 0 {
            let joined_anew = visit(&club) == Some(1);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!joined_anew)) }
        }
        let mut status = -1;
        // SAFETY: `status` is a local variable, and no other thread waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(visit(&club), Some(3));
    }

    #[test]
    fn each_of_many_heaps_has_one_member_of_a_thread() {
        // Numbers that collide in tables of each size up to 256.
        let clubs: Vec<_> = (1..=200)
            .map(|n| Club::new(n % 20 * 256 + n / 20 + 1))
            .collect();
        let visits = |expected: u64| {
            let all = clubs.iter().chain(clubs.iter().rev());
            all.enumerate().for_each(|(at, club)| {
                let more = 1 + (at >= clubs.len()) as u64;
                assert_eq!(visit(club), Some(expected + more));
            });
        };
        std::thread::scope(|scope| {
            let visits = scope.spawn(|| {
                visits(0);
                visits(2);
                // Every third one closes; the next that joins drops their members.
                let closed = clubs.iter().step_by(3);
                for club in closed.clone() {
                    let members = std::mem::take(&mut *club.members.lock().unwrap());
                    members[0].local.hold().closed = true;
                    let weak = Arc::downgrade(&members[0]);
                    drop(members);
                    assert_eq!((visit(club), weak.strong_count()), (None, 1));
                }
                assert_eq!(visit(&Club::new(9999)), Some(1));
                for (at, club) in clubs.iter().enumerate().filter(|(at, _)| at % 3 != 0) {
                    assert_eq!(visit(club), Some(5), "{at}");
                }
                // Joins again, as no heap does that was closed.
                closed.for_each(|club| assert_eq!(visit(club), Some(1)));
            });
            // Until its members have left.
            visits.join().unwrap();
        });
        for (at, club) in clubs.iter().enumerate() {
            assert_eq!(club.members.lock().unwrap().len(), 1);
            assert_eq!(*club.left.lock().unwrap(), 1, "{at}");
        }
    }
}
