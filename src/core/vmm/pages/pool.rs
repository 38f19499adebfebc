//! Threads that create pages on a node, while other threads register those that exist.
//!
//! A thread holds the pool and the job of its piece. The pages of a job stay mapped until it is done: the mapping that began
//! it waits before it unmaps them, and one that is forgotten stays mapped. Threads that find no work for [`LINGER`] end.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use super::place::{self, Unbound};
use crate::driver::{Driver, NodeId};
use crate::memory::ParallelCopy;
use crate::per_driver::lock;
use crate::topology::Topology;
use crate::{Error, Result};

/// Bytes that a thread creates at a time.
const PIECE: u64 = 4 << 20;
const STACK: usize = 256 << 10;

/// Between two chunks of one growth, threads are not worth starting again.
const LINGER: Duration = Duration::from_millis(200);

/// The threads for pages in one range of addresses, on one node.
#[derive(Debug, Default)]
pub(super) struct Pool {
    workers: OnceLock<Workers>,
    state: Mutex<State>,
    /// There is work, or the pool is closed.
    wake: Condvar,
    /// A thread is ready.
    started: Condvar,
}

/// The threads that create the pages. Kept for all chunks: the kernel's files that tell it take a good part of a chunk's time.
#[derive(Debug)]
struct Workers {
    threads: ParallelCopy,
    /// Whether the machine has one node, on which all pages are.
    is_only_node: bool,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Arc<Job>>,
    /// Threads that were started, and those of them that have not begun to work.
    threads: usize,
    starting: usize,
    closed: bool,
}

/// Pages that are being created.
#[derive(Debug)]
pub(super) struct Job {
    node: NodeId,
    range: Range<u64>,
    /// Whether they are a file's, or shared with children.
    shmem: bool,
    /// Whether the machine has one node, on which all pages are.
    is_only_node: bool,
    progress: Mutex<Progress>,
    done: Condvar,
}

#[derive(Debug)]
struct Progress {
    /// Where the next piece begins.
    next: u64,
    /// Bytes that do not exist yet, unless their piece has failed.
    left: u64,
    /// Why a thread created pages without a choice of the node; `None` if all chose it.
    unbound: Option<Unbound>,
    failed: Option<Error>,
}

impl Job {
    /// Returns the next piece, for the calling thread to create.
    fn claim(&self) -> Option<Range<u64>> {
        let mut progress = lock(&self.progress);
        let start = progress.next;
        let end = self.range.end.min(start + PIECE);
        progress.next = end;
        (start < end).then_some(start..end)
    }

    fn create(&self, piece: &Range<u64>, bound: Result<(), Unbound>) {
        let created = place::populate(self.node, piece, self.shmem);
        let mut progress = lock(&self.progress);
        progress.left -= piece.end - piece.start;
        progress.unbound = progress.unbound.or(bound.err());
        if let Err(error) = created {
            progress.failed.get_or_insert(error);
        }
        if progress.left == 0 {
            self.done.notify_all();
        }
    }

    /// Lets no further piece begin. Returns whether all pages exist or are being created.
    pub(super) fn cancel(&self) -> bool {
        let mut progress = lock(&self.progress);
        let rest = self.range.end - progress.next;
        progress.next = self.range.end;
        progress.left -= rest;
        rest == 0
    }

    /// Waits until all pages exist.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel refused to create some, or if they are on another node.
    pub(super) fn wait(&self) -> Result<()> {
        let mut progress = lock(&self.progress);
        while progress.left > 0 {
            let woken = self.done.wait(progress);
            progress = woken.unwrap_or_else(PoisonError::into_inner);
        }
        if progress.failed.is_none()
            && !self.is_only_node
            && let Some(why) = progress.unbound.take()
        {
            // In containers the call may be forbidden: the threads' CPUs decided then.
            progress.failed = place::expect_on(self.node, &self.range, why).err();
        }
        progress.failed.clone().map_or(Ok(()), Err)
    }
}

impl Pool {
    fn workers(&self, driver: &Driver, node: NodeId) -> Result<&Workers> {
        if let Some(known) = self.workers.get() {
            return Ok(known);
        }
        let topology = Topology::of(driver)?;
        let workers = Workers {
            threads: ParallelCopy::on(&topology, node)?,
            is_only_node: topology.nodes().len() == 1
                && topology.gpus().iter().all(|gpu| gpu.memory_node.is_none()),
        };
        Ok(self.workers.get_or_init(|| workers))
    }

    /// Starts the threads that `bytes` need, and does not wait for them: as many as the node has CPUs that this thread may
    /// use.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`]; those of the topology.
    pub(super) fn start(self: &Arc<Self>, driver: &Driver, node: NodeId, bytes: u64) -> Result<()> {
        let threads = &self.workers(driver, node)?.threads;
        self.start_missing(&mut lock(&self.state), (node, threads), bytes);
        Ok(())
    }

    fn start_missing(
        self: &Arc<Self>,
        state: &mut State,
        (node, threads): (NodeId, &ParallelCopy),
        bytes: u64,
    ) {
        let pieces = usize::try_from(bytes.div_ceil(PIECE)).unwrap_or(usize::MAX);
        let wanted = threads.most_threads().min(pieces);
        while state.threads < wanted && self.start_one(node, threads) {
            state.threads += 1;
            state.starting += 1;
        }
    }

    /// Begins to create the pages of a range, by as many threads as [`start`](Self::start) starts.
    ///
    /// # Errors
    /// As `start`.
    pub(super) fn begin(
        self: &Arc<Self>,
        driver: &Driver,
        node: NodeId,
        range: Range<u64>,
        shmem: bool,
    ) -> Result<Arc<Job>> {
        let bytes = range.end - range.start;
        let workers = self.workers(driver, node)?;
        let job = Arc::new(Job {
            node,
            shmem,
            is_only_node: workers.is_only_node,
            progress: Mutex::new(Progress {
                next: range.start,
                left: bytes,
                unbound: None,
                failed: None,
            }),
            done: Condvar::new(),
            range,
        });
        let mut state = lock(&self.state);
        // A thread that starts changes mappings, for which it would wait for those that create pages, and the driver,
        // which has its lock meanwhile, for that thread. Others may end meanwhile.
        loop {
            self.start_missing(&mut state, (node, &workers.threads), bytes);
            if state.starting == 0 {
                break;
            }
            let woken = self.started.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        state.jobs.push_back(Arc::clone(&job));
        let is_alone = state.threads == 0;
        drop(state);
        self.wake.notify_all();
        if is_alone {
            // The caller's own policy stays; where the pages are is looked at.
            while let Some(piece) = job.claim() {
                job.create(&piece, Err(Unbound::NoThread));
            }
        }
        Ok(job)
    }

    /// Starts a thread; returns whether the system let it.
    fn start_one(self: &Arc<Self>, node: NodeId, threads: &ParallelCopy) -> bool {
        let (pool, threads) = (Arc::clone(self), threads.clone());
        let builder = thread::Builder::new().name("egmem-pages".into());
        let started = builder.stack_size(STACK).spawn(move || {
            let _bound = threads.bind();
            let bound = place::bind_thread(node);
            lock(&pool.state).starting -= 1;
            pool.started.notify_all();
            while let Some((job, piece)) = pool.next() {
                job.create(&piece, bound);
            }
        });
        if let Err(error) = &started {
            tracing::debug!(%error, "a thread for pages cannot be started: fewer do the work");
        }
        started.is_ok()
    }

    /// Waits for a piece; `None` once there is none for [`LINGER`], or for ever.
    fn next(&self) -> Option<(Arc<Job>, Range<u64>)> {
        let mut state = lock(&self.state);
        let mut has_waited = false;
        loop {
            while let Some(job) = state.jobs.front() {
                if let Some(piece) = job.claim() {
                    return Some((Arc::clone(job), piece));
                }
                state.jobs.pop_front();
            }
            if state.closed || has_waited {
                state.threads -= 1;
                return None;
            }
            let woken = self.wake.wait_timeout(state, LINGER);
            let (woken, timeout) = woken.unwrap_or_else(PoisonError::into_inner);
            (state, has_waited) = (woken, timeout.timed_out());
        }
    }

    /// Ends the threads, which have no work left.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        self.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Addresses, Fork};
    use super::*;
    use crate::Machine;

    const MIB: u64 = 1 << 20;

    #[test]
    fn threads_that_were_started_early_create_the_pages_of_all_chunks() {
        let mut machine = Machine::gh200();
        // Its pages are on its only node, whatever an emulated kernel says of them.
        machine.gpus.clear();
        machine.nodes[0].distances.clear();
        let driver = Driver::simulated(machine).unwrap();
        let addresses = Addresses::reserve(24 * MIB, 2 * MIB, 0).unwrap();
        addresses.prepare(Fork::Zeros).unwrap();
        let (node, start) = (NodeId(0), addresses.start());
        let pool = addresses.pool(node);
        pool.start(&driver, node, 8 * MIB).unwrap();
        assert!(lock(&pool.state).threads > 0);
        let chunks = (0..3).map(|chunk| start + chunk * 8 * MIB);
        let begin = |at| pool.begin(&driver, node, at..at + 8 * MIB, false);
        let jobs: Vec<_> = chunks.map(|at| begin(at).unwrap()).collect();
        for job in jobs {
            job.wait().unwrap();
            assert_eq!(lock(&job.progress).left, 0);
            assert!(job.claim().is_none());
        }
    }

    #[test]
    fn pages_on_another_node_are_refused_with_the_reason_for_which_no_thread_chose_it() {
        for (why, word) in [
            (Unbound::NoThread, "RLIMIT_NPROC"),
            (Unbound::NotPermitted, "set_mempolicy"),
        ] {
            let addresses = Addresses::reserve(2 * MIB, 2 * MIB, 0).unwrap();
            addresses.prepare(Fork::Zeros).unwrap();
            let range = addresses.start()..addresses.start() + 2 * MIB;
            let job = Job {
                node: NodeId(99),
                range: range.clone(),
                shmem: false,
                is_only_node: false,
                progress: Mutex::new(Progress {
                    next: range.start,
                    left: 2 * MIB,
                    unbound: None,
                    failed: None,
                }),
                done: Condvar::new(),
            };
            let piece = job.claim().unwrap();
            job.create(&piece, Err(why));
            let error = job.wait().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
            assert_eq!(job.wait().unwrap_err().to_string(), error);
        }
    }
}
