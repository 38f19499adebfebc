//! Counts the server's tasks, so that it can wait for the last one.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use tokio::sync::Notify;

/// Counts running tasks.
#[derive(Clone, Debug, Default)]
pub(super) struct Tasks(Arc<Counter>);

#[derive(Debug, Default)]
struct Counter {
    running: AtomicUsize,
    idle: Notify,
}

/// Counts as a running task until dropped.
#[derive(Debug)]
pub(super) struct Running(Arc<Counter>);

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

impl Tasks {
    /// Counts one more task, until the guard is dropped.
    pub fn enter(&self) -> Running {
        self.0.running.fetch_add(1, SeqCst);
        Running(Arc::clone(&self.0))
    }

    /// Runs a task on the current runtime.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let running = self.enter();
        tokio::spawn(async move {
            task.await;
            drop(running);
        });
    }

    /// Runs code that may block, such as driver calls, off the runtime. Dropping the future does not end it;
    /// it counts until it returns.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let running = self.enter();
        let work = move || {
            let result = work();
            drop(running);
            result
        };
        tokio::task::spawn_blocking(work).await.ok()
    }

    /// Returns how many run.
    pub fn count(&self) -> usize {
        self.0.running.load(SeqCst)
    }

    /// Waits until none runs; returns whether that happened in time.
    pub async fn idle(&self, within: Duration) -> bool {
        let wait = async {
            loop {
                let idle = self.0.idle.notified();
                tokio::pin!(idle);
                idle.as_mut().enable();
                if self.count() == 0 {
                    return;
                }
                idle.await;
            }
        };
        tokio::time::timeout(within, wait).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_waits_for_the_last_one() {
        let tasks = Tasks::default();
        assert!(tasks.idle(Duration::ZERO).await);
        tasks.spawn(tokio::time::sleep(Duration::from_secs(5)));
        assert_eq!(tasks.count(), 1);
        assert!(!tasks.idle(Duration::from_secs(1)).await);
        assert!(tasks.idle(Duration::from_secs(10)).await);
    }

    #[tokio::test]
    async fn what_blocks_counts_to_its_end() {
        let tasks = Tasks::default();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let blocked = tasks.blocking(move || wait.recv().is_ok());
        assert!(
            tokio::time::timeout(Duration::from_millis(10), blocked)
                .await
                .is_err()
        );
        assert_eq!(tasks.count(), 1);
        go.send(()).unwrap();
        assert!(tasks.idle(Duration::from_secs(60)).await);
    }
}
