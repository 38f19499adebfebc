//! A subscriber of one thread's events.

use std::sync::LazyLock;

use tracing::subscriber::{NoSubscriber, with_default};
use tracing::{Dispatch, Subscriber};

/// Runs `f` with `subscriber` as the calling thread's.
///
/// While a program has one subscriber alone, `tracing` asks the thread that first reaches an event whether its
/// subscriber wants it, and remembers the answer for all: a thread of another test, which has no subscriber, says no.
/// With more subscribers it asks each of them. So two that want nothing live as long as the program.
pub fn with_subscriber<T>(
    subscriber: impl Subscriber + Send + Sync + 'static,
    f: impl FnOnce() -> T,
) -> T {
    static IDLE: LazyLock<[Dispatch; 2]> =
        LazyLock::new(|| std::array::from_fn(|_| Dispatch::new(NoSubscriber::new())));
    LazyLock::force(&IDLE);
    with_default(subscriber, f)
}
