//! Groups: the ranks of one job map each other's memory with one call.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use egmem::driver::NodeId;
//! use egmem::exchange::group;
//! use egmem::{Buffer, Driver};
//!
//! let driver = Driver::open()?;
//! let own = Buffer::on(NodeId(0)).bytes(1 << 30).shareable().allocate(&driver)?;
//! // Under torchrun, mpirun or srun, in a Kubernetes Job, or with EGMEM_RANK, EGMEM_SIZE and EGMEM_ADDRESS:
//! let mut ranks = group::from_env(Duration::from_secs(300))?;
//! let memory = group::gather_memory(&mut *ranks, Some(own.into()), &driver)?;
//! let next = memory.rank((memory.own_rank() + 1) % memory.size())?;
//! println!("{}", next.get::<u64>(0)?);
//! # Ok::<(), egmem::exchange::Error>(())
//! ```
//!
//! The ranks need an [`AllGather`]: the job's own (MPI, `torch.distributed`), or [`from_env`] and [`rendezvous`], which
//! make one over sockets. Through it they state what they can do, choose one handle type before any handle is made, and
//! exchange fabric handles. If all are on one machine, they exchange POSIX fds instead, over Unix sockets whose paths the
//! first gather carries. A rank that fails says why in the next gather, so that all fail alike.
//!
//! **Trust.** A fabric handle is good for every process that has it: whoever reads the transport can map the memory, and
//! whoever writes to it can replace a rank. [`Sealed`] encrypts and authenticates each contribution with a secret of the
//! ranks. [`rendezvous`] requires a secret over TCP. fds reach only processes of the same user.

mod env;
mod gather;
mod rendezvous;
mod seal;

pub use env::from_env;
pub use gather::{GatherOptions, gather_memory};
#[cfg(fuzzing)]
pub(crate) use rendezvous::receive_all;
pub use rendezvous::rendezvous;
pub use seal::{GroupSecret, Sealed};

use crate::driver::HandleType;
use crate::share::{ImportedBuffer, Shared};
use crate::{Error, Result};

/// The most ranks of a group.
pub const MAX_RANKS: u32 = 1024;

/// The most bytes that a rank contributes to one gather.
pub const MAX_CONTRIBUTION: usize = 2 << 20;

/// The ranks of a job, and a way to send bytes of each to all.
pub trait AllGather {
    /// Returns this process's rank: below [`size`](Self::size), another in each process.
    fn rank(&self) -> u32;

    /// Returns the number of ranks.
    fn size(&self) -> u32;

    /// Sends these bytes to all ranks, and returns those of all, in the order of ranks. All ranks call it equally often;
    /// they may give different numbers of bytes, at most [`MAX_CONTRIBUTION`].
    ///
    /// # Errors
    /// [`Error::AllGather`] if the transport fails, [`Error::RanksMissing`] if
    /// ranks did not come in time. A transport that waits forever for a dead rank makes [`gather_memory`] wait too.
    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>>;
}

impl<T: AllGather + ?Sized> AllGather for Box<T> {
    fn rank(&self) -> u32 {
        (**self).rank()
    }

    fn size(&self) -> u32 {
        (**self).size()
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        (**self).all_gather(own)
    }
}

/// The memory of all ranks of a group, mapped.
///
/// Dropping it unmaps the other ranks' memory, which takes as long as the driver needs. Other ranks may still have this
/// rank's memory mapped at that time, and a mapping keeps memory alive. To know that none has, let all ranks drop it and
/// then meet at a barrier of the job's own.
#[derive(Debug)]
pub struct GatheredMemory {
    // Unmapped before this rank's own memory is released.
    others: Vec<Option<ImportedBuffer>>,
    own: Option<Shared>,
    rank: u32,
    via: HandleType,
}

impl GatheredMemory {
    /// Returns this process's rank.
    pub const fn own_rank(&self) -> u32 {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        u32::try_from(self.others.len()).unwrap_or(u32::MAX)
    }

    /// Returns the handle type by which all ranks share their memory.
    pub const fn via(&self) -> HandleType {
        self.via
    }

    /// Returns this rank's own memory.
    pub const fn memory(&self) -> Option<&Shared> {
        self.own.as_ref()
    }

    /// Returns another rank's mapped memory.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist or contributed no memory, and for
    /// this process's own rank, whose memory is [`memory`](Self::memory).
    pub fn rank(&self, rank: u32) -> Result<&ImportedBuffer> {
        let why = match self.others.get(rank as usize) {
            Some(Some(memory)) => return Ok(memory),
            Some(None) if rank == self.rank => {
                format!("{rank} is this process's own: its memory is not mapped again")
            }
            Some(None) => format!("{rank} contributed no memory"),
            None => format!("it is {rank} of {} ranks", self.size()),
        };
        Err(Error::invalid("rank", why))
    }
}
