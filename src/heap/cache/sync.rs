//! The atomics that threads synchronise on, std's or loom's, and an asymmetric fence.

#[cfg(loom)]
pub(crate) use loom::{
    cell::{MutPtr, UnsafeCell},
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
    thread::yield_now,
};
#[cfg(not(loom))]
pub(crate) use {
    plain::{MutPtr, UnsafeCell},
    std::hint::spin_loop,
    std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering, fence},
    std::sync::{Mutex, MutexGuard},
    std::thread::yield_now,
};

/// A barrier that two sides execute between their store and their load, if each stores first and then reads the
/// other's word (Dekker): at least one of the two sees the other's store.
///
/// A processor fence costs the frequent side 5 to 20 ns each time. Linux can spare it that: `membarrier(2)`,
/// called by the rare side, has every running thread of the process execute a full barrier, and a thread that
/// is not running executed one when it was switched out. The frequent side then only keeps its compiler from
/// reordering the two.
///
/// Each pair of sides must use the same value, so it lies beside the words that they synchronise on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    /// Both sides execute the processor's fence.
    Mutual,
    /// The heavy side calls `membarrier`, or [waits](membarrier::wait) if the kernel refuses it later.
    #[cfg(not(any(loom, miri)))]
    Membarrier,
}

impl Fence {
    /// Returns the fence that works in this process. The first call asks the kernel, which can take
    /// milliseconds in a process with several threads; call it when a heap is built.
    pub(crate) fn of_process() -> Self {
        #[cfg(not(any(loom, miri)))]
        {
            if membarrier::was_refused() {
                return Fence::Mutual;
            }
            // Not a `OnceLock`: a child that is forked while another thread asks the kernel would wait for that thread.
            static KNOWN: crate::fork::PerProcess<Fence> = crate::fork::PerProcess::new();
            *KNOWN.get(|_| Self::choose())
        }
        #[cfg(any(loom, miri))]
        Fence::Mutual
    }

    #[cfg(not(any(loom, miri)))]
    fn choose() -> Self {
        // Also tries it: a seccomp filter may allow one command only.
        if membarrier::register() && membarrier::all_threads() {
            Fence::Membarrier
        } else {
            Fence::Mutual
        }
    }

    /// The frequent side's fence.
    #[inline]
    pub(crate) fn light(self) {
        match self {
            Fence::Mutual => fence(Ordering::SeqCst),
            #[cfg(not(any(loom, miri)))]
            Fence::Membarrier => std::sync::atomic::compiler_fence(Ordering::SeqCst),
        }
    }

    /// The rare side's fence: some microseconds, or 50 ms if `membarrier` worked once and is refused now.
    pub(crate) fn heavy(self) {
        fence(Ordering::SeqCst);
        match self {
            Fence::Mutual => {}
            // A registration belongs to an address space. Linux passes it on to forked children, but nothing
            // here relies on that: only the registration at this moment counts, not the one when the light
            // side passed.
            #[cfg(not(any(loom, miri)))]
            Fence::Membarrier => {
                let fenced = membarrier::all_threads()
                    || (membarrier::register() && membarrier::all_threads());
                if !fenced {
                    membarrier::wait();
                }
            }
        }
    }

    /// Returns whether the heavy side is still as cheap as when this fence was chosen.
    pub(crate) fn is_cheap(self) -> bool {
        match self {
            Fence::Mutual => true,
            #[cfg(not(any(loom, miri)))]
            Fence::Membarrier => !membarrier::was_refused(),
        }
    }
}

/// Logs once that the kernel refuses `membarrier`. The caller holds no lock of the heap.
pub(crate) fn tell_refusal() {
    #[cfg(not(any(loom, miri)))]
    membarrier::tell_refusal();
}

/// `membarrier(2)`; see also Documentation/scheduler/membarrier.rst of Linux.
#[cfg(not(any(loom, miri)))]
mod membarrier {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::time::Duration;

    /// How long the heavy side waits where the kernel refuses the call.
    const DRAIN: Duration = Duration::from_millis(50);

    static REFUSED: AtomicBool = AtomicBool::new(false);
    static TOLD: AtomicBool = AtomicBool::new(false);

    /// Returns whether the kernel refused the call after it had allowed it.
    pub(super) fn was_refused() -> bool {
        REFUSED.load(Relaxed)
    }

    /// Waits until each light side that passed its fence before the call has its earlier stores in the caches, where the
    /// caller sees them.
    ///
    /// A light side that has read its word before the caller's store has issued its own store before that read, which the
    /// compiler fence keeps in this order. So at worst the store is in its CPU's store buffer, behind older ones. A store buffer
    /// has some tens of entries, which leave as fast as the CPU gets their cache lines: in nanoseconds, and with every
    /// CPU after the same lines in microseconds. Whatever stops a CPU for longer drains the buffer: an interrupt, a change
    /// of threads, an exit to a hypervisor, and on x86 system management mode. Neither architecture bounds the time by
    /// a number (on Arm, stores are visible in finite time). This is five of Linux's longest timer periods. Heaps built from
    /// now on use [`Fence::Mutual`](super::Fence::Mutual), and locks are not reserved any more.
    ///
    /// Rejected: a thread that moves from CPU to CPU, so that each thread is switched out once, needs `/proc` and
    /// `sched_setaffinity`, and waits too where a filter refuses these; `mprotect` interrupts other CPUs on some processors
    /// only; signals need a handler, and handlers belong to the program.
    #[cold]
    pub(super) fn wait() {
        REFUSED.store(true, Relaxed);
        std::thread::sleep(DRAIN);
        super::fence(super::Ordering::SeqCst);
    }

    /// Logs the refusal, the first time.
    pub(super) fn tell_refusal() {
        if was_refused() && !TOLD.swap(true, Relaxed) {
            tracing::warn!(
                "membarrier(2) is refused, and it was allowed when the first heap was built: heaps take 50 ms where \
                 they need it; allow it in the filter of system calls, or install the filter first"
            );
        }
    }

    /// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED`: announces that this process will use the command below.
    pub(super) fn register() -> bool {
        command(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
    }

    /// `MEMBARRIER_CMD_PRIVATE_EXPEDITED`: a full barrier in every running thread of this process.
    pub(super) fn all_threads() -> bool {
        command(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
    }

    fn command(command: libc::c_int) -> bool {
        const NO_FLAGS: libc::c_uint = 0;
        const NO_CPU: libc::c_int = 0;
        // SAFETY: the call takes only numbers and accesses no memory of ours; a kernel that does not know it
        // or the command returns an error.
        unsafe { libc::syscall(libc::SYS_membarrier, command, NO_FLAGS, NO_CPU) == 0 }
    }
}

/// Loom's checked types, without the checks.
#[cfg(not(loom))]
mod plain {
    /// Like loom's: access by pointer, for as long as a [`MutPtr`] lives.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        #[inline]
        pub(crate) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        #[inline]
        pub(crate) fn get_mut(&self) -> MutPtr<T> {
            MutPtr(self.0.get())
        }
    }

    /// Access to a cell's value.
    pub(crate) struct MutPtr<T>(*mut T);

    impl<T> MutPtr<T> {
        /// # Safety
        /// No other code accesses the value while the reference lives.
        #[inline]
        #[expect(clippy::mut_from_ref, reason = "loom's is declared so")]
        pub(crate) unsafe fn deref(&self) -> &mut T {
            // SAFETY: the pointer comes from a cell that its users keep alive longer than this; the caller
            // promises exclusive access.
            unsafe { &mut *self.0 }
        }
    }
}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::*;
    use crate::fork_check::in_a_child;

    #[test]
    fn the_choice_stays() {
        assert_eq!(Fence::of_process(), Fence::of_process());
    }

    #[test]
    fn both_fences_work_here_or_are_not_chosen() {
        Fence::Mutual.light();
        Fence::Mutual.heavy();
        Fence::of_process().light();
        Fence::of_process().heavy();
    }

    /// Runs one case of a test in a process of its own, which may start threads: the test of this name, started again.
    /// Returns whether `check` holds there; `true` in the processes of other cases.
    fn in_a_process(test: &str, case: &str, check: impl FnOnce() -> bool) -> bool {
        const CASE: &str = "EGMEM_FENCE_CASE";
        if let Ok(running) = std::env::var(CASE) {
            if running == case {
                std::process::exit(i32::from(!check()));
            }
            return true;
        }
        // Programs of another architecture start through an emulator.
        let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
        let mut words: Vec<std::path::PathBuf> =
            runner.split_whitespace().map(Into::into).collect();
        words.push(std::env::current_exe().unwrap());
        let mut process = std::process::Command::new(&words[0]);
        process.args(&words[1..]).env(CASE, case);
        process.args([
            &format!("cache::sync::tests::{test}"),
            "--exact",
            "--nocapture",
        ]);
        process.status().unwrap().success()
    }

    /// Makes the kernel answer `membarrier` with EPERM. Returns whether that worked: emulators of Linux have no seccomp
    /// filters.
    fn refuse_membarrier() -> bool {
        let statement = |code: u32, yes: u8, no: u8, k: u32| libc::sock_filter {
            code: code as u16, // all below 2^16
            jt: yes,
            jf: no,
            k,
        };
        let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        let refusal = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let mut filter = [
            // A filter's input begins with the call's number.
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            statement(equals, 0, 1, libc::SYS_membarrier as u32),
            statement(libc::BPF_RET | libc::BPF_K, 0, 0, refusal),
            statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: the first call takes only numbers; the second reads the program, which outlives the call,
        // and changes none of this process's memory.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
        }
    }

    #[test]
    fn a_forked_child_has_the_heavy_fence() {
        if Fence::of_process() == Fence::Membarrier {
            assert!(in_a_child(|| {
                Fence::Membarrier.heavy();
                !membarrier::was_refused()
            }));
        }
    }

    #[test]
    fn where_membarrier_is_refused_the_fences_are_mutual() {
        if in_a_child(refuse_membarrier) {
            assert!(in_a_child(
                || refuse_membarrier() && Fence::choose() == Fence::Mutual
            ));
        }
    }

    /// Also shows that the heavy side makes the call at all.
    #[test]
    fn a_refusal_later_on_is_made_up_for() {
        if !in_a_child(refuse_membarrier) {
            return println!("skipped: no seccomp filters here");
        }
        let falls_back = |fence: Fence| {
            fence.heavy();
            membarrier::was_refused()
        };
        let test = "a_refusal_later_on_is_made_up_for";
        assert!(in_a_process(test, "membarrier", || refuse_membarrier()
            && falls_back(Fence::Membarrier)
            && Fence::of_process() == Fence::Mutual));
        assert!(in_a_process(test, "mutual", || refuse_membarrier()
            && !falls_back(Fence::Mutual)));
    }
}
