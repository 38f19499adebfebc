//! Replays a trace by as many threads as its log has: each does its own events in their order, and waits
//! where it frees a block that another thread has not allocated yet.
//!
//! In the log's order over all threads no thread waits for a later event, so every wait ends.
//! Events of different threads may come in another order than in the log, and so more bytes may live at
//! once than in it.

use std::alloc::Layout;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use egmem::{Error, Result};

use super::play::Script;
use egmem_replay::contestants::Shared;

/// Threads at most: if one could not be started, the others would wait for it.
const MOST: usize = 256;

/// The work of each thread, made once for a trace.
pub struct Cast {
    threads: Vec<Vec<Step>>,
    /// How many blocks one thread frees and another allocated.
    handed: usize,
    /// How many blocks a thread holds by itself at most.
    own: Vec<usize>,
}

#[derive(Clone, Copy)]
struct Step {
    layout: Layout,
    at: At,
    frees: bool,
}

/// Where a block is kept.
#[derive(Clone, Copy)]
enum At {
    /// By the thread that both allocates and frees it.
    Own(u32),
    /// Between two threads.
    Handed(u32),
}

impl Cast {
    /// Gives every thread its steps.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a log of more threads than [`MOST`].
    pub fn new(script: &Script) -> Result<Self> {
        let trace = script.trace;
        if trace.threads.len() > MOST {
            let why = format!("{} threads are more than {MOST}", trace.threads.len());
            return Err(Error::invalid("trace", why));
        }
        let blocks = trace.events.iter().filter(|event| !event.frees).count();
        let mut makers = vec![0; blocks];
        let mut handed = vec![None; blocks];
        let mut count = 0;
        for event in &trace.events {
            let block = event.block as usize;
            if !event.frees {
                makers[block] = event.thread;
            } else if makers[block] != event.thread {
                handed[block] = Some(count);
                count += 1;
            }
        }
        let mut cast = Self {
            threads: vec![Vec::new(); trace.threads.len()],
            handed: count as usize,
            own: vec![0; trace.threads.len()],
        };
        let mut spare: Vec<Vec<u32>> = vec![Vec::new(); trace.threads.len()];
        let mut places = vec![0; blocks];
        for (event, &layout) in trace.events.iter().zip(&script.layouts) {
            let (block, thread) = (event.block as usize, event.thread as usize);
            let at = match handed[block] {
                Some(index) => At::Handed(index),
                None => {
                    if event.frees {
                        spare[thread].push(places[block]);
                    } else {
                        places[block] = spare[thread].pop().unwrap_or_else(|| {
                            cast.own[thread] += 1;
                            cast.own[thread] as u32 - 1
                        });
                    }
                    At::Own(places[block])
                }
            };
            cast.threads[thread].push(Step {
                layout,
                at,
                frees: event.frees,
            });
        }
        Ok(cast)
    }

    /// Replays once; from the first thread's start to the last one's end.
    ///
    /// # Panics
    /// If the allocator does.
    pub fn time<S: Shared>(&self, shared: &S) -> Duration {
        let desks: Vec<Mutex<Desk<S::Block>>> =
            (0..self.handed).map(|_| Mutex::new(Desk::Empty)).collect();
        let barrier = Barrier::new(self.threads.len());
        let broken = AtomicBool::new(false);
        let times: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
            let run = |steps, own| {
                let (desks, barrier, broken) = (&desks, &barrier, &broken);
                scope.spawn(move || {
                    let _alarm = Alarm(broken);
                    play(shared, steps, own, desks, barrier, broken)
                })
            };
            let threads = self.threads.iter().zip(&self.own);
            let threads: Vec<_> = threads.map(|(steps, &own)| run(steps, own)).collect();
            let join = |thread: std::thread::ScopedJoinHandle<_>| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        // Nothing is left on the desks: a block gets one only for a thread that frees it.
        let begun = times.iter().map(|&(begun, _)| begun).min();
        let ended = times.iter().map(|&(_, ended)| ended).max();
        begun
            .zip(ended)
            .map_or(Duration::ZERO, |(begun, ended)| ended - begun)
    }
}

/// Where one thread lays a block down for another.
enum Desk<B> {
    Empty,
    Full(B),
    /// There was no room for the block.
    Refused,
}

fn take<B>(desk: &Mutex<Desk<B>>) -> Desk<B> {
    let mut desk = desk.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::replace(&mut desk, Desk::Empty)
}

/// Tells the others of a panic, because they would wait for ever.
struct Alarm<'a>(&'a AtomicBool);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

fn play<S: Shared>(
    shared: &S,
    steps: &[Step],
    own: usize,
    desks: &[Mutex<Desk<S::Block>>],
    barrier: &Barrier,
    broken: &AtomicBool,
) -> (Instant, Instant) {
    let mut own: Vec<Option<S::Block>> = (0..own).map(|_| None).collect();
    barrier.wait();
    let begun = Instant::now();
    for step in steps {
        let block = match (step.at, step.frees) {
            (At::Own(index), false) => {
                own[index as usize] = shared.allocate(step.layout);
                continue;
            }
            (At::Handed(index), false) => {
                let block = shared.allocate(step.layout);
                let desk = &desks[index as usize];
                *desk.lock().unwrap_or_else(PoisonError::into_inner) =
                    block.map_or(Desk::Refused, Desk::Full);
                continue;
            }
            (At::Own(index), true) => own[index as usize].take(),
            (At::Handed(index), true) => wait(&desks[index as usize], broken),
        };
        if let Some(block) = block {
            // SAFETY: this contestant made it with this layout, and it left its place.
            unsafe { shared.free(block, step.layout) };
        }
    }
    let ended = Instant::now();
    for step in steps.iter().rev() {
        if let At::Own(index) = step.at
            && let Some(block) = own[index as usize].take()
        {
            // SAFETY: this contestant made it, and the last step at this place had this layout.
            unsafe { shared.free(block, step.layout) };
        }
    }
    (begun, ended)
}

/// The block, once it is there; none if there was no room for it, or another thread has panicked.
fn wait<B>(desk: &Mutex<Desk<B>>, broken: &AtomicBool) -> Option<B> {
    let mut turns = 0;
    loop {
        match take(desk) {
            Desk::Full(block) => return Some(block),
            Desk::Refused => return None,
            Desk::Empty if broken.load(Ordering::Relaxed) => return None,
            Desk::Empty if turns < 64 => std::hint::spin_loop(),
            Desk::Empty => std::thread::yield_now(),
        }
        turns += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::generate::{Shape, generate};
    use crate::read::{Reading, read};

    /// Numbers its blocks and remembers those that are out.
    #[derive(Default)]
    struct Book {
        out: Mutex<(u64, HashSet<u64>)>,
        most: Option<usize>,
        panics: Option<usize>,
    }

    impl Shared for Book {
        type Block = (u64, Layout);
        fn allocate(&self, layout: Layout) -> Option<Self::Block> {
            assert_ne!(self.panics, Some(layout.size()), "on purpose");
            if self.most.is_some_and(|most| layout.size() > most) {
                return None;
            }
            let mut out = self.out.lock().unwrap();
            out.0 += 1;
            let number = out.0;
            out.1.insert(number);
            Some((number, layout))
        }
        unsafe fn free(&self, block: Self::Block, layout: Layout) {
            assert_eq!(block.1, layout, "freed with another layout");
            assert!(self.out.lock().unwrap().1.remove(&block.0));
        }
        fn start(&self, block: &Self::Block) -> u64 {
            block.0
        }
    }

    #[test]
    fn every_block_is_freed_once_whoever_frees_it() {
        for (shape, threads) in [
            (Shape::KvCache, 2),
            (Shape::Dataframe, 4),
            (Shape::Training, 2),
        ] {
            let text = generate(shape, 3, 3000);
            // Cut off, so that some live on at the end, in both kinds of places.
            let text: String = text
                .lines()
                .take(2000)
                .map(|line| format!("{line}\n"))
                .collect();
            let trace = read(text.as_bytes(), Reading::default()).unwrap();
            let script = Script::new(&trace, 256).unwrap();
            let cast = Cast::new(&script).unwrap();
            assert_eq!(cast.threads.len(), threads);
            assert!(cast.handed > 0, "{shape:?}");
            for most in [None, Some(1 << 20)] {
                let book = Book {
                    most,
                    ..Book::default()
                };
                cast.time(&book);
                let out = book.out.lock().unwrap();
                let small = |size: u64| most.is_none_or(|most| size <= most as u64);
                let events = trace.events.iter();
                let made = events
                    .filter(|event| !event.frees && small(event.size))
                    .count();
                assert_eq!((out.0, out.1.len()), (made as u64, 0), "{shape:?} {most:?}");
            }
        }
    }

    #[test]
    fn a_panic_in_one_thread_ends_the_others() {
        let log = "1,,allocate,0x1,7,0\n2,,free,0x1,7,0\n";
        let trace = read(log.as_bytes(), Reading::default()).unwrap();
        let script = Script::new(&trace, 1).unwrap();
        let book = Book {
            panics: Some(7),
            ..Book::default()
        };
        let cast = Cast::new(&script).unwrap();
        let time = std::panic::AssertUnwindSafe(|| cast.time(&book));
        assert!(std::panic::catch_unwind(time).is_err());
    }
}
