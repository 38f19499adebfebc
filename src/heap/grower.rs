//! Background threads: one adds memory before an allocation has to wait for it, one gives idle memory back.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::inner::HeapInner;
use crate::{Error, Result};

pub(super) use self::decay::Decay;
pub(super) use self::signal::Signal;

/// How long the thread waits after a refusal before it retries.
const PAUSE: Duration = Duration::from_millis(200);

/// How often the thread polls while the heap is growing. Waking it costs the allocating thread microseconds,
/// more than the allocation itself.
const LOOK: Duration = Duration::from_millis(1);
/// After this long without growth the thread sleeps until it is woken.
const QUIET: Duration = Duration::from_millis(500);

/// How many nodes to keep spare; more are prepared when half of them are used.
const SPARE: usize = 4096;

/// Grows the heap's own table in advance. The kernel's page faults for it take time, so the core's lock is
/// not held meanwhile.
fn prepare(heap: &HeapInner, signal: &Signal) {
    if signal.spare.load(Relaxed) < SPARE / 2 {
        let Some(ahead) = heap.core().prepare(SPARE) else {
            return; // unreachable: only shards do not grow
        };
        ahead.populate();
        let mut core = heap.core();
        core.prepared(&ahead);
        signal.spare.store(core.spare_nodes(), Relaxed);
    }
}

/// Starts the threads that the heap asks for: one for background growth, one that gives idle memory back.
///
/// # Errors
/// [`Error::System`] if a thread cannot be started.
pub(super) fn start(heap: &Arc<HeapInner>, decay: Option<Decay>) -> Result<()> {
    if heap.grower.ahead > 0 {
        spawn("egmem-heap", heap, run)?;
    }
    match decay.filter(|_| heap.watch.is_none()) {
        Some(decay) => spawn("egmem-decay", heap, |heap, signal| decay.run(heap, signal)),
        None => Ok(()),
    }
}

fn spawn(
    name: &str,
    heap: &Arc<HeapInner>,
    run: impl FnOnce(&Weak<HeapInner>, &Signal) + Send + 'static,
) -> Result<()> {
    let (signal, heap) = (Arc::clone(&heap.grower), Arc::downgrade(heap));
    thread::Builder::new()
        .name(name.into())
        .spawn(move || run(&heap, &signal))
        .map(|_| ())
        .map_err(|error| Error::system("starting a thread of a heap", &error))
}

fn run(heap: &Weak<HeapInner>, signal: &Signal) {
    let mut pause = None;
    while signal.wait(pause) {
        let Some(next) = follow(heap, signal) else {
            return;
        };
        pause = next;
    }
}

/// Returns whether less is free than there should be, and records the free bytes.
fn is_short(heap: &HeapInner, signal: &Signal) -> bool {
    let core = heap.core();
    let free = core.free_bytes();
    signal.free.store(free, Relaxed);
    free < signal.ahead
}

/// Grows the heap while it is short of free memory, and polls for some time after. Returns how long to wait
/// for the next wish, or `None` if the heap has ended.
fn follow(heap: &Weak<HeapInner>, signal: &Signal) -> Option<Option<Duration>> {
    let mut grown = Instant::now();
    loop {
        let heap = heap.upgrade()?;
        prepare(&heap, signal);
        if signal.free.load(Relaxed) < signal.ahead && is_short(&heap, signal) {
            if let Err(error) = heap.add_memory(signal.ahead, true, |_, _| Ok(())) {
                // An allocation that needs the memory gets the error itself; in advance this is no
                // failure.
                tracing::debug!(%error, "a heap does not grow ahead");
                signal.awake.store(false, Relaxed);
                return Some(Some(PAUSE));
            }
            is_short(&heap, signal);
            grown = Instant::now();
        } else if grown.elapsed() > QUIET {
            signal.awake.store(false, Relaxed);
            // Allocations until now, under the core's lock, woke no thread; later ones see that they have to.
            if !is_short(&heap, signal) {
                return Some(None);
            }
            signal.awake.store(true, Relaxed);
        }
        drop(heap);
        if signal.ends_within(LOOK) {
            return None;
        }
    }
}

mod decay;
mod signal;
#[cfg(test)]
mod tests {
    use super::*;
    use crate::Heap;
    use crate::driver::NodeId;
    use crate::{Driver, Machine};

    #[test]
    fn the_tables_grow_ahead_too() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let heap = Heap::on(NodeId(0))
            .limit(64 << 20)
            .chunk(8 << 20)
            .grow_ahead(8 << 20)
            .build(&driver)
            .unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        // The first chunk uses some.
        while heap.inner().core().spare_nodes() < SPARE - 8 {
            assert!(Instant::now() < end, "no spare nodes");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
