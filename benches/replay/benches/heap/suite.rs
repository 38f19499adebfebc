//! The work of the programs of mimalloc-bench, written anew from their descriptions: a number of allocations for each
//! thread, and as many frees.
//!
//! Blocks are written to as those programs do, if their bytes are there: a word of each block.

use std::alloc::Layout;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fastrand::Rng;

use crate::threads::at_once;
use egmem_replay::contestants::Shared;

/// A program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// A server: each thread replaces random blocks among 1000, and another thread goes on with them.
    Larson,
    /// Half of the threads allocate, the other half free.
    Xmalloc,
    /// Most blocks are small and die soon; some live on, and some are exchanged between all threads.
    Mstress,
    /// Blocks up to 16 000 bytes in turn, the small ones most often; whole arrays go to the next thread.
    Rptest,
    /// Random places of an array are filled and emptied.
    AllocTest,
    /// Threads free neighbouring blocks of one thread first, then write to their own again and again.
    CacheScratch,
    /// Threads write to a small block of their own again and again.
    CacheThrash,
    /// Threads begin, allocate and end, and leave blocks behind.
    Mleak,
    /// Sizes in turn, freed in the order of allocation or in the reverse.
    Sh6,
    /// The same with random sizes, and with other threads' blocks.
    Sh8,
}

/// A block and how it was allocated.
struct Item<S: Shared>(S::Block, Layout);

/// Blocks that threads hand over.
type Boxes<S> = Vec<Mutex<Vec<Item<S>>>>;

/// Allocations of a pass, by each thread.
pub const COUNT: usize = 120_000;

impl Program {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Larson,
        Self::Xmalloc,
        Self::Mstress,
        Self::Rptest,
        Self::AllocTest,
        Self::CacheScratch,
        Self::CacheThrash,
        Self::Mleak,
        Self::Sh6,
        Self::Sh8,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Larson => "larson",
            Self::Xmalloc => "xmalloc",
            Self::Mstress => "mstress",
            Self::Rptest => "rptest",
            Self::AllocTest => "alloc-test",
            Self::CacheScratch => "cache-scratch",
            Self::CacheThrash => "cache-thrash",
            Self::Mleak => "mleak",
            Self::Sh6 => "sh6",
            Self::Sh8 => "sh8",
        }
    }

    /// Runs it once on one thread, or an even number. Returns the time from the first thread's start to the last
    /// one's end, and the allocations that failed.
    pub fn run<S: Shared>(self, shared: &S, threads: usize) -> (Duration, u64) {
        let boxes: Boxes<S> = (0..threads).map(|_| Mutex::default()).collect();
        if let Self::CacheScratch = self {
            // By one thread, so that they are neighbours.
            let mut first = Worker::new(shared, &boxes, 0);
            for place in &boxes {
                lock(place).extend(first.allocate(8));
            }
        }
        let ran = at_once(
            threads,
            |index| Worker::new(shared, &boxes, index),
            |_, worker| {
                self.work(worker);
                worker.clear();
                worker.failures
            },
        );
        for place in &boxes {
            for item in lock(place).drain(..) {
                free(shared, item);
            }
        }
        ran
    }

    fn work<S: Shared>(self, worker: &mut Worker<S>) {
        match self {
            Self::Larson => worker.larson(),
            Self::Xmalloc => worker.xmalloc(),
            Self::Mstress => worker.mstress(),
            Self::Rptest => worker.rptest(),
            Self::AllocTest => worker.alloc_test(),
            Self::CacheScratch | Self::CacheThrash => worker.cache(),
            Self::Mleak => worker.mleak(),
            Self::Sh6 => worker.sh(false),
            Self::Sh8 => worker.sh(true),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn free<S: Shared>(shared: &S, item: Item<S>) {
    // SAFETY: allocated with this layout, and owned here.
    unsafe { shared.free(item.0, item.1) };
}

fn write<S: Shared>(shared: &S, item: &Item<S>, times: usize) {
    if let Some(address) = shared.address(&item.0) {
        for _ in 0..times {
            // SAFETY: the first byte of the block, which has one, and which only its owner accesses.
            unsafe { address.as_ptr().write_volatile(1) };
        }
    }
}

/// A thread at work.
struct Worker<'a, S: Shared> {
    shared: &'a S,
    boxes: &'a Boxes<S>,
    index: usize,
    rng: Rng,
    own: Vec<Item<S>>,
    failures: u64,
}

impl<'a, S: Shared> Worker<'a, S> {
    fn new(shared: &'a S, boxes: &'a Boxes<S>, index: usize) -> Self {
        Self {
            shared,
            boxes,
            index,
            rng: Rng::with_seed(index as u64 + 1),
            own: Vec::with_capacity(10_000),
            failures: 0,
        }
    }

    fn allocate(&mut self, size: usize) -> Option<Item<S>> {
        let layout = Layout::from_size_align(size.max(1), 16).expect("a layout");
        let Some(block) = self.shared.allocate(layout) else {
            self.failures += 1;
            return None;
        };
        let item = Item(block, layout);
        write(self.shared, &item, 1);
        Some(item)
    }

    fn add(&mut self, size: usize) {
        let item = self.allocate(size);
        self.own.extend(item);
    }

    fn free(&self, item: Item<S>) {
        free(self.shared, item);
    }

    /// Frees one of its own blocks.
    fn free_any(&mut self) {
        if !self.own.is_empty() {
            let any = self.rng.usize(..self.own.len());
            let item = self.own.swap_remove(any);
            self.free(item);
        }
    }

    fn clear(&mut self) {
        for item in std::mem::take(&mut self.own) {
            self.free(item);
        }
    }

    /// Exchanges its blocks with those that lie in the box of another thread, `step` further.
    fn exchange(&mut self, step: usize) {
        let place = &self.boxes[(self.index + step) % self.boxes.len()];
        std::mem::swap(&mut *lock(place), &mut self.own);
    }

    fn larson(&mut self) {
        const SLOTS: usize = 1000;
        const ROUNDS: usize = 10;
        for round in 0..ROUNDS {
            for _ in 0..COUNT / ROUNDS {
                if self.own.len() >= SLOTS {
                    self.free_any();
                }
                let size = self.rng.usize(8..=1000);
                self.add(size);
            }
            self.exchange(round + 1);
        }
    }

    fn xmalloc(&mut self) {
        const BATCH: usize = 120;
        let threads = self.boxes.len();
        let place = &self.boxes[self.index / 2 * 2];
        if threads == 1 || self.index % 2 == 1 {
            return self.take_batches(place, BATCH);
        }
        let mut left = 2 * COUNT;
        while left > 0 {
            let mut batch = Vec::with_capacity(BATCH);
            while batch.len() < BATCH {
                let size = 8 << self.rng.u32(0..=6);
                batch.extend(self.allocate(size));
            }
            left -= BATCH;
            loop {
                let mut waiting = lock(place);
                if waiting.len() < 64 * BATCH {
                    waiting.append(&mut batch);
                    break;
                }
                drop(waiting);
                thread::yield_now();
            }
        }
    }

    /// Frees all blocks that the other thread puts there; alone, its own blocks.
    fn take_batches(&mut self, place: &Mutex<Vec<Item<S>>>, batch: usize) {
        let alone = self.boxes.len() == 1;
        let mut left = if alone { COUNT } else { 2 * COUNT };
        while left > 0 {
            if alone {
                for _ in 0..batch {
                    let size = 8 << self.rng.u32(0..=6);
                    self.add(size);
                }
                lock(place).append(&mut self.own);
            }
            let there = std::mem::take(&mut *lock(place));
            left = left.saturating_sub(there.len());
            if there.is_empty() {
                thread::yield_now();
            }
            for item in there {
                self.free(item);
            }
        }
    }

    fn mstress(&mut self) {
        for step in 0..COUNT {
            let scale = match self.rng.u32(..1000) {
                0 => 512,
                1..=10 => 64,
                11..=100 => 8,
                _ => 1,
            };
            let size = self.rng.usize(1..=16) * 8 * scale;
            self.add(size);
            match self.rng.u32(..16) {
                0..=7 => self.free_any(),
                8 => {
                    let any = self.rng.usize(..self.boxes.len());
                    let mut place = lock(&self.boxes[any]);
                    place.extend(self.own.pop());
                    if place.len() > 500 {
                        let old = self.rng.usize(..place.len());
                        let item = place.swap_remove(old);
                        drop(place);
                        self.free(item);
                    }
                }
                _ => {}
            }
            if step % 10_000 == 9999 {
                let kept = self.own.len() / 8;
                let gone = self.own.split_off(kept);
                gone.into_iter().for_each(|item| self.free(item));
            }
        }
    }

    fn rptest(&mut self) {
        const SLOTS: usize = 2000;
        for step in 0..COUNT {
            if self.own.len() >= SLOTS {
                let item = self.own.swap_remove(step * 7 % SLOTS);
                self.free(item);
            }
            // The larger the rarer, in a straight line.
            let size = self.rng.usize(16..=16_000).min(self.rng.usize(16..=16_000));
            self.add(size);
            if step % 4000 == 3999 {
                self.exchange(1);
            }
        }
    }

    fn alloc_test(&mut self) {
        const SLOTS: usize = 1 << 12;
        let mut slots: Vec<Option<Item<S>>> = (0..SLOTS).map(|_| None).collect();
        let mut left = COUNT;
        while left > 0 {
            let slot = &mut slots[self.rng.usize(..SLOTS)];
            if let Some(item) = slot.take() {
                free(self.shared, item);
                continue;
            }
            left -= 1;
            let most = 1 << self.rng.u32(4..=10);
            let size = self.rng.usize(1..=most);
            *slot = self.allocate(size);
        }
        self.own.extend(slots.into_iter().flatten());
    }

    fn cache(&mut self) {
        let first = std::mem::take(&mut *lock(&self.boxes[self.index]));
        first.into_iter().for_each(|item| self.free(item));
        for _ in 0..COUNT {
            if let Some(item) = self.allocate(8) {
                write(self.shared, &item, 50);
                self.free(item);
            }
        }
    }

    fn mleak(&mut self) {
        const EACH: usize = 1000;
        for generation in 0..COUNT / EACH {
            let (shared, boxes) = (self.shared, self.boxes);
            let left = thread::scope(|scope| {
                let thread = scope.spawn(move || {
                    let mut worker = Worker::new(shared, boxes, generation);
                    for _ in 0..EACH {
                        let size = worker.rng.usize(16..=512);
                        worker.add(size);
                    }
                    let left = worker.own.split_off(EACH / 2);
                    worker.clear();
                    (left, worker.failures)
                });
                thread.join().expect("no panic")
            });
            self.failures += left.1;
            left.0.into_iter().for_each(|item| self.free(item));
        }
    }

    fn sh(&mut self, random: bool) {
        const FULL: usize = 5000;
        let mut turn = 0;
        for step in 0..COUNT {
            let size = match random {
                true => self.rng.usize(1..=4000),
                false => 1 + step % 1000,
            };
            self.add(size);
            if self.own.len() < FULL {
                continue;
            }
            turn += 1;
            // Half of them: the oldest first, or the newest first.
            let gone: Vec<Item<S>> = match turn % 2 {
                0 => self.own.drain(..FULL / 2).collect(),
                _ => self.own.drain(FULL / 2..).rev().collect(),
            };
            gone.into_iter().for_each(|item| self.free(item));
            if random {
                self.exchange(turn);
            }
        }
    }
}
