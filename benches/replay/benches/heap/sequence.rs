//! The sequences of requests that every contestant gets: made beforehand from a seed, so that they are the
//! same for all and cost nothing while the clock runs.

use fastrand::Rng;

/// Allocate or free.
#[derive(Clone, Copy)]
pub struct Event {
    /// The slot, and in the highest bit whether it is freed.
    slot: u32,
    size: u32,
}

const FREE: u32 = 1 << 31;

impl Event {
    fn allocate(slot: u32, size: u32) -> Self {
        Self { slot, size }
    }

    fn free(slot: u32, size: u32) -> Self {
        Self {
            slot: slot | FREE,
            size,
        }
    }

    /// Which slot.
    #[inline]
    pub fn slot(self) -> usize {
        (self.slot & !FREE) as usize
    }

    /// Whether the block in the slot is freed.
    #[inline]
    pub fn is_free(self) -> bool {
        self.slot & FREE != 0
    }

    /// The block's bytes, at least one.
    #[inline]
    pub fn size(self) -> usize {
        self.size as usize
    }
}

/// Events in order, and their totals.
pub struct Sequence {
    /// The events before the clock starts.
    pub before: Vec<Event>,
    /// The events that are timed.
    pub timed: Vec<Event>,
    /// The events after the clock stops: they free all live blocks.
    pub after: Vec<Event>,
    /// How many slots there are.
    pub slots: usize,
    /// The most bytes that live at once.
    pub peak: u64,
    /// The most blocks that live at once.
    pub blocks: u32,
}

/// How sizes are drawn, in bytes.
#[derive(Debug, Clone, Copy)]
pub enum Sizes {
    /// One size.
    Fixed(u32),
    /// From the first to the second, in steps of the third.
    Uniform(u32, u32, u32),
}

impl Sizes {
    /// The next one.
    pub fn draw(self, rng: &mut Rng) -> u32 {
        match self {
            Self::Fixed(size) => size,
            Self::Uniform(least, most, step) => rng.u32(least / step..=most / step) * step,
        }
    }

    fn mean(self) -> u64 {
        match self {
            Self::Fixed(size) => size.into(),
            Self::Uniform(least, most, _) => (u64::from(least) + u64::from(most)) / 2,
        }
    }
}

/// Makes a sequence, and counts live bytes and blocks.
struct Maker {
    rng: Rng,
    events: Vec<Event>,
    /// Slots that are in use, with their sizes.
    live: Vec<(u32, u32)>,
    free: Vec<u32>,
    slots: u32,
    bytes: u64,
    peak: u64,
    blocks: usize,
}

impl Maker {
    fn new(seed: u64) -> Self {
        Self {
            rng: Rng::with_seed(seed),
            events: Vec::new(),
            live: Vec::new(),
            free: Vec::new(),
            slots: 0,
            bytes: 0,
            peak: 0,
            blocks: 0,
        }
    }

    fn allocate(&mut self, size: u32) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots += 1;
            self.slots - 1
        });
        self.events.push(Event::allocate(slot, size));
        self.live.push((slot, size));
        self.bytes += u64::from(size);
        self.peak = self.peak.max(self.bytes);
        self.blocks = self.blocks.max(self.live.len());
    }

    fn free(&mut self, index: usize) {
        let (slot, size) = self.live.swap_remove(index);
        self.events.push(Event::free(slot, size));
        self.free.push(slot);
        self.bytes -= u64::from(size);
    }

    fn free_any(&mut self) {
        let index = self.rng.usize(..self.live.len());
        self.free(index);
    }

    fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    fn finish(mut self, before: Vec<Event>, timed: Vec<Event>) -> Sequence {
        while !self.live.is_empty() {
            self.free(self.live.len() - 1);
        }
        Sequence {
            before,
            timed,
            after: self.take(),
            slots: self.slots as usize,
            peak: self.peak,
            blocks: self.blocks as u32,
        }
    }
}

/// RMM's benchmark "random_allocations": `count` allocations of 1 to `most` bytes. 73 of 100 steps
/// allocate unless that would exceed the cap on live bytes; the others free any live block.
///
/// The cap is 0.6 · `count` · the mean size: blocks grow by 0.63 for each allocation, so that it is
/// reached in the last part of the run. Twice `count` steps are made, so that the run ends (almost)
/// empty.
pub fn random_allocations(count: u32, most: u32, seed: u64) -> Sequence {
    let mut maker = Maker::new(seed);
    let sizes = Sizes::Uniform(1, most, 1);
    let cap = u64::from(count) * sizes.mean() * 6 / 10;
    let mut left = count;
    for _ in 0..2 * u64::from(count) {
        let size = sizes.draw(&mut maker.rng);
        let allocate = maker.live.is_empty()
            || (maker.rng.u32(..100) < 73 && left > 0 && maker.bytes + u64::from(size) < cap);
        if !allocate {
            maker.free_any();
        } else if left > 0 {
            maker.allocate(size);
            left -= 1;
        }
    }
    let timed = maker.take();
    maker.finish(Vec::new(), timed)
}

/// Many runs of [`random_allocations`], each of other numbers, one after the other in one pass. The
/// processor's branch predictor would learn a run of a thousand that is repeated, which does not happen
/// with a program's blocks.
pub fn random_allocations_anew(count: u32, most: u32, runs: u32) -> Sequence {
    let mut all = Sequence {
        before: Vec::new(),
        timed: Vec::new(),
        after: Vec::new(),
        slots: 0,
        peak: 0,
        blocks: 0,
    };
    for seed in 1..=u64::from(runs) {
        let run = random_allocations(count, most, seed);
        all.timed.extend(run.timed);
        all.timed.extend(run.after);
        all.slots = all.slots.max(run.slots);
        all.peak = all.peak.max(run.peak);
        all.blocks = all.blocks.max(run.blocks);
    }
    all
}

/// 131 072 blocks of 1 KiB, every other one freed, then `pairs` of allocating and freeing 1 KiB.
pub fn holes(pairs: u32) -> Sequence {
    const BLOCKS: u32 = 131_072;
    const SIZE: u32 = 1024;
    let mut maker = Maker::new(2);
    for _ in 0..BLOCKS {
        maker.allocate(SIZE);
    }
    for index in (0..BLOCKS as usize).rev().step_by(2) {
        maker.free(index);
    }
    let before = maker.take();
    for _ in 0..pairs {
        maker.allocate(SIZE);
        maker.free(maker.live.len() - 1);
    }
    let timed = maker.take();
    maker.finish(before, timed)
}

/// The shape of UMF's benchmark "multiple_malloc_free", which has 10 000 slots, half of them filled beforehand:
/// each operation allocates into any empty slot or frees any full one, as a coin falls.
pub fn churn<const SLOTS: usize>(operations: u32, sizes: Sizes, seed: u64) -> Sequence {
    let mut maker = Maker::new(seed);
    for _ in 0..SLOTS / 2 {
        let size = sizes.draw(&mut maker.rng);
        maker.allocate(size);
    }
    let before = maker.take();
    for _ in 0..operations {
        let room = maker.live.len() < SLOTS;
        if maker.live.is_empty() || (room && maker.rng.bool()) {
            let size = sizes.draw(&mut maker.rng);
            maker.allocate(size);
        } else {
            maker.free_any();
        }
    }
    let timed = maker.take();
    maker.finish(before, timed)
}

/// The shape of UMF's benchmark "peak_alloc": the count of live blocks wanders up to 10 000 and down again.
///
/// The further live blocks are below the line, the likelier the next operation allocates: a normal
/// distribution of 1000 blocks' width.
pub fn peak(operations: u32, sizes: Sizes, seed: u64) -> Sequence {
    const SLOTS: f64 = 10_000.0;
    let mut maker = Maker::new(seed);
    for step in 0..operations {
        let done = f64::from(step) / f64::from(operations);
        let line = SLOTS * (1.0 - (2.0 * done - 1.0).abs());
        let likely = normal((line - maker.live.len() as f64) / 1000.0);
        let room = (maker.live.len() as f64) < SLOTS;
        if maker.live.is_empty() || (room && likely > maker.rng.f64()) {
            let size = sizes.draw(&mut maker.rng);
            maker.allocate(size);
        } else {
            maker.free_any();
        }
    }
    let timed = maker.take();
    maker.finish(Vec::new(), timed)
}

/// The standard normal distribution's function, by its logistic approximation (within 0.01).
fn normal(x: f64) -> f64 {
    1.0 / (1.0 + (-1.702 * x).exp())
}
