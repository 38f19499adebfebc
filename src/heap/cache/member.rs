//! A thread's membership in a heap, found without a lock.

use std::cell::{Cell, RefCell};
use std::ops::DerefMut;
#[cfg(not(any(loom, miri)))]
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::biased::Biased;
use super::local::{Local, Tally};
use super::magazine::CacheBound;
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
    pub(crate) bound: Arc<CacheBound>,
}

impl Member {
    /// Creates a member of the heap with the number `id`, which the process `born` created.
    pub(crate) fn new(heap: Weak<dyn Home>, id: u64, born: Generation) -> Self {
        let local = Local::new();
        Self {
            heap,
            id,
            born,
            bound: Arc::clone(&local.bound),
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

/// The threads that use a heap.
#[derive(Default)]
pub(crate) struct Members {
    pub(crate) list: Vec<Arc<Member>>,
    /// Counts of threads that have left or never joined.
    pub(crate) tally: Tally,
    pub(crate) in_vain: InVain,
    /// Keeps a closed heap alive for its remaining blocks.
    pub(crate) orphan: Option<Arc<dyn Home>>,
    pub(crate) closed: bool,
}

impl Members {
    /// Takes the caches of all threads.
    pub(crate) fn hold_all(&self) -> Vec<impl DerefMut<Target = Local>> {
        Biased::hold_all(self.list.iter().map(|member| &member.local))
    }
}

/// How often in a row all caches were emptied for requests that failed all the same.
///
/// Each time stops all threads for a moment, and each has to refill its cache. So after [`OFTEN`](Self::OFTEN) times a request for
/// which they were emptied in vain waits before it returns its error, with no lock held, until that has taken a small part of the time.
#[derive(Default)]
pub(crate) struct InVain {
    pub(crate) in_a_row: u32,
    /// When the last one that waits goes on.
    until: Option<Instant>,
}

thread_local! {
    /// When this thread goes on, whose request the caches were emptied for in vain.
    static UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

impl InVain {
    const OFTEN: u32 = 16;
    /// The pauses of all threads together are so many times as long as the emptyings, each at most [`LONGEST`](Self::LONGEST).
    const PAUSES: u32 = 16;
    const LONGEST: Duration = Duration::from_millis(10);

    /// Notes an emptying for a request of this thread.
    pub(crate) fn note(&mut self, began: Instant, end: Instant) {
        self.in_a_row = self.in_a_row.saturating_add(1);
        if self.in_a_row >= Self::OFTEN {
            let until = self.until.map_or(end, |until| until.max(end));
            let until = until + (end - began) * Self::PAUSES;
            let until = until.min(end + Self::LONGEST);
            self.until = Some(until);
            UNTIL.set(self.until);
        }
    }

    /// Returns until when this thread has to wait if its request is refused, and forgets it.
    pub(crate) fn take_until() -> Option<Instant> {
        UNTIL.take()
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
    let member = if near.0 == id { near.1 } else { find(heap)? };
    // The thread that closes the heap waits only until the owner is outside: if `f` frees the last block, the
    // heap may be gone from then on. The member is not. SAFETY: the pointer in the table comes from an Arc in
    // `MEMBERSHIPS`, which lives until it is removed from both tables (`join`, the thread's end). The thread is
    // the only owner of its member. `f` does not call this again: it is code of this module's users, which calls
    // no user's code.
    unsafe {
        (*member)
            .local
            .owner(|local| if local.closed { None } else { f(local) })
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
    // Not a `Once`: a child that is forked while another thread is inside would wait for that thread. Two threads may register a handler each.
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if REGISTERED.load(Acquire) {
        return;
    }
    // SAFETY: the handler sets two thread-locals without a destructor. It takes no lock, as required in a child of
    // a process with several threads.
    let code = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if code != 0 {
        let error = std::io::Error::from_raw_os_error(code);
        tracing::warn!(%error, "forked children may allocate from their parent's heaps");
    }
    REGISTERED.store(true, Release);
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
    use super::*;
    use crate::driver::NodeId;
    use crate::inner::HeapInner;
    use crate::{Driver, Heap, Machine};

    fn heap(driver: &Driver) -> Heap {
        Heap::on(NodeId(0)).limit(2 << 20).build(driver).unwrap()
    }

    /// Counts a visit in the thread's cache and returns how many there were.
    fn visit(heap: &HeapInner) -> Option<u32> {
        with(heap, |local| {
            local.fetched += 1;
            Some(local.fetched)
        })
    }

    #[test]
    fn after_many_emptyings_in_vain_a_request_waits() {
        let (start, took) = (Instant::now(), Duration::from_micros(20));
        let (end, mut in_vain) = (start + took, InVain::default());
        for _ in 1..InVain::OFTEN {
            in_vain.note(start, end);
            assert_eq!(InVain::take_until(), None);
        }
        let pause = took * InVain::PAUSES;
        in_vain.note(start, end);
        assert_eq!(InVain::take_until(), Some(end + pause));
        assert_eq!(InVain::take_until(), None, "it was taken");
        // Another thread's comes after it.
        in_vain.note(start, end);
        assert_eq!(InVain::take_until(), Some(end + 2 * pause));
        in_vain.note(start, start + InVain::LONGEST);
        assert_eq!(InVain::take_until(), Some(start + 2 * InVain::LONGEST));
        assert_eq!(InVain::take_until(), None);
    }

    #[test]
    fn a_forked_child_finds_no_member_of_its_parents() {
        let heap = heap(&Driver::simulated(Machine::gh200()).unwrap());
        let inner = heap.inner();
        assert_eq!((visit(inner), visit(inner)), (Some(1), Some(2)));
        // SAFETY: the child's thread uses what only this thread uses, and the C library's allocator, and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
        if child == 0 {
            let has_none = visit(inner).is_none();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!has_none)) }
        }
        let mut status = -1;
        // SAFETY: `status` is a local variable, and no other thread waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(visit(inner), Some(3));
    }

    #[test]
    fn each_of_many_heaps_has_one_member_of_a_thread() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        // So many that some have the same place in a table of each size.
        let all: Vec<Heap> = (0..1600).map(|_| heap(&driver)).collect();
        let mut heaps: Vec<Heap> = all.into_iter().step_by(8).collect();
        std::thread::scope(|scope| {
            let visits = scope.spawn(|| {
                let visit_all = |expected: u32| {
                    for (at, heap) in heaps.iter().chain(heaps.iter().rev()).enumerate() {
                        let more = 1 + u32::from(at >= heaps.len());
                        assert_eq!(visit(heap.inner()), Some(expected + more));
                    }
                };
                visit_all(0);
                visit_all(2);
            });
            // Until its members have left.
            visits.join().unwrap();
        });
        assert!(heaps.iter().all(|heap| heap.stats().threads == 0));
        heaps
            .iter()
            .for_each(|heap| assert_eq!(visit(heap.inner()), Some(1)));
        // Every third one closes; the next that joins drops their members.
        let inners: Vec<_> = heaps.iter().map(|heap| Arc::clone(heap.inner())).collect();
        let members = inners.iter().map(|heap| {
            let members = crate::per_driver::lock(&heap.front.members);
            Arc::downgrade(&members.list[0])
        });
        let members: Vec<Weak<Member>> = members.collect();
        let is_closed = |at: usize| at.is_multiple_of(3);
        let mut at = 0;
        heaps.retain(|_| (!is_closed(at), at += 1).0);
        for (at, heap) in inners.iter().enumerate() {
            assert_eq!(visit(heap), (!is_closed(at)).then_some(2));
        }
        assert_eq!(visit(heap(&driver).inner()), Some(1));
        for (at, heap) in inners.iter().enumerate() {
            assert_eq!(members[at].strong_count() == 0, is_closed(at));
            assert_eq!(visit(heap), (!is_closed(at)).then_some(3));
        }
    }
}
