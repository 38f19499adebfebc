//! A wait that one thread makes, and whose result every thread gets.

use std::mem;
use std::sync::{Condvar, Mutex, PoisonError};

/// Work that runs, of type `W`, and its result, of type `R`. One thread waits for the work; others wait for that
/// thread.
pub struct Once<W, R> {
    state: Mutex<State<W, R>>,
    /// Notified when `state` is over.
    ended: Condvar,
    /// The result of work whose wait panicked.
    lost: R,
}

enum State<W, R> {
    Running(W),
    /// A thread waits for the work.
    Waiting,
    Over(R),
}

/// Ends the wait of other threads: with `result`, or after a panic with `lost`.
struct Ending<'a, W, R: Clone> {
    of: &'a Once<W, R>,
    result: Option<R>,
}

impl<W, R: Clone> Drop for Ending<'_, W, R> {
    fn drop(&mut self) {
        let result = self.result.take();
        let result = result.unwrap_or_else(|| self.of.lost.clone());
        *lock(&self.of.state) = State::Over(result);
        self.of.ended.notify_all();
    }
}

impl<W, R: Clone> Once<W, R> {
    /// Wraps work. If a wait for it panics, its result is `lost`.
    pub fn new(work: W, lost: R) -> Self {
        Self {
            state: Mutex::new(State::Running(work)),
            ended: Condvar::new(),
            lost,
        }
    }

    /// Returns the result, for which the first caller calls `wait`. Others wait for that call.
    pub fn wait(&self, wait: impl FnOnce(W) -> R) -> R {
        let mut state = lock(&self.state);
        loop {
            match mem::replace(&mut *state, State::Waiting) {
                State::Running(work) => {
                    drop(state);
                    let mut ending = Ending {
                        of: self,
                        result: None,
                    };
                    let result = wait(work);
                    ending.result = Some(result.clone());
                    return result;
                }
                State::Waiting => {
                    let woken = self.ended.wait(state);
                    state = woken.unwrap_or_else(PoisonError::into_inner);
                }
                State::Over(result) => {
                    *state = State::Over(result.clone());
                    return result;
                }
            }
        }
    }

    /// Returns the result if there is one; otherwise `None`, without waiting. `ask` is called for work that no thread
    /// waits for, and returns its result once it has ended.
    ///
    /// # Errors
    /// Those of `ask`; the work runs on then.
    pub fn poll<E>(
        &self,
        ask: impl FnOnce(&mut W) -> Result<Option<R>, E>,
    ) -> Result<Option<R>, E> {
        let mut state = lock(&self.state);
        match &mut *state {
            State::Waiting => Ok(None),
            State::Over(result) => Ok(Some(result.clone())),
            State::Running(work) => {
                let result = ask(work)?;
                if let Some(result) = &result {
                    *state = State::Over(result.clone());
                }
                Ok(result)
            }
        }
    }

    /// Returns whether there is a result.
    pub fn is_over(&self) -> bool {
        matches!(*lock(&self.state), State::Over(_))
    }

    /// Takes the work that no thread has waited for. The caller has the value alone, so no thread waits.
    pub fn take(&mut self) -> Option<W> {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        match mem::replace(state, State::Waiting) {
            State::Running(work) => Some(work),
            _ => None,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
