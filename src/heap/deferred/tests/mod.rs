//! On the simulator, whose streams run as late as possible, and on a GPU whose work advances when a test says
//! so.

mod gpu;
mod model;
mod on_gpu;
mod on_sim;

use super::*;

impl<T: Copy> Deferred<T> {
    fn after_one(&mut self, stream: &Stream, payload: T) -> Result<()> {
        self.after_stream(stream, &mut vec![payload])
    }
}

/// Polls; returns the payloads that have passed, sorted.
fn poll<T: Copy + Ord>(deferred: &mut Deferred<T>) -> Vec<T> {
    let mut passed = Vec::new();
    deferred.poll(&mut passed).unwrap();
    passed.sort_unstable();
    passed
}

/// Waits for everything; returns the payloads that have passed, sorted.
fn drain<T: Copy + Ord>(deferred: &mut Deferred<T>) -> Vec<T> {
    let mut passed = Vec::new();
    deferred.drain(&mut passed).unwrap();
    assert_eq!(deferred.pending(), 0);
    passed.sort_unstable();
    passed
}
