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
    /// The heavy side calls `membarrier`, or [replaces it](every_cpu) if the kernel refuses it later.
    #[cfg(not(any(loom, miri)))]
    Membarrier,
}

impl Fence {
    /// Returns the fence that works in this process. The first call asks the kernel, which can take
    /// milliseconds in a process with several threads; call it when a heap is built.
    pub(crate) fn of_process() -> Self {
        #[cfg(not(any(loom, miri)))]
        {
            if every_cpu::was_needed() {
                return Fence::Mutual;
            }
            static KNOWN: std::sync::OnceLock<Fence> = std::sync::OnceLock::new();
            *KNOWN.get_or_init(Self::choose)
        }
        #[cfg(any(loom, miri))]
        Fence::Mutual
    }

    #[cfg(not(any(loom, miri)))]
    fn choose() -> Self {
        // Also tries it: a seccomp filter may allow one command only.
        match membarrier::register() && membarrier::all_threads() {
            true => Fence::Membarrier,
            false => Fence::Mutual,
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

    /// The rare side's fence: some microseconds, or milliseconds if `membarrier` worked once and is refused
    /// now.
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
                    every_cpu::barrier();
                }
            }
        }
    }

    /// Returns whether the heavy side is still as cheap as when this fence was chosen.
    pub(crate) fn is_cheap(self) -> bool {
        match self {
            Fence::Mutual => true,
            #[cfg(not(any(loom, miri)))]
            Fence::Membarrier => !every_cpu::was_needed(),
        }
    }
}

/// Logs once that the kernel refuses `membarrier`. The caller holds no lock of the heap.
pub(crate) fn tell_refusal() {
    #[cfg(not(any(loom, miri)))]
    every_cpu::tell();
}

#[cfg(not(any(loom, miri)))]
mod every_cpu;

/// `membarrier(2)`; see also Documentation/scheduler/membarrier.rst of Linux.
#[cfg(not(any(loom, miri)))]
mod membarrier {
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

    /// Forks, and returns whether `check` holds in the child. `check` makes only system calls: other threads
    /// of this process may have held any lock at the fork.
    fn in_a_child(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs only `check`, which neither allocates nor locks, and `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
        if child == 0 {
            let code = i32::from(!check());
            // SAFETY: ends the process without running the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        let mut status = 0;
        // SAFETY: `status` is a local variable, and no other thread waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        status == 0
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

    /// Makes the kernel answer these calls of this thread with EPERM. Returns whether that worked: emulators
    /// of Linux have no seccomp filters.
    fn refuse(calls: [libc::c_long; 2]) -> bool {
        answer(calls, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32)
    }

    /// As [`refuse`], with another action of a filter.
    fn answer(calls: [libc::c_long; 2], action: u32) -> bool {
        let statement = |code: u32, yes: u8, no: u8, k: u32| libc::sock_filter {
            code: code as u16, // all below 2^16
            jt: yes,
            jf: no,
            k,
        };
        let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        let mut filter = [
            // A filter's input begins with the call's number.
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            statement(equals, 1, 0, calls[0] as u32),
            statement(equals, 0, 1, calls[1] as u32),
            statement(libc::BPF_RET | libc::BPF_K, 0, 0, action),
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

    fn refuse_membarrier() -> bool {
        refuse([libc::SYS_membarrier; 2])
    }

    #[test]
    fn a_forked_child_has_the_heavy_fence() {
        if Fence::of_process() == Fence::Membarrier {
            assert!(in_a_child(|| {
                Fence::Membarrier.heavy();
                !every_cpu::was_needed()
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
            every_cpu::was_needed()
        };
        let test = "a_refusal_later_on_is_made_up_for";
        assert!(in_a_process(test, "walk", || refuse_membarrier()
            && falls_back(Fence::Membarrier)
            && Fence::of_process() == Fence::Mutual));
        assert!(in_a_process(test, "mutual", || refuse_membarrier()
            && !falls_back(Fence::Mutual)));
        let calls = [libc::SYS_membarrier, libc::SYS_sched_setaffinity];
        assert!(in_a_process(test, "wait", || refuse(calls)
            && falls_back(Fence::Membarrier)));
    }

    /// A thread that leaves its set of CPUs may not get it back.
    #[test]
    fn a_barrier_moves_no_thread_of_its_caller() {
        static MOVED: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(0);
        extern "C" fn note(_: libc::c_int) {
            // SAFETY: takes no arguments.
            let thread = unsafe { libc::syscall(libc::SYS_gettid) };
            MOVED.store(thread as i32, Ordering::Relaxed);
        }
        let trap = || answer([libc::SYS_sched_setaffinity; 2], libc::SECCOMP_RET_TRAP);
        if !in_a_child(trap) {
            return println!("skipped: no seccomp filters here");
        }
        assert!(in_a_process(
            "a_barrier_moves_no_thread_of_its_caller",
            "",
            || {
                // SAFETY: the handler makes one system call and stores a number.
                unsafe { libc::signal(libc::SIGSYS, note as *const () as libc::sighandler_t) };
                let trapped = trap();
                every_cpu::barrier();
                // SAFETY: takes no arguments.
                let own = unsafe { libc::syscall(libc::SYS_gettid) };
                let moved = MOVED.load(Ordering::Relaxed);
                trapped && moved != 0 && i64::from(moved) != own
            }
        ));
    }
}
