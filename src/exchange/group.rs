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

pub use env::from_env;
pub use gather::{GatherOptions, gather_memory};
#[cfg(fuzzing)]
pub(crate) use rendezvous::fuzzing::receive_all;
pub use rendezvous::rendezvous;

use std::path::Path;

use ring::aead::{self, AES_256_GCM, Aad, LessSafeKey, Nonce};
use ring::{hkdf, hmac};
use zeroize::Zeroizing;

use crate::driver::{HandleType, random};
use crate::protocol::Secret;
use crate::share::{ImportedBuffer, Shared};
use crate::{Error, Result};

/// The most ranks of a group.
pub const MAX_RANKS: u32 = 1024;

/// The most bytes that a rank contributes to one gather.
pub const MAX_CONTRIBUTION: usize = 2 << 20;

/// Bytes of a secret: fewer could be guessed.
const LEAST_SECRET: usize = 16;
const MAX_SECRET: usize = 1024;
/// Bytes of the number that each rank draws.
const DRAWN: usize = 32;

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

/// A secret that the ranks of a group share: 16 to 1024 bytes that nobody else can guess.
///
/// A launcher makes one for each job, for example with `openssl rand -hex 32`, and passes it to all ranks in an
/// environment variable or a file. It is wiped when dropped, and never shown.
///
/// ```
/// use egmem::exchange::group::GroupSecret;
///
/// let secret = GroupSecret::new(b"0123456789abcdef0123456789abcdef")?;
/// assert_eq!(format!("{secret:?}"), "GroupSecret(redacted)");
/// assert!(GroupSecret::new(b"too short").is_err());
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone)]
pub struct GroupSecret(Zeroizing<Vec<u8>>);

impl GroupSecret {
    /// Creates a secret from these bytes. They should hold at least 128 random bits.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for fewer than 16 bytes or more than 1024.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        match bytes.len() {
            LEAST_SECRET..=MAX_SECRET => Ok(Self(Zeroizing::new(bytes.to_vec()))),
            count => {
                let why = format!("it has {count} bytes, not {LEAST_SECRET} to {MAX_SECRET}");
                Err(Error::invalid("group secret", why))
            }
        }
    }

    /// Reads the secret from a file, without a line break at the end.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) if the file cannot be read;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) as for [`new`](Self::new).
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let value = std::fs::read(path)
            .map(Zeroizing::new)
            .map_err(|error| Error::system(format!("reading {}", path.display()), &error))?;
        Self::new(value.trim_ascii_end())
    }

    /// Returns a proof that this process knows the secret, for a challenge and the rank that it claims. Comparing it takes
    /// constant time.
    pub(super) fn proof(&self, challenge: &[u8], rank: u32, size: u32) -> Option<Secret> {
        let [rank, size] = [rank, size].map(u32::to_be_bytes);
        let about = [b"egmem rendezvous 2", challenge, &rank, &size].concat();
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        Secret::new(hmac::sign(&key, &about).as_ref())
    }
}

opaque!(GroupSecret);

/// An all-gather over a transport that need not be trusted: each contribution is encrypted and authenticated (AES-256-GCM)
/// for its rank and its gather. Of those on the transport, a reader learns only the lengths, and a writer can only make
/// gathers fail.
///
/// The key comes from the secret and from a random number that each rank draws anew, so a contribution of an earlier job
/// with the same secret is refused.
#[derive(Debug)]
pub struct Sealed<G> {
    inner: G,
    key: LessSafeKey,
    /// The number of the next gather.
    round: u64,
}

impl<G: AllGather> Sealed<G> {
    /// Draws this rank's number, and gathers those of all ranks.
    ///
    /// # Errors
    /// Those of the transport; [`Error::AllGather`] if it does not return this rank's own bytes.
    pub fn new(mut inner: G, secret: &GroupSecret) -> Result<Self> {
        let drawn: [u8; DRAWN] =
            random().map_err(|error| Error::system("reading random bytes", &error))?;
        let all = inner.all_gather(&drawn)?;
        let own = inner.rank() as usize;
        let complete = all.len() == inner.size() as usize
            && all.iter().all(|one| one.len() == DRAWN)
            && all.get(own).is_some_and(|one| *one == drawn);
        if !complete {
            let why = "it did not return a number of each rank, and this rank's own";
            return Err(Error::all_gather(why));
        }
        let size = inner.size().to_be_bytes();
        let info: Vec<&[u8]> = std::iter::once(&size[..])
            .chain(all.iter().map(Vec::as_slice))
            .collect();
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"egmem group 1");
        let key = salt.extract(&secret.0);
        // HKDF fails only for keys of more than 255 blocks.
        let key = key.expand(&info, &AES_256_GCM).map(aead::UnboundKey::from);
        let key = key.map_err(|_| Error::all_gather("its key cannot be derived"))?;
        Ok(Self {
            inner,
            key: LessSafeKey::new(key),
            round: 0,
        })
    }
}

/// Returns the nonce and the associated data of a rank's contribution to a gather. Under one key, which this rank's number
/// makes new, each is used once.
fn position(rank: u32, round: u64) -> (Nonce, [u8; 12]) {
    let mut place = [0; 12];
    place[..4].copy_from_slice(&rank.to_be_bytes());
    place[4..].copy_from_slice(&round.to_be_bytes());
    (Nonce::assume_unique_for_key(place), place)
}

impl<G: AllGather> AllGather for Sealed<G> {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let round = self.round;
        // Before anything is sent: after an error no number is used again.
        self.round += 1;
        let mut sealed = Vec::with_capacity(own.len() + AES_256_GCM.tag_len());
        sealed.extend_from_slice(own);
        let (nonce, place) = position(self.rank(), round);
        (self.key)
            .seal_in_place_append_tag(nonce, Aad::from(place), &mut sealed)
            .map_err(|_| Error::all_gather("a contribution is too long"))?;
        let mut all = Zeroizing::new(self.inner.all_gather(&sealed)?);
        for (rank, bytes) in (0..).zip(&mut *all) {
            let (nonce, place) = position(rank, round);
            let opened = (self.key).open_in_place(nonce, Aad::from(place), bytes);
            let len = opened.map_err(|_| Error::Forged { rank })?.len();
            bytes.truncate(len);
        }
        Ok(std::mem::take(&mut *all))
    }
}
