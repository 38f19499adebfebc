//! The lock of a tier, for one member at a time.
//!
//! It is a word in the tier's memory: the member's name, a bit if others wait, and half of the member's word, so that a lock which was
//! taken from a member is never taken for that of the next one with its number. A member that is killed keeps it; one that waits finds that
//! out and takes it over, and repairs the table before anything else.

use std::hint::spin_loop;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex;

use crate::header::{DIRTY, LOCK, STEPS};
use crate::members::{Members, Own, Owner};
use crate::words::Words;
use crate::{Error, Result};

const NAME: u64 = 0xff;
const WAITERS: u64 = 0x100;
/// Looks at a lock that is held, before a thread sleeps: about a microsecond.
const SPINS: u32 = 60;
/// The time of a sleep, after which the holder is judged.
const NAP: Duration = Duration::from_micros(if cfg!(test) { 1 } else { 20_000 });
/// The time of a sleep where the kernel cannot wait for the word.
const DOZE: Duration = Duration::from_micros(200);

/// The time for which a call waits for a process that has something, lives and does not go on.
pub(crate) const PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 5000 });

/// A wait that may take too long. Its time begins again with each step that work on many pages makes.
pub(crate) struct Wait {
    patience: Duration,
    since: Instant,
    steps: u64,
}

impl Wait {
    pub(crate) fn new(words: &Words<'_>, patience: Duration) -> Self {
        Self {
            patience,
            since: Instant::now(),
            steps: words.get(STEPS),
        }
    }

    pub(crate) fn is_over(&mut self, words: &Words<'_>) -> bool {
        self.is_over_at(Instant::now(), words.get(STEPS))
    }

    fn is_over_at(&mut self, now: Instant, steps: u64) -> bool {
        if steps != self.steps {
            (self.steps, self.since) = (steps, now);
        }
        now.saturating_duration_since(self.since) > self.patience
    }
}

/// The lock, which is given back when dropped.
pub(crate) struct Lock<'a> {
    words: &'a Words<'a>,
    own: Own,
}

impl<'a> Lock<'a> {
    /// Takes the lock if nobody has it; `None` otherwise, and for a member that another process has taken the tier from.
    #[inline(always)]
    pub(crate) fn try_acquire(words: &'a Words<'a>, own: Own) -> Option<Self> {
        if !words.swap(LOCK, 0, own.mark()) {
            return None;
        }
        Self::of_member(words, own).ok()
    }

    /// Waits for the lock, for as long as its holder goes on and `patience` beyond. No other thread of this process waits for it as the
    /// same member. After a holder that has ended the table is dirty.
    ///
    /// # Errors
    /// [`Error::Busy`] if a process has it that does not end; those of [`Members::expect_member`].
    // A result of this size that is returned through memory costs 10 ns more.
    #[inline(always)]
    pub(crate) fn acquire(words: &'a Words<'a>, own: Own, patience: Duration) -> Result<Self> {
        if !words.swap(LOCK, 0, own.mark()) {
            Self::wait(words, own, &mut Wait::new(words, patience))?;
        }
        Self::of_member(words, own)
    }

    #[inline(always)]
    fn of_member(words: &'a Words<'a>, own: Own) -> Result<Self> {
        let lock = Self { words, own };
        Members::of(words).expect_member(own)?;
        Ok(lock)
    }

    #[cold]
    fn wait(words: &Words<'_>, own: Own, wait: &mut Wait) -> Result<()> {
        // After a sleep others may still sleep.
        let mut mark = own.mark();
        loop {
            for _ in 0..SPINS {
                if words.get(LOCK) == 0 && words.swap(LOCK, 0, mark) {
                    return Ok(());
                }
                spin_loop();
            }
            let found = words.get(LOCK);
            if found == 0 || found & WAITERS == 0 && !words.swap(LOCK, found, found | WAITERS) {
                continue;
            }
            mark = own.mark() | WAITERS;
            // This member does not have it: one that had its number before did.
            let is_own = found & NAME == own.name();
            if !is_own && !sleep(words.low_half(LOCK), (found | WAITERS) as u32) {
                continue;
            }
            let owner = if is_own {
                Owner::Ended
            } else {
                Members::of(words).judge(found & NAME, (found >> 32) as u32)
            };
            match owner {
                Owner::Lives(pid) | Owner::Elsewhere(pid) => {
                    if wait.is_over(words) {
                        return Err(Error::Busy { pid });
                    }
                }
                Owner::Ended | Owner::None => {
                    if words.swap(LOCK, found | WAITERS, mark) {
                        // Whoever changes the table next repairs it first, also if that is not this call.
                        words.put(DIRTY, 1);
                        return Ok(());
                    }
                }
            }
        }
    }
}

/// Sleeps until the word changes. Returns whether the holder is to be judged.
fn sleep(word: Option<&AtomicU32>, value: u32) -> bool {
    let nap = futex::Timespec {
        tv_sec: 0,
        tv_nsec: NAP.subsec_nanos().into(),
    };
    let slept = word.map(|word| futex::wait(word, futex::Flags::empty(), value, Some(&nap)));
    match slept {
        Some(Ok(()) | Err(Errno::AGAIN)) => false,
        // Signals may come more often than a sleep ends.
        Some(Err(Errno::TIMEDOUT | Errno::INTR)) => true,
        // The kernel waits for no word in memory that a driver maps (EFAULT): nobody wakes this thread.
        _ => {
            std::thread::sleep(DOZE);
            true
        }
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // Others change one bit, once.
        for _ in 0..3 {
            let found = self.words.get(LOCK);
            // Another name is that of a member which was told to take over.
            if found & NAME != self.own.name() {
                return;
            }
            if self.words.swap(LOCK, found, 0) {
                if found & WAITERS != 0
                    && let Some(word) = self.words.low_half(LOCK)
                {
                    // It has nothing to report.
                    let _ = futex::wake(word, futex::Flags::empty(), 1);
                }
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn a_wait_begins_again_with_each_step() {
        let memory: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let words = Words::over(&memory);
        let at = |seconds| Instant::now() + Duration::from_secs(seconds);
        let mut wait = Wait::new(&words, Duration::from_secs(5));
        assert!(!wait.is_over_at(at(4), 0) && !wait.is_over_at(at(8), 1));
        assert!(!wait.is_over_at(at(12), 1) && wait.is_over_at(at(14), 1));
        assert!(!wait.is_over_at(at(14), 2));
    }

    #[test]
    fn a_wait_for_the_lock_sees_steps() {
        let memory: Vec<AtomicU64> = (0..1024).map(|_| AtomicU64::new(0)).collect();
        let words = Words::over(&memory);
        let [own, other] = [(); 2].map(|()| Members::of(&words).claim(false).unwrap());
        let mut wait = Wait::new(&words, Duration::ZERO);
        words.put(STEPS, 3);
        let _held = Lock::acquire(&words, other, PATIENCE).unwrap();
        let busy = Lock::wait(&words, own, &mut wait);
        let pid = std::process::id();
        assert_eq!((busy, wait.steps), (Err(Error::Busy { pid }), 3));
    }

    #[test]
    fn a_holder_is_judged_where_the_kernel_does_not_wait() {
        assert!(sleep(None, 0));
        let word = AtomicU32::new(7);
        assert!(!sleep(Some(&word), 6), "it has changed");
        assert!(sleep(Some(&word), 7));
    }
}
