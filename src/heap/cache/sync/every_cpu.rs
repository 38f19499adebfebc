//! A barrier in every thread of the process where `membarrier(2)` worked once and is refused now, by a filter
//! of system calls that was installed in between.
//!
//! Frequent sides have relied on the rare side's barrier and cannot be asked for one of their own: a thread
//! that sleeps would never answer. So the rare side makes every thread execute one by a context switch, which
//! is a full barrier in Linux (Documentation/scheduler/membarrier.rst relies on the same for threads that do
//! not run). It moves its own thread to one CPU after the other. When it runs on a CPU, the thread that ran
//! there before was switched out after the walk began; a thread that changed CPUs meanwhile was switched out
//! for that. So at the end of the walk every thread has executed a barrier since its beginning.
//!
//! The walk is complete only if it came to every CPU that is online. Where the kernel refuses that too
//! (`sched_setaffinity`, a cpuset), what is left is time: a store that has left no trace for [`DRAIN`] is not
//! in a store buffer any more. That is no promise of the architectures, but holds on those this crate is built
//! for: an x86 CPU drains its store buffer at every interrupt (Intel SDM, volume 3A, "Store Buffer"), of which
//! the timer's come at least each 10 ms to a CPU that runs a thread, but for CPUs of `nohz_full`; an Arm CPU
//! makes every store visible in finite time, without saying in which.
//!
//! Other ways were not taken: `mprotect` interrupts other CPUs on some processors only (Arm and newer x86
//! broadcast the invalidation in hardware); signals need a handler that belongs to the program.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::sleep;
use std::time::Duration;

/// How long no store stays in a store buffer: five of the longest timer periods.
const DRAIN: Duration = Duration::from_millis(50);

static NEEDED: AtomicBool = AtomicBool::new(false);
static TOLD: AtomicBool = AtomicBool::new(false);

/// Whether `membarrier` was refused after it had worked.
pub(super) fn was_needed() -> bool {
    NEEDED.load(Ordering::Relaxed)
}

/// Has every thread of the process execute a full barrier. Takes milliseconds.
#[cold]
pub(super) fn barrier() {
    NEEDED.store(true, Ordering::Relaxed);
    if !visit_all() {
        sleep(DRAIN);
    }
    fence(Ordering::SeqCst);
}

/// Logs the refusal, the first time.
pub(super) fn tell() {
    if was_needed() && !TOLD.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "membarrier(2) is refused, and it was allowed when the first heap was built: heaps take \
             milliseconds where they need it; allow it in the filter of system calls, or install the filter first"
        );
    }
}

/// A set of CPUs, as large as Linux can be built for.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Cpus([u64; Cpus::WORDS]);

impl Cpus {
    const WORDS: usize = 8192 / 64;

    const fn only(cpu: usize) -> Self {
        let mut words = [0; Self::WORDS];
        words[cpu / 64] = 1 << (cpu % 64);
        Self(words)
    }

    fn each(&self) -> impl Iterator<Item = usize> {
        let all = 0..Self::WORDS * 64;
        all.filter(|cpu| self.0[cpu / 64] & (1 << (cpu % 64)) != 0)
    }

    /// Those that the calling thread may run on.
    fn allowed() -> Option<Self> {
        let mut cpus = Self([0; Self::WORDS]);
        let first = (&raw mut cpus).cast();
        // SAFETY: writes no more bytes than the set has. The bits of `cpu_set_t` are those of words.
        let read = unsafe { libc::sched_getaffinity(0, size_of::<Self>(), first) };
        (read == 0).then_some(cpus)
    }

    /// Lets the calling thread run on these alone, those of them that there are; it does when this returns.
    fn allow(&self) -> bool {
        let first = std::ptr::from_ref(self).cast();
        // SAFETY: reads no more bytes than the set has.
        unsafe { libc::sched_setaffinity(0, size_of::<Self>(), first) == 0 }
    }
}

/// Runs on every CPU once; whether it came to all that are online.
fn visit_all() -> bool {
    let Some(before) = Cpus::allowed() else {
        return false;
    };
    // The kernel leaves out those that are offline, and those beyond the thread's cpuset.
    let all = match Cpus([u64::MAX; Cpus::WORDS]).allow() {
        true => Cpus::allowed(),
        false => None,
    };
    let Some(all) = all else {
        return false;
    };
    let mut visited = 0;
    for cpu in all.each() {
        // SAFETY: returns a number.
        let there = || usize::try_from(unsafe { libc::sched_getcpu() }) == Ok(cpu);
        visited += i64::from(Cpus::only(cpu).allow() && there());
    }
    // A cpuset that has changed meanwhile may refuse these: then the thread keeps all that it may have.
    if !before.allow() {
        all.allow();
    }
    // SAFETY: returns a number.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    online > 0 && visited >= online
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_leaves_the_thread_where_it_may_run() {
        let before = Cpus::allowed().unwrap();
        let complete = visit_all();
        let after = Cpus::allowed().unwrap();
        assert!(before.each().eq(after.each()));
        println!("the walk came to all CPUs: {complete}");
    }

    #[test]
    fn sets_have_the_cpus_that_were_put_in() {
        for cpu in [0, 1, 63, 64, 8191] {
            assert!(Cpus::only(cpu).each().eq([cpu]));
        }
    }
}
