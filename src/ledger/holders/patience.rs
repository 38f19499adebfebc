//! Questions to the kernel that it may not answer, because another process holds a lock.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Returns the answer to a question, asked on a thread of its own. `None`: no answer came within `limit`, or no thread was
/// there. A thread that waits in the kernel cannot be ended: it stays until it gets its answer, which nobody reads any more. It
/// owns all that it uses.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, answer) = mpsc::channel();
    let ask = move || {
        let _ = sender.send(question());
    };
    thread::Builder::new()
        .name("egmem-ps".into())
        .spawn(ask)
        .ok()?;
    answer.recv_timeout(limit).ok()
}
