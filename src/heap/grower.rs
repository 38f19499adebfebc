//! Growth ahead of need: a thread that adds memory before somebody waits for it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::core::Core;
use super::shared::Shared;
use crate::per_driver::lock;
use crate::{Error, Result};

/// How long the thread waits after a refusal before it tries once more.
const PAUSE: Duration = Duration::from_millis(200);

/// How often the thread looks by itself while the heap is growing. To wake it
/// takes the allocating thread microseconds, more than the allocation itself.
const LOOK: Duration = Duration::from_millis(1);
/// After so long without growth it rests until it is woken.
const QUIET: Duration = Duration::from_millis(500);

/// Through which allocating threads wake the one that grows.
pub(super) struct Signal {
    /// What is to be free, in bytes; 0: no thread.
    ahead: u64,
    /// Whether the thread knows already; saves the lock.
    awake: AtomicBool,
    /// The bytes that were free and the nodes that were spare when memory was last taken, to look at without
    /// stopping who takes it.
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

    /// Sees how much is free, after memory was taken; wakes the thread where that is less than there
    /// should be.
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

    /// Ends the thread.
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

    /// Waits for `pause`, or until the thread is to end: whether it is.
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

    /// Waits for `pause`, and then for a wish other than to rest.
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

/// The nodes that are to be spare; more are prepared when half of them are used.
const SPARE: usize = 4096;

/// Lets the heap's own table grow ahead too. Memory for it comes from the kernel, which takes its time: the
/// core is not held meanwhile.
fn prepare(heap: &Shared, signal: &Signal) {
    if signal.spare.load(Relaxed) < SPARE / 2 {
        let ahead = heap.core().prepare(SPARE);
        ahead.populate();
        let mut core = heap.core();
        core.prepared(&ahead);
        signal.spare.store(core.spare_nodes(), Relaxed);
    }
}

/// Starts the thread, if the heap is to have one.
///
/// # Errors
/// [`Error::System`] where no thread can be started.
pub(super) fn start(heap: &Arc<Shared>) -> Result<()> {
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

fn run(heap: &Weak<Shared>, signal: &Signal) {
    let mut pause = None;
    while signal.wait(pause) == Wish::Grow {
        let Some(next) = follow(heap, signal) else {
            return;
        };
        pause = next;
    }
}

/// Whether less is free than there should be; what is free is known from then on.
fn is_short(heap: &Shared, signal: &Signal) -> bool {
    let core = heap.core();
    let free = core.free_bytes();
    signal.free.store(free, Relaxed);
    free < signal.ahead
}

/// Grows the heap for as long as there is need, and looks for some time after; how long to wait then
/// before the next wish is heard. `None`: the heap ends.
fn follow(heap: &Weak<Shared>, signal: &Signal) -> Option<Option<Duration>> {
    let mut grown = Instant::now();
    loop {
        let heap = heap.upgrade()?;
        prepare(&heap, signal);
        if signal.free.load(Relaxed) < signal.ahead && is_short(&heap, signal) {
            if let Err(error) = heap.add_memory(signal.ahead, true) {
                // Whoever needs memory now will hear of it; ahead of need it is no failure.
                tracing::debug!(%error, "a heap does not grow ahead");
                signal.awake.store(false, Relaxed);
                return Some(Some(PAUSE));
            }
            is_short(&heap, signal);
            grown = Instant::now();
        } else if grown.elapsed() > QUIET {
            signal.awake.store(false, Relaxed);
            // Whoever took memory until now, under the core's lock, woke nobody; who takes it from now
            // on sees that somebody must be.
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
    use crate::driver::NodeId;
    use crate::heap::Heap;
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
        // The first chunk takes some.
        while heap.shared().core().spare_nodes() < SPARE - 8 {
            assert!(Instant::now() < end, "no spare nodes");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
