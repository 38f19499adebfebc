//! Two clocks: the thread's CPU time, which stops while others have the processor, and wall time.

use std::mem::MaybeUninit;
use std::time::Duration;

/// Returns this thread's CPU time so far, the kernel's part included.
pub fn thread() -> Duration {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the kernel writes the time there.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, time.as_mut_ptr()) };
    assert_eq!(result, 0, "every thread has a clock");
    // SAFETY: written just now.
    let time = unsafe { time.assume_init() };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
