//! Copies large memory with several threads.

#[cfg(test)]
mod tests;

use std::mem;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Mutex;
use std::thread;

use bytemuck::{AnyBitPattern, NoUninit};

use super::{CpuView, Memory};
use crate::driver::{Location, NodeId};
use crate::per_driver::lock;
use crate::topology::{CpuSet, ThreadBinding, Topology};
use crate::{Error, Result};

/// One thread per this many bytes: starting a thread takes about a hundredth of the time of copying them.
const BYTES_PER_THREAD: u64 = 8 << 20;
/// The smallest piece that a thread takes at a time; pieces are multiples of it. Fast threads take more
/// pieces.
const LEAST_PIECE: u64 = 2 << 20;
const MOST_PIECE: u64 = 16 << 20;
/// The stack of a copying thread, in bytes; it needs little.
const STACK: usize = 256 << 10;
/// Pieces for each thread, within those limits.
const PIECES_PER_THREAD: usize = 4;

/// Copies and fills by several threads, near the memory's node.
///
/// The calling thread and up to [`threads`](Self::threads) - 1 others share the work: each thread takes the
/// next piece when it has finished one. The other threads start and end within the call. The calling thread
/// copies less than 16 MiB by itself, like [`CpuView`]'s own methods.
///
/// The guarantees for [concurrent writers](CpuView#concurrent-writers) are those of the view: no word is
/// split between two threads.
///
/// If the system refuses to start a thread, the running threads do its work; if it refuses to bind them to
/// the node's CPUs, they run unbound. Both are logged at the level `debug`.
///
/// ```
/// use egmem::memory::ParallelCopy;
/// use egmem::{Buffer, Driver, Machine, Topology};
///
/// let driver = Driver::simulated(Machine::gh200())?;
/// let topology = Topology::discover(&driver)?;
/// let buffer = Buffer::near(&driver, 0, 64 << 20)?;
/// let weights = vec![0.5_f32; 16 << 20];
/// ParallelCopy::near(&topology, &buffer)?.write_at(buffer.cpu()?, 0, &weights)?;
/// assert_eq!(buffer.get::<f32>(buffer.len() - 4)?, 0.5);
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "options do nothing by themselves"]
pub struct ParallelCopy {
    threads: usize,
    /// The CPUs to bind the threads to; empty: none.
    cpus: CpuSet,
    /// The stack of a thread, in bytes.
    stack: usize,
}

impl Default for ParallelCopy {
    fn default() -> Self {
        Self::new()
    }
}

impl ParallelCopy {
    /// Uses as many threads as the process may run at once
    /// ([`available_parallelism`](thread::available_parallelism)), not bound to CPUs.
    pub fn new() -> Self {
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            threads,
            cpus: CpuSet::default(),
            stack: STACK,
        }
    }

    /// Uses as many threads as `node` has CPUs that the calling thread may use, bound to them, and at most as
    /// many as [`new`](Self::new). The calling thread is bound until a copy of several threads returns. If there are no
    /// such CPUs, or the topology is simulated or of another machine, this is `new`.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`].
    pub fn on(topology: &Topology, node: NodeId) -> Result<Self> {
        let cpus = topology.usable_cpus(node)?;
        let any = Self::new();
        let threads = match cpus.len() {
            0 => any.threads,
            count => count.min(any.threads),
        };
        Ok(Self {
            threads,
            cpus,
            ..any
        })
    }

    /// As [`on`](Self::on), for the node that `memory` lies on; [`new`](Self::new) for memory on no known
    /// host node. For memory on several nodes, the first part counts.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`] if the topology is of another machine than the memory.
    pub fn near(topology: &Topology, memory: &impl Memory) -> Result<Self> {
        match memory.location() {
            Location::HostNuma(node) => Self::on(topology, NodeId(node)),
            _ => Ok(Self::new()),
        }
    }

    /// Sets the most threads, including the calling one: 1 or more.
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Copies `values` to `offset` bytes from the start of `view`.
    ///
    /// # Errors
    /// Those of [`CpuView::write_at`], before anything is written; [`Error::InvalidArgument`] for 0 threads.
    pub fn write_at<T: NoUninit>(
        &self,
        view: CpuView<'_>,
        offset: u64,
        values: &[T],
    ) -> Result<()> {
        let from: &[u8] = bytemuck::cast_slice(values);
        let to = writable(view, offset, from.len() as u64)?;
        self.run(self.cut(&to)?, |piece| {
            to.write_at(piece.start, &from[piece.start as usize..piece.end as usize])
        })
    }

    /// Copies from `offset` bytes from the start of `view` into `values`.
    ///
    /// # Errors
    /// Those of [`CpuView::read_at`], before anything is read; [`Error::InvalidArgument`] for 0 threads.
    pub fn read_at<T: AnyBitPattern + NoUninit>(
        &self,
        view: CpuView<'_>,
        offset: u64,
        values: &mut [T],
    ) -> Result<()> {
        let to: &mut [u8] = bytemuck::cast_slice_mut(values);
        let from = view.slice(offset, to.len() as u64)?;
        let (threads, pieces) = self.cut(&from)?;
        let mut rest = to;
        let pieces = pieces.map(move |piece| {
            let (to, behind) =
                mem::take(&mut rest).split_at_mut((piece.end - piece.start) as usize);
            rest = behind;
            (piece.start, to)
        });
        self.run((threads, pieces), |(at, to)| from.read_at(at, to))
    }

    /// Sets `len` bytes of `view` from `offset` on to `byte`.
    ///
    /// # Errors
    /// Those of [`CpuView::fill`], before anything is written; [`Error::InvalidArgument`] for 0 threads.
    pub fn fill(&self, view: CpuView<'_>, offset: u64, len: u64, byte: u8) -> Result<()> {
        let to = writable(view, offset, len)?;
        self.run(self.cut(&to)?, |piece| {
            to.fill(piece.start, piece.end - piece.start, byte)
        })
    }

    /// Returns the most threads, including the calling one.
    pub(crate) const fn most_threads(&self) -> usize {
        self.threads
    }

    /// Cuts a range into pieces: a first one that ends at a multiple of [`LEAST_PIECE`], and then pieces of one size; the last
    /// is smaller. One thread gets all of it as one piece.
    fn cut(
        &self,
        view: &CpuView<'_>,
    ) -> Result<(usize, impl Iterator<Item = Range<u64>> + Send + use<>)> {
        if self.threads == 0 {
            let why = "0 threads cannot copy: ask for 1 or more";
            return Err(Error::invalid("threads", why));
        }
        let len = view.len();
        let threads = self.threads.min(useful_threads(len));
        let share = len / (threads * PIECES_PER_THREAD) as u64;
        let piece = share.clamp(LEAST_PIECE, MOST_PIECE) & !(LEAST_PIECE - 1);
        let first = match threads {
            1 => len,
            // At most two pieces, and the range has more than that.
            _ => piece - view.as_ptr() as u64 % LEAST_PIECE,
        };
        let rest = (first..len).step_by(piece as usize);
        let rest = rest.map(move |start| start..len.min(start + piece));
        Ok((threads, std::iter::once(0..first).chain(rest)))
    }

    fn run<P>(
        &self,
        (threads, pieces): (usize, impl Iterator<Item = P> + Send),
        work: impl Fn(P) -> Result<()> + Sync,
    ) -> Result<()> {
        // The calling thread too: pages that it touches first lie on its node. The others start with its CPUs.
        let _bound = (threads > 1).then(|| self.bind());
        run((threads, self.stack), pieces, work)
    }

    /// Binds the calling thread to the CPUs.
    pub(crate) fn bind(&self) -> Option<ThreadBinding> {
        if self.cpus.is_empty() {
            return None;
        }
        ThreadBinding::to(&self.cpus)
            .inspect_err(|error| tracing::debug!(%error, "the threads of a copy work unbound"))
            .ok()
    }
}

/// Calls `work` with each of `pieces`, which have `bytes` bytes in all: by the calling thread, and for 16 MiB or more by others too, in all
/// one for each 8 MiB, and no more than `most` and than the process may run at once. Each takes the next piece when it has finished one; the
/// others start and end within the call. After an error a thread takes no further piece.
///
/// # Errors
/// One of `work`'s.
///
/// # Panics
/// If `work` does.
pub fn in_threads<P, E: Send>(
    (bytes, most): (u64, usize),
    pieces: impl Iterator<Item = P> + Send,
    work: impl Fn(P) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let threads = match useful_threads(bytes).min(most) {
        // The question takes longer than the work may.
        0 | 1 => 1,
        useful => useful.min(ParallelCopy::new().threads),
    };
    run((threads, STACK), pieces, work)
}

fn useful_threads(bytes: u64) -> usize {
    let useful = usize::try_from(bytes / BYTES_PER_THREAD);
    useful.unwrap_or(usize::MAX).max(1)
}

/// Does the work on all pieces, by threads with some bytes of stack, and returns when it is done.
fn run<P, E: Send>(
    (threads, stack): (usize, usize),
    mut pieces: impl Iterator<Item = P> + Send,
    work: impl Fn(P) -> Result<(), E> + Sync,
) -> Result<(), E> {
    if threads == 1 {
        return pieces.try_for_each(work);
    }
    let pieces = Mutex::new(pieces);
    let result = Mutex::new(Ok(()));
    let work_off = || {
        loop {
            // A separate statement, so that the lock is not held while this thread works.
            let Some(piece) = lock(&pieces).next() else {
                return;
            };
            if let Err(error) = work(piece) {
                *lock(&result) = Err(error);
                return;
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            let builder = thread::Builder::new().name("egmem-copy".into());
            let started = builder.stack_size(stack).spawn_scoped(scope, work_off);
            if let Err(error) = started {
                tracing::debug!(%error, "a thread for a copy cannot be started: fewer do the work");
                break;
            }
        }
        work_off();
    });
    result
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns a part of a view, which the CPU may write.
fn writable(view: CpuView<'_>, offset: u64, len: u64) -> Result<CpuView<'_>> {
    let part = view.slice(offset, len)?;
    // An empty write fails unless the view is writable.
    part.write_at::<u8>(0, &[])?;
    Ok(part)
}
