//! Questions to the kernel that it may not answer, because another process holds a lock.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

/// The most threads whose answer nobody waits for any more.
const MOST: usize = 8;

/// How many there are in this process.
static LATE: AtomicUsize = AtomicUsize::new(0);

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unanswered {
    /// It did not come in time.
    Late,
    /// It was not asked: there is no thread for it, or as many as may be wait already.
    NotAsked,
}

/// Returns the answer to a question, asked on a thread of its own. A thread that waits in the kernel cannot be ended: it stays
/// until it gets its answer, which nobody reads any more. It owns all that it uses.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Unanswered> {
    counted(&LATE, limit, question)
}

fn counted<T: Send + 'static>(
    late: &'static AtomicUsize,
    limit: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Unanswered> {
    if late.load(Relaxed) >= MOST {
        return Err(Unanswered::NotAsked);
    }
    // Without a buffer: an answer that nobody takes is refused, and counts no longer as late.
    let (sender, answer) = sync_channel(0);
    let ask = move || {
        if sender.send(question()).is_err() {
            late.fetch_sub(1, Relaxed);
        }
    };
    let thread = thread::Builder::new().name("egmem-ps".into());
    thread.spawn(ask).map_err(|_| Unanswered::NotAsked)?;
    answer.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            late.fetch_add(1, Relaxed);
            Unanswered::Late
        }
        RecvTimeoutError::Disconnected => Unanswered::NotAsked,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_answers_are_bounded_and_counted_until_they_come() {
        static LATE: AtomicUsize = AtomicUsize::new(0);
        let (senders, questions): (Vec<_>, Vec<_>) =
            (0..MOST).map(|_| std::sync::mpsc::channel::<()>()).unzip();
        for question in questions {
            let late = counted(&LATE, Duration::ZERO, move || question.recv().is_ok());
            assert_eq!(late, Err(Unanswered::Late));
        }
        let ask = || counted(&LATE, Duration::from_secs(600), || 1);
        assert_eq!(ask(), Err(Unanswered::NotAsked));
        drop(senders);
        while LATE.load(Relaxed) > 0 {
            thread::yield_now();
        }
        assert_eq!(ask(), Ok(1));
    }
}
