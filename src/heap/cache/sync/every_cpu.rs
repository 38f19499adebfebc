//! A barrier in every thread of the process, for when `membarrier(2)` worked once and a seccomp filter that
//! was installed later refuses it.
//!
//! Frequent sides have relied on the rare side's barrier and cannot be asked for one of their own: a sleeping
//! thread would never answer. So the rare side makes every thread execute one by a context switch, which is a
//! full barrier in Linux (Documentation/scheduler/membarrier.rst relies on the same for threads that do not
//! run). It starts a thread that moves from CPU to CPU. When that runs on a CPU, the thread that ran there before was
//! switched out after the walk began; a thread that changed CPUs meanwhile was switched out for that. So at
//! the end of the walk every thread has executed a barrier since its beginning.
//!
//! The walk has a thread of its own because a thread that leaves its set of CPUs may not get it back: the kernel
//! refuses a set of which a cpuset, changed meanwhile, allows no CPU.
//!
//! The walk is complete if it visited every CPU that a thread of the process may run on: the union of their
//! `Cpus_allowed` in `/proc/self/task`, read before the walk begins. A thread whose set changes after that
//! was moved, which is a context switch, and a thread that starts after that begins with one.
//!
//! If the kernel refuses the walk too (`sched_setaffinity`, no `/proc`, no thread), the remaining method is to wait: a
//! store that is older than [`DRAIN`] has left the store buffer. The architectures do not promise that. It
//! holds on x86 because a CPU drains its store buffer at every interrupt (Intel SDM, volume 3A, "Store
//! Buffer") and takes a timer interrupt at least every 10 ms, except on `nohz_full` CPUs. An Arm CPU makes
//! every store visible in finite time, without a bound.
//!
//! Rejected alternatives: `mprotect` interrupts other CPUs on some processors only (Arm and newer x86
//! broadcast the invalidation in hardware); signals need a handler, and handlers belong to the program.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::{Builder, sleep};
use std::time::Duration;

/// The time after which no store is still in a store buffer: five of the longest timer periods.
const DRAIN: Duration = Duration::from_millis(50);

static NEEDED: AtomicBool = AtomicBool::new(false);
static TOLD: AtomicBool = AtomicBool::new(false);

/// Returns whether `membarrier` was refused after it had worked.
pub(super) fn was_needed() -> bool {
    NEEDED.load(Ordering::Relaxed)
}

/// Makes every thread of the process execute a full barrier. Takes milliseconds.
#[cold]
pub(super) fn barrier() {
    NEEDED.store(true, Ordering::Relaxed);
    if !walk() {
        sleep(DRAIN);
    }
    fence(Ordering::SeqCst);
}

/// Visits every CPU in a thread of its own. Returns whether that reached all of them.
pub(super) fn walk() -> bool {
    let walker = Builder::new().name("egmem-barrier".into());
    walker
        .spawn(visit_all)
        .is_ok_and(|thread| thread.join().unwrap_or(false))
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

    /// Returns the CPUs that any thread of the process may run on; `None` if `/proc` does not say.
    fn of_all_threads() -> Option<Self> {
        let mut union = Self([0; Self::WORDS]);
        for task in std::fs::read_dir("/proc/self/task").ok()? {
            let status = match std::fs::read(task.ok()?.path().join("status")) {
                Ok(status) => status,
                // The thread has ended meanwhile.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
                    continue;
                }
                Err(_) => return None,
            };
            union.add(&String::from_utf8_lossy(&status))?;
        }
        Some(union)
    }

    /// Adds the CPUs of a thread's `status`: 32-bit words in hexadecimal, the highest first.
    fn add(&mut self, status: &str) -> Option<()> {
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed:"))?;
        for (at, word) in mask.trim().rsplit(',').enumerate() {
            let bits = u64::from(u32::from_str_radix(word, 16).ok()?);
            match self.0.get_mut(at / 2) {
                Some(half) => *half |= bits << (at % 2 * 32),
                None if bits == 0 => {}
                None => return None,
            }
        }
        Some(())
    }

    /// Restricts the calling thread to those of these CPUs that exist; it runs on one of them when this
    /// returns.
    fn allow(&self) -> bool {
        let first = std::ptr::from_ref(self).cast();
        // SAFETY: reads at most as many bytes as the set has.
        unsafe { libc::sched_setaffinity(0, size_of::<Self>(), first) == 0 }
    }
}

/// Runs once on every CPU that a thread of the process may run on. Returns whether it reached all of them. The calling
/// thread ends afterwards: it stays on the last CPU.
fn visit_all() -> bool {
    let Some(needed) = Cpus::of_all_threads() else {
        return false;
    };
    let visit = |cpu: usize| {
        // SAFETY: takes no arguments and returns a number.
        let there = || usize::try_from(unsafe { libc::sched_getcpu() }) == Ok(cpu);
        Cpus::only(cpu).allow() && there()
    };
    let mut complete = true;
    for cpu in needed.each() {
        complete &= visit(cpu);
    }
    complete
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the CPUs that the calling thread may run on.
    fn allowed() -> Vec<usize> {
        let mut cpus = Cpus([0; Cpus::WORDS]);
        let first = (&raw mut cpus).cast();
        // SAFETY: writes at most as many bytes as the set has. The bits of `cpu_set_t` are those of words.
        let read = unsafe { libc::sched_getaffinity(0, size_of::<Cpus>(), first) };
        assert_eq!(read, 0);
        cpus.each().collect()
    }

    #[test]
    fn a_walk_leaves_the_thread_where_it_may_run() {
        let before = allowed();
        println!("the walk reached all CPUs: {}", walk());
        assert_eq!(allowed(), before);
    }

    #[test]
    fn the_union_has_the_cpus_of_every_threads_status() {
        let mut cpus = Cpus([0; Cpus::WORDS]);
        cpus.add("Name:\tx\nCpus_allowed:\t80000000,00000003\n")
            .unwrap();
        cpus.add("Cpus_allowed:\t4\nCpus_allowed_list:\t2\n")
            .unwrap();
        assert!(cpus.each().eq([0, 1, 2, 63]));
        assert!(cpus.add("Cpus_allowed:\tx\n").is_none());
        assert!(cpus.add("Name:\tx\n").is_none());
        let own = Cpus::of_all_threads().unwrap();
        assert!(
            allowed()
                .iter()
                .all(|cpu| own.each().any(|other| other == *cpu))
        );
    }

    #[test]
    fn sets_have_the_cpus_that_were_put_in() {
        for cpu in [0, 1, 63, 64, 8191] {
            assert!(Cpus::only(cpu).each().eq([cpu]));
        }
    }
}
