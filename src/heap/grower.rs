//! Background growth: a thread adds memory before an allocation has to wait for it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::core::Core;
use super::inner::HeapInner;
use crate::per_driver::lock;
use crate::{Error, Result};

/// How long the thread waits after a refusal before it retries.
const PAUSE: Duration = Duration::from_millis(200);

/// How often the thread polls while the heap is growing. Waking it costs the allocating thread microseconds,
/// more than the allocation itself.
const LOOK: Duration = Duration::from_millis(1);
/// After this long without growth the thread sleeps until it is woken.
const QUIET: Duration = Duration::from_millis(500);

/// How allocating threads wake the background thread.
pub(super) struct Signal {
    /// How many bytes to keep free; 0: there is no thread.
    ahead: u64,
    /// Whether the thread is awake already, in which case the lock is not needed.
    awake: AtomicBool,
    /// The free bytes and spare nodes when memory was last taken. The thread reads them without blocking
    /// allocations.
    free: AtomicU64,
    spare: AtomicUsize,
    wish: Mutex<Wish>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    Rest,
    Grow,
    End,
}

impl Signal {
    pub(super) fn new(ahead: u64) -> Self {
        Self {
            ahead,
            awake: AtomicBool::new(true),
            free: AtomicU64::new(0),
            spare: AtomicUsize::new(0),
            wish: Mutex::new(Wish::Grow),
            changed: Condvar::new(),
        }
    }

    /// Records how much is free after an allocation, and wakes the thread if that is too little.
    #[inline]
    pub(super) fn look(&self, core: &Core) {
        if self.ahead > 0 {
            let free = core.free_bytes();
            self.free.store(free, Relaxed);
            self.spare.store(core.spare_nodes(), Relaxed);
            if free < self.ahead && !self.awake.swap(true, Relaxed) {
                self.set(Wish::Grow);
            }
        }
    }

    /// Stops the thread.
    pub(super) fn stop(&self) {
        self.set(Wish::End);
    }

    fn set(&self, wish: Wish) {
        let mut current = lock(&self.wish);
        if *current != Wish::End {
            *current = wish;
        }
        self.changed.notify_all();
    }

    /// Waits for `pause` or until the thread is to stop; returns `true` if it is to stop.
    fn ends_within(&self, pause: Duration) -> bool {
        let wish = lock(&self.wish);
        let waited = self
            .changed
            .wait_timeout_while(wish, pause, |wish| *wish != Wish::End);
        let wish = match waited {
            Ok((wish, _)) => wish,
            Err(poisoned) => poisoned.into_inner().0,
        };
        *wish == Wish::End
    }

    /// Waits for `pause` if there is one, then until the wish is not to rest.
    fn wait(&self, pause: Option<Duration>) -> Wish {
        if pause.is_some_and(|pause| self.ends_within(pause)) {
            return Wish::End;
        }
        let mut wish = lock(&self.wish);
        loop {
            match *wish {
                Wish::Rest => {}
                Wish::Grow => {
                    *wish = Wish::Rest;
                    return Wish::Grow;
                }
                Wish::End => return Wish::End,
            }
            wish = match self.changed.wait(wish) {
                Ok(wish) => wish,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }
}

/// How many nodes to keep spare; more are prepared when half of them are used.
const SPARE: usize = 4096;

/// Grows the heap's own table ahead of need. The kernel's page faults for it take time, so the core's lock is
/// not held meanwhile.
fn prepare(heap: &HeapInner, signal: &Signal) {
    if signal.spare.load(Relaxed) < SPARE / 2 {
        let ahead = heap.core().prepare(SPARE);
        ahead.populate();
        let mut core = heap.core();
        core.prepared(&ahead);
        signal.spare.store(core.spare_nodes(), Relaxed);
    }
}

/// Starts the thread, if the heap has background growth.
///
/// # Errors
/// [`Error::System`] if the thread cannot be started.
pub(super) fn start(heap: &Arc<HeapInner>) -> Result<()> {
    let signal = Arc::clone(&heap.grower);
    if signal.ahead == 0 {
        return Ok(());
    }
    let heap = Arc::downgrade(heap);
    thread::Builder::new()
        .name("egmem-heap".into())
        .spawn(move || run(&heap, &signal))
        .map(|_| ())
        .map_err(|error| Error::system("starting the thread that grows a heap", &error))
}

fn run(heap: &Weak<HeapInner>, signal: &Signal) {
    let mut pause = None;
    while signal.wait(pause) == Wish::Grow {
        let Some(next) = follow(heap, signal) else {
            return;
        };
        pause = next;
    }
}

/// Returns whether less is free than there should be, and records what is free.
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
            if let Err(error) = heap.add_memory(signal.ahead, true) {
                // An allocation that needs the memory gets the error itself; ahead of need this is no
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
