//! Questions to the kernel that it may not answer, because another process holds a lock.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::Duration;

use crate::driver::lock;
use crate::fork::Generation;

/// The most threads of one kind whose answer nobody waits for any more.
const MOST: usize = 64;

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unanswered {
    /// It did not come in time, now or when the same was asked before.
    Late,
    /// It was not asked: there is no thread for it, or as many as may be wait already.
    NotAsked,
}

/// What was asked, the process that asked it, and what lives as long as the thread that waits for the answer.
type Entry<K> = (K, Generation, Weak<()>);

/// The questions of one kind whose answers nobody waits for any more.
pub(super) struct Late<K>(Mutex<Vec<Entry<K>>>);

impl<K: PartialEq> Late<K> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Returns the answer to a question about `key`, asked on a thread of its own. A thread that waits in the kernel cannot be
    /// ended: it stays until it gets its answer, which nobody reads any more. It owns all that it uses. Until then the same
    /// question is late at once.
    pub(super) fn within<T: Send + 'static>(
        &self,
        key: K,
        limit: Duration,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        let late = self.waiting();
        if late.iter().any(|(late, ..)| *late == key) {
            return Err(Unanswered::Late);
        }
        if late.len() >= MOST {
            return Err(Unanswered::NotAsked);
        }
        drop(late);
        let alive = Arc::new(());
        let waits = Arc::downgrade(&alive);
        let (sender, answer) = channel();
        let ask = move || {
            // Dropped when the thread ends, also by a panic.
            let _alive = alive;
            sender.send(question()).ok();
        };
        let thread = thread::Builder::new().name("egmem-ps".into());
        thread.spawn(ask).map_err(|_| Unanswered::NotAsked)?;
        answer.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                self.waiting().push((key, Generation::current(), waits));
                Unanswered::Late
            }
            RecvTimeoutError::Disconnected => Unanswered::NotAsked,
        })
    }

    /// Returns the questions whose threads still wait; a forked child has none of its parent's threads.
    fn waiting(&self) -> MutexGuard<'_, Vec<Entry<K>>> {
        let mut late = lock(&self.0);
        late.retain(|(_, process, waits)| process.is_current() && waits.strong_count() > 0);
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_questions_are_bounded_and_not_asked_again_until_their_answers_come() {
        let late = Late::new();
        let (senders, questions): (Vec<_>, Vec<_>) = (0..MOST).map(|_| channel::<()>()).unzip();
        for (key, question) in questions.into_iter().enumerate() {
            let wait = move || question.recv().unwrap();
            let answer = late.within(key, Duration::ZERO, wait);
            assert_eq!(answer, Err(Unanswered::Late));
        }
        let ask = |key| late.within(key, Duration::from_secs(600), || 1);
        assert_eq!(ask(0), Err(Unanswered::Late));
        assert_eq!(ask(MOST), Err(Unanswered::NotAsked));
        // The threads that wait panic.
        drop(senders);
        while !late.waiting().is_empty() {
            thread::yield_now();
        }
        assert_eq!((ask(0), ask(MOST)), (Ok(1), Ok(1)));
    }
}
