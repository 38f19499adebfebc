//! Work of GPUs that keeps memory until it has ended.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pyo3::prelude::*;

use crate::gil::{PerProcess, lock};

/// Returns whether the work has ended; it owns the memory.
type IsOver = Box<dyn FnMut() -> bool + Send>;

#[derive(Default)]
struct Running {
    works: Mutex<Vec<IsOver>>,
    count: AtomicUsize,
}

static RUNNING: PerProcess<Running> = PerProcess::new();

fn running() -> &'static Running {
    RUNNING.get(|_| Running::default())
}

/// Keeps what `is_over` owns until it has returned `true`.
pub fn add(is_over: impl FnMut() -> bool + Send + 'static) {
    let running = running();
    let mut works = lock(&running.works);
    works.push(Box::new(is_over));
    running.count.store(works.len(), Relaxed);
}

/// Drops the memory of work that has ended, without the GIL.
pub fn sweep(py: Python<'_>) {
    let running = running();
    if running.count.load(Relaxed) == 0 {
        return;
    }
    py.detach(|| {
        let mut works = lock(&running.works);
        let ended: Vec<_> = works.extract_if(.., |is_over| is_over()).collect();
        running.count.store(works.len(), Relaxed);
        drop(works);
        drop(ended);
    });
}
