//! On the simulator, whose streams run as late as they may, and on a GPU whose work goes on when a
//! test says so.

mod gpu;
mod model;
mod on_gpu;
mod on_sim;

use super::*;

/// Polls; what has passed, in order of size.
fn poll<T: Ord>(deferred: &mut Deferred<T>) -> Vec<T> {
    let mut passed = Vec::new();
    let count = deferred.poll(&mut passed).unwrap();
    assert_eq!(count, passed.len());
    passed.sort_unstable();
    passed
}

/// Waits for everything; what has passed, in order of size.
fn drain<T: Ord>(deferred: &mut Deferred<T>) -> Vec<T> {
    let mut passed = Vec::new();
    deferred.drain(&mut passed).unwrap();
    assert_eq!(deferred.pending(), 0);
    passed.sort_unstable();
    passed
}
