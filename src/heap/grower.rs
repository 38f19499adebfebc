//! Background threads: one adds memory before an allocation has to wait for it, one gives idle memory back.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::cache::CacheBound;
use crate::inner::HeapInner;
use crate::per_driver::lock;
use crate::ranges::Core;
use crate::{Error, Result};

/// How long the thread pauses after a refusal. Then it sleeps until an allocation finds less free than there should be.
const PAUSE: Duration = Duration::from_millis(200);

/// How often the thread polls while the heap is growing. Waking it costs the allocating thread microseconds,
/// more than the allocation itself.
const LOOK: Duration = Duration::from_millis(1);
/// After this long without growth the thread sleeps until it is woken.
const QUIET: Duration = Duration::from_millis(500);

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

/// Returns whether less is free than there should be, and records the free bytes.
fn is_short(heap: &HeapInner, signal: &Signal) -> bool {
    let core = heap.core();
    let free = core.ranges.free_bytes();
    signal.free.store(free, Relaxed);
    free < signal.ahead
}

/// Grows the heap while it is short of free memory, polls for some time after, and sleeps. Returns when the heap ends.
fn run(heap: &Weak<HeapInner>, signal: &Signal) {
    let mut grown = Instant::now();
    while signal.wait() {
        let Some(heap) = heap.upgrade() else { return };
        let mut pause = LOOK;
        if signal.free.load(Relaxed) < signal.ahead && is_short(&heap, signal) {
            if let Err(error) = heap.add_memory(signal.ahead, true, |_, _| Ok(())) {
                // An allocation that needs the memory gets the error itself; in advance this is no
                // failure.
                tracing::debug!(%error, "a heap does not grow ahead");
                signal.awake.store(false, Relaxed);
                pause = PAUSE;
            } else {
                is_short(&heap, signal);
            }
            heap.tell();
            grown = Instant::now();
        } else if grown.elapsed() > QUIET {
            signal.awake.store(false, Relaxed);
            // Allocations until now, under the core's lock, woke no thread; later ones see that they have to.
            if is_short(&heap, signal) {
                signal.awake.store(true, Relaxed);
            }
        }
        drop(heap);
        if signal.ends_within(pause) {
            return;
        }
    }
}

/// In how many parts the time is looked at: memory goes back after the time and at most a part more, unless other memory went
/// back meanwhile.
const PARTS: usize = 8;
/// The shortest part: the thread must not take a CPU for itself.
const LEAST_PART: Duration = Duration::from_millis(1);

/// How much memory was needed lately: the most in each part of the time.
pub(super) struct Decay {
    part: Duration,
    /// The bytes that the heap had from the start, and those that it keeps free: neither goes back.
    reserve: u64,
    ahead: u64,
    /// `u64::MAX` for parts before the first look.
    peaks: [u64; PARTS],
    next: usize,
    /// The bytes in shards' posts at the last look.
    posted: u64,
}

impl Decay {
    pub(super) fn new(idle: Duration, reserve: u64, ahead: u64) -> Self {
        Self {
            part: (idle / PARTS as u32).max(LEAST_PART),
            reserve,
            ahead,
            peaks: [u64::MAX; PARTS],
            next: 0,
            posted: 0,
        }
    }

    /// Looks at the end of each part of the time until the heap ends.
    pub(super) fn run(mut self, heap: &Weak<HeapInner>, signal: &Signal) {
        while !signal.ends_within(self.part) {
            let Some(heap) = heap.upgrade() else { return };
            self.look(&heap);
        }
    }

    /// Gives back memory that was needed in none of the last [`PARTS`] parts of the time, one of which has passed since the last
    /// call. The caller needs no handle: in debug mode, where it would, there is no decay.
    pub(super) fn look(&mut self, heap: &HeapInner) {
        // The core counts free bytes in shards, and in their posts, as used.
        let posted = heap.front.posted();
        let posted_before = std::mem::replace(&mut self.posted, posted);
        let idle = posted + heap.front.sum_of_shards(CacheBound::shard);
        let least_idle =
            heap.front.sum_of_shards(CacheBound::take_least_in_shard) + posted.min(posted_before);
        let (peak, used, backed) = {
            let mut core = heap.core();
            (core.take_peak(), core.used(), core.ranges.total())
        };
        self.peaks[self.next] = peak.saturating_sub(least_idle);
        self.next = (self.next + 1) % PARTS;
        let needed = self.peaks.iter().copied().fold(self.reserve, u64::max);
        if needed >= backed {
            return;
        }
        // The threads' caches are emptied at most once in the time.
        self.peaks = [u64::MAX; PARTS];
        // `trim` returns the shards' free bytes to the core first.
        let keep = needed
            .saturating_sub(used.saturating_sub(idle))
            .max(self.ahead);
        match heap.trim(keep) {
            Ok(0) => {}
            Ok(bytes) => tracing::debug!(bytes, "memory that was idle went back"),
            // The heap may have ended meanwhile.
            Err(error) if *lock(&heap.grower.ended) => {
                tracing::debug!(%error, "the heap has ended")
            }
            Err(error) => tracing::warn!(%error, "idle memory does not go back"),
        }
        heap.tell();
    }
}

/// How allocating threads wake the background thread, and the heap's end its threads.
pub(super) struct Signal {
    /// How many bytes to keep free; 0: there is no thread.
    pub(super) ahead: u64,
    /// Whether the thread is awake or about to be, in which case the lock is not needed.
    pub(super) awake: AtomicBool,
    /// The free bytes when memory was last taken. The thread reads them without blocking allocations.
    pub(super) free: AtomicU64,
    /// Whether the threads are to stop.
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    pub(super) fn new(ahead: u64) -> Self {
        Self {
            ahead,
            awake: AtomicBool::new(true),
            free: AtomicU64::new(0),
            ended: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    /// Records how much is free after an allocation, and wakes the thread if that is too little.
    #[inline]
    pub(super) fn look(&self, core: &Core) {
        if self.ahead > 0 {
            let free = core.ranges.free_bytes();
            self.free.store(free, Relaxed);
            if free < self.ahead && !self.awake.swap(true, Relaxed) {
                // So that this comes before the thread looks at `awake`, or after it sleeps.
                drop(lock(&self.ended));
                self.changed.notify_all();
            }
        }
    }

    /// Stops the threads.
    pub(super) fn stop(&self) {
        *lock(&self.ended) = true;
        self.changed.notify_all();
    }

    /// Waits for `pause` or until the thread is to stop; returns `true` if it is to stop.
    pub(super) fn ends_within(&self, pause: Duration) -> bool {
        let lasts = |ended: &mut bool| !*ended;
        let ended = lock(&self.ended);
        let waited = self.changed.wait_timeout_while(ended, pause, lasts);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until memory may be short; returns `false` if the thread is to stop.
    pub(super) fn wait(&self) -> bool {
        let sleeps = |ended: &mut bool| !*ended && !self.awake.load(Relaxed);
        let waited = self.changed.wait_while(lock(&self.ended), sleeps);
        !*waited.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::Layout;

    use super::*;
    use crate::driver::{Call, NodeId};
    use crate::{Driver, Heap, Machine};

    const MIB: u64 = 1 << 20;

    fn heap() -> Heap {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let options = Heap::on(NodeId(0)).limit(64 * MIB).chunk(4 * MIB);
        options.build(&driver).unwrap()
    }

    /// Allocates and frees a block.
    fn need(heap: &Heap, mib: u64) {
        let layout = Layout::from_size_align((mib * MIB) as usize, 1).unwrap();
        drop(heap.allocate(layout).unwrap());
    }

    fn decay(reserve: u64, ahead: u64) -> Decay {
        Decay::new(Duration::from_secs(8), reserve * MIB, ahead * MIB)
    }

    /// Lets parts of the time pass; returns the MiB after each.
    fn looks<const N: usize>(heap: &Heap, decay: &mut Decay, mib: u64) -> [u64; N] {
        std::array::from_fn(|_| {
            if mib > 0 {
                need(heap, mib);
            }
            decay.look(heap.inner());
            heap.backed() / MIB
        })
    }

    #[test]
    fn memory_goes_back_after_all_parts_of_the_time_without_need() {
        let heap = heap();
        let mut decay = decay(0, 0);
        need(&heap, 20);
        assert_eq!(
            looks(&heap, &mut decay, 0),
            [20, 20, 20, 20, 20, 20, 20, 20, 0]
        );
        let sim = heap.driver().sim().unwrap();
        assert_eq!(
            (sim.count(Call::MemUnmap), sim.count(Call::MemRelease)),
            (5, 5)
        );
        assert_eq!(heap.stats().used_high_water, 20 * MIB);
        // Once more, the same.
        need(&heap, 20);
        assert_eq!(
            looks(&heap, &mut decay, 0),
            [20, 20, 20, 20, 20, 20, 20, 20, 0]
        );
    }

    #[test]
    fn a_time_of_nothing_is_looked_at_once_a_millisecond() {
        let part = |idle| Decay::new(idle, 0, 0).part;
        for idle in [Duration::ZERO, Duration::from_nanos(1), LEAST_PART] {
            assert_eq!(part(idle), LEAST_PART);
        }
        assert_eq!(part(Duration::from_secs(8)), Duration::from_secs(1));
    }

    #[test]
    fn what_is_needed_again_and_again_stays() {
        let heap = heap();
        let mut decay = decay(0, 0);
        need(&heap, 20);
        assert_eq!(
            looks(&heap, &mut decay, 7),
            [20, 20, 20, 20, 20, 20, 20, 20, 8]
        );
        assert_eq!(looks(&heap, &mut decay, 7), [8; 10]);
        let sim = heap.driver().sim().unwrap();
        assert_eq!(
            (sim.count(Call::MemCreate), sim.count(Call::MemUnmap)),
            (5, 3)
        );
        // Before the time is over, once is enough.
        for _ in 0..5 {
            assert_eq!(looks(&heap, &mut decay, 0), [8; 7]);
            need(&heap, 7);
        }
    }

    #[test]
    fn what_the_heap_has_from_the_start_and_what_it_keeps_free_stay() {
        for (reserve, ahead, left) in [(8, 0, 8), (0, 12, 12), (8, 12, 12)] {
            let heap = heap();
            let mut decay = decay(reserve, ahead);
            need(&heap, 20);
            let after: [u64; 20] = looks(&heap, &mut decay, 0);
            assert_eq!(after[19], left, "{reserve} {ahead}");
        }
    }

    #[test]
    fn blocks_in_use_keep_their_chunks() {
        let heap = heap();
        let mut decay = decay(0, 0);
        let block = heap.allocate(Layout::new::<[u8; 5 << 20]>()).unwrap();
        need(&heap, 20);
        let after: [u64; 20] = looks(&heap, &mut decay, 0);
        assert_eq!(after[19], 8);
        drop(block);
        let after: [u64; 20] = looks(&heap, &mut decay, 0);
        assert_eq!(after[19], 0);
    }
}
