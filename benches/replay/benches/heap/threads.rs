//! Runs work on a contestant from several threads at once.

use std::alloc::Layout;
use std::io;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use crate::entrant::Entrant;
use crate::runner::{Facts, Runner, Slots, pairs};
use crate::sequence::Sequence;
use crate::suite::{self, Program};
use egmem_replay::contestants::{Room, Shared, SharedVisitor};

/// The work of the threads.
#[derive(Clone)]
pub enum Work {
    /// Each allocates and frees one block of `layout`, `count` times.
    Pairs {
        /// How many threads.
        threads: usize,
        /// The block.
        layout: Layout,
        /// How many times.
        count: u64,
    },
    /// The shape of UMF's benchmark "multithread": each allocates `count` blocks of `layout`, then frees
    /// them in that order.
    Batches {
        /// How many threads.
        threads: usize,
        /// The blocks.
        layout: Layout,
        /// How many.
        count: usize,
    },
    /// Each has a sequence of its own, all blocks aligned to the second.
    Events(Arc<[Sequence]>, usize),
    /// One allocates, the other frees: blocks go through a ring of 1024 places. Sizes in turn, aligned to
    /// the second.
    Pass {
        /// The sizes, in bytes.
        sizes: Arc<[u32]>,
        /// Their alignment.
        align: usize,
    },
    /// A program of mimalloc-bench.
    Suite {
        /// Which one.
        program: Program,
        /// How many threads.
        threads: usize,
    },
}

/// Places between the thread that allocates and the one that frees.
const RING: usize = 1024;

impl Work {
    /// The divisor of a pass's time: pairs or blocks of all threads together, or allocations and frees of all
    /// threads.
    pub fn operations(&self) -> u64 {
        match self {
            Self::Pairs { threads, count, .. } => *threads as u64 * count,
            Self::Batches { threads, count, .. } => (threads * count) as u64,
            Self::Events(sequences, _) => sequences.iter().map(|one| one.timed.len() as u64).sum(),
            Self::Pass { sizes, .. } => sizes.len() as u64,
            Self::Suite { threads, .. } => (threads * suite::COUNT) as u64,
        }
    }

    /// Room in plenty.
    pub fn room(&self) -> Room {
        let (bytes, blocks, align) = match self {
            Self::Pairs {
                threads, layout, ..
            } => (threads * layout.size(), *threads, layout.align()),
            Self::Batches {
                threads,
                layout,
                count,
            } => (
                threads * count * layout.pad_to_align().size(),
                threads * count,
                layout.align(),
            ),
            Self::Events(sequences, align) => (
                sequences.iter().map(|one| one.peak as usize).sum(),
                sequences.iter().map(|one| one.blocks as usize).sum(),
                *align,
            ),
            Self::Pass { sizes, align } => {
                let most = sizes.iter().copied().max().unwrap_or(0) as usize;
                ((RING + 2) * most, RING + 2, *align)
            }
            // No thread has more than 10 000 blocks, and their mean is 8 KiB at most.
            Self::Suite { threads, .. } => (threads * 10_000 * (8 << 10), threads * 10_000, 16),
        };
        Room {
            capacity: 2 * bytes as u64 + (256 << 20),
            blocks: blocks as u32 + 16,
            align: align as u64,
        }
    }
}

/// Makes a contestant for `work`.
///
/// # Errors
/// If the contestant cannot be made.
pub fn start(kind: Entrant, room: Room, work: &Work) -> io::Result<Box<dyn Runner>> {
    kind.with_shared(room, Start(work.clone()))
}

struct Start(Work);

impl SharedVisitor for Start {
    type Output = Box<dyn Runner>;

    fn visit<S: Shared + Send + 'static>(self, contestant: S) -> Box<dyn Runner> {
        Box::new(Threads {
            contestant,
            work: self.0,
        })
    }
}

struct Threads<S> {
    contestant: S,
    work: Work,
}

/// A contestant by reference is one too: each thread has its reference.
pub struct Borrowed<'a, S>(pub &'a S);

impl<S: Shared> Shared for Borrowed<'_, S> {
    type Block = S::Block;

    #[inline]
    fn allocate(&self, layout: Layout) -> Option<S::Block> {
        Shared::allocate(self.0, layout)
    }

    #[inline]
    unsafe fn free(&self, block: S::Block, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { Shared::free(self.0, block, layout) }
    }

    fn start(&self, block: &S::Block) -> u64 {
        Shared::start(self.0, block)
    }
}

/// Runs `ready` on each of `threads` threads, then `work` on all at once with the results. Returns the time from the
/// first start to the last end, and the failures of all.
pub fn at_once<R, W>(threads: usize, ready: impl Fn(usize) -> R + Sync, work: W) -> (Duration, u64)
where
    W: Fn(usize, &mut R) -> u64 + Sync,
{
    let barrier = Barrier::new(threads);
    let times: Vec<(Instant, Instant, u64)> = thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|index| {
                let (barrier, ready, work) = (&barrier, &ready, &work);
                scope.spawn(move || {
                    let mut its = ready(index);
                    barrier.wait();
                    let started = Instant::now();
                    let failures = work(index, &mut its);
                    let ended = Instant::now();
                    // No thread cleans up while another is still timed.
                    barrier.wait();
                    (started, ended, failures)
                })
            })
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("no panic");
        all.into_iter().map(join).collect()
    });
    let first = times.iter().map(|time| time.0).min();
    let last = times.iter().map(|time| time.1).max();
    let elapsed = first.zip(last).map(|(first, last)| last - first);
    (
        elapsed.unwrap_or_default(),
        times.iter().map(|time| time.2).sum(),
    )
}

impl<S: Shared> Threads<S> {
    fn run(&self) -> (Duration, u64) {
        match &self.work {
            Work::Pairs {
                threads,
                layout,
                count,
            } => at_once(
                *threads,
                |_| {
                    let mut its = Borrowed(&self.contestant);
                    pairs(&mut its, *layout, count / 10);
                    its
                },
                |_, its| {
                    pairs(its, *layout, *count);
                    0
                },
            ),
            Work::Batches {
                threads,
                layout,
                count,
            } => at_once(
                *threads,
                |_| Vec::with_capacity(*count),
                |_, blocks| {
                    blocks.extend((0..*count).map(|_| self.contestant.allocate(*layout)));
                    let mut failures = 0;
                    for block in blocks.drain(..) {
                        match block {
                            // SAFETY: allocated above with this layout.
                            Some(block) => unsafe { self.contestant.free(block, *layout) },
                            None => failures += 1,
                        }
                    }
                    failures
                },
            ),
            Work::Events(sequences, align) => at_once(
                sequences.len(),
                |index| {
                    let mut its = Borrowed(&self.contestant);
                    let mut slots = Tidy {
                        slots: Slots::new(sequences[index].slots, *align),
                        after: &sequences[index],
                        contestant: &self.contestant,
                    };
                    slots.slots.run(&mut its, &sequences[index].before);
                    (its, slots)
                },
                |index, (its, slots)| slots.slots.run(its, &sequences[index].timed),
            ),
            Work::Pass { sizes, align } => self.pass(sizes, *align),
            Work::Suite { program, threads } => program.run(&self.contestant, *threads),
        }
    }

    /// One allocates, the other frees.
    fn pass(&self, sizes: &[u32], align: usize) -> (Duration, u64) {
        let (sender, receiver) = rtrb::RingBuffer::<(S::Block, Layout)>::new(RING);
        let ends = std::sync::Mutex::new((Some(sender), Some(receiver)));
        let take = || ends.lock().expect("no panic");
        at_once(
            2,
            |index| match index {
                0 => (take().0.take(), None),
                _ => (None, take().1.take()),
            },
            |_, ends| {
                let mut failures = 0;
                match ends {
                    (Some(sender), _) => {
                        for &size in sizes {
                            let layout = Layout::from_size_align(size as usize, align);
                            let layout = layout.expect("a layout");
                            let Some(block) = self.contestant.allocate(layout) else {
                                failures += 1;
                                continue;
                            };
                            let mut item = (block, layout);
                            let mut turns = 0;
                            while let Err(rtrb::PushError::Full(back)) = sender.push(item) {
                                item = back;
                                wait(&mut turns);
                            }
                        }
                        // Its end goes: the other one's sign to stop.
                        ends.0 = None;
                    }
                    (None, Some(receiver)) => {
                        let mut turns = 0;
                        loop {
                            match receiver.pop() {
                                Ok((block, layout)) => {
                                    turns = 0;
                                    // SAFETY: allocated by the other thread with this layout.
                                    unsafe { self.contestant.free(block, layout) };
                                }
                                Err(_) if receiver.is_abandoned() && receiver.is_empty() => break,
                                Err(_) => wait(&mut turns),
                            }
                        }
                    }
                    (None, None) => {}
                }
                failures
            },
        )
    }
}

/// Waits a moment: spins first, then lets others run.
fn wait(turns: &mut u32) {
    *turns += 1;
    if *turns < 64 {
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

/// Frees the live blocks of a sequence when its thread is done.
struct Tidy<'a, S: Shared> {
    slots: Slots<S::Block>,
    after: &'a Sequence,
    contestant: &'a S,
}

impl<S: Shared> Drop for Tidy<'_, S> {
    fn drop(&mut self) {
        self.slots
            .run(&mut Borrowed(self.contestant), &self.after.after);
    }
}

impl<S: Shared> Runner for Threads<S> {
    fn look(&mut self) -> Facts {
        Facts {
            failures: self.run().1,
            span: 0,
        }
    }

    fn time(&mut self) -> Duration {
        self.run().0
    }
}
