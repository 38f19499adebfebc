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

use crate::header::LOCK;
use crate::members::{Members, Own};
use crate::owner::Owner;
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

/// The lock, which is given back when dropped.
pub(crate) struct Lock<'a> {
    words: &'a Words<'a>,
    own: Own,
    /// The last holder has ended.
    pub(crate) is_taken_over: bool,
}

impl<'a> Lock<'a> {
    /// Waits for the lock for at most `patience`. No other thread of this process waits for it as the same member.
    ///
    /// # Errors
    /// [`Error::Busy`] if a process has it that does not end.
    pub(crate) fn acquire(words: &'a Words<'a>, own: Own, patience: Duration) -> Result<Self> {
        let lock = |is_taken_over| Self {
            words,
            own,
            is_taken_over,
        };
        if words.swap(LOCK, 0, own.mark()) {
            return Ok(lock(false));
        }
        let begun = Instant::now();
        // After a sleep others may still sleep.
        let mut mark = own.mark();
        loop {
            for _ in 0..SPINS {
                if words.get(LOCK) == 0 && words.swap(LOCK, 0, mark) {
                    return Ok(lock(false));
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
            let owner = match is_own {
                true => Owner::Ended,
                false => Members::of(words).judge(found & NAME, (found >> 32) as u32),
            };
            match owner {
                Owner::Lives(pid) | Owner::Elsewhere(pid) if begun.elapsed() >= patience => {
                    return Err(Error::Busy { pid });
                }
                Owner::Lives(_) | Owner::Elsewhere(_) => {}
                Owner::Ended | Owner::None => {
                    if words.swap(LOCK, found | WAITERS, mark) {
                        return Ok(lock(true));
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
    use super::*;

    #[test]
    fn a_holder_is_judged_where_the_kernel_does_not_wait() {
        assert!(sleep(None, 0));
        let word = AtomicU32::new(7);
        assert!(!sleep(Some(&word), 6), "it has changed");
        assert!(sleep(Some(&word), 7));
    }
}
