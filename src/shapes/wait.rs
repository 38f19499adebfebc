//! Waiting for a GPU or a thread that writes a counter in shared memory.

use std::thread;
use std::time::{Duration, Instant};

use crate::Result;

/// How long a waiting thread keeps its CPU, in the hope of an early answer.
const SPIN: Duration = Duration::from_micros(50);
/// How long it lets others run, but does not sleep.
const YIELD: Duration = Duration::from_millis(1);
/// How long it sleeps between two looks after that.
const SLEEP: Duration = Duration::from_micros(50);

/// Calls `ready` until it returns a value, or until `deadline`, but at least once.
pub fn until<R>(
    deadline: Instant,
    mut ready: impl FnMut() -> Result<Option<R>>,
) -> Result<Option<R>> {
    if let Some(value) = ready()? {
        return Ok(Some(value));
    }
    let start = Instant::now();
    let mut now = start;
    while now < deadline {
        match now - start {
            waited if waited < SPIN => std::hint::spin_loop(),
            waited if waited < YIELD => thread::yield_now(),
            _ => thread::sleep(SLEEP.min(deadline - now)),
        }
        if let Some(value) = ready()? {
            return Ok(Some(value));
        }
        now = Instant::now();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_asks_at_least_once_and_ends_with_the_deadline() {
        let past = Instant::now();
        assert_eq!(until(past, || Ok(Some(1))), Ok(Some(1)));
        let mut asked = 0;
        let nothing: Result<Option<()>> = until(past, || {
            asked += 1;
            Ok(None)
        });
        assert_eq!((nothing, asked), (Ok(None), 1));
        let later = Instant::now() + 3 * YIELD;
        assert_eq!(until(later, || Ok(None::<()>)), Ok(None));
        assert!(Instant::now() >= later);
        let mut left = 5;
        let answer = until(later + Duration::from_secs(600), || {
            left -= 1;
            Ok((left == 0).then_some(2))
        });
        assert_eq!(answer, Ok(Some(2)));
    }
}
