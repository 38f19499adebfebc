//! New versions: written to the slots without readers, then made the current one.
//!
//! Readers in other processes, as their publisher sees them.
//!
//! ```text
//! control page of one reader        current  the newest epoch; the publisher's word
//!                                   in use   a word for each slot; the reader's words, not 0 while it has replicas of it
//!
//! reader     in use[slot] = 1; then: is `current` still an epoch of that slot? If not, 0 again, and once more
//! publisher  has set `current` to the other slot; then: is in use[slot] 0? Only then is the slot written
//! ```
//! Either the publisher sees the reader's word, or the reader sees the publisher's: both store first and look afterwards, in
//! one order for all (`SeqCst`). A page is of one reader, so the page goes with the reader that dies.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::Transfer;
use egmem_core::per_driver::lock;
use egmem_share::{Credentials, Link};

use super::version::Version;
use super::{Replicated, near};
use crate::memory::Memory;
use crate::{Buffer, Error, Result, Stream, counter};

/// How long a publisher rests before it looks again for readers: at first, and at most.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

type Copy = Transfer<(Arc<Buffer>, Arc<Buffer>)>;

impl<T: AnyBitPattern + NoUninit> Replicated<T> {
    /// Writes a new version to all copies and makes it the one that [`local`](Self::local) returns; returns its
    /// epoch.
    ///
    /// The call waits for other publishers and for the copies, not for readers. If it fails, readers go on with the
    /// version that they had.
    ///
    /// # Errors
    /// [`Error::StillHeld`] while the version before the newest has readers, and for ever once the driver does not
    /// report whether a copy has ended, because that copy may still write there; [`Error::InvalidArgument`] for
    /// another number of elements, and in a forked child; those of [`Stream::copy`](crate::Stream::copy).
    pub fn publish(&self, values: &[T]) -> Result<u64> {
        self.publish_within(values, Duration::ZERO)
    }

    /// As [`publish`](Self::publish), but waits up to `timeout` for the readers of the version before the newest; not
    /// for a copy whose end the driver does not report.
    ///
    /// A thread that holds a [`Replica`](super::Replica) of that version waits for itself in vain.
    ///
    /// # Errors
    /// As `publish`.
    pub fn publish_within(&self, values: &[T], timeout: Duration) -> Result<u64> {
        self.driver.expect_this_process("replicated data")?;
        if values.len() != self.len {
            let why = format!("{} elements", values.len());
            return Err(Error::invalid_of("values", why, self.len.to_string()));
        }
        let _publishing = lock(&self.publishing);
        let current = *lock(&self.current);
        let (old, spare) = (&self.versions[current], &self.versions[1 - current]);
        let slot = 1 - current;
        wait_for_readers(spare, (&self.readers, slot), timeout)?;
        self.write(spare, bytemuck::cast_slice(values))?;
        let epoch = old.epoch() + 1;
        spare.epoch.store(epoch, Relaxed);
        *lock(&self.current) = slot;
        self.readers.show(epoch);
        Ok(epoch)
    }

    /// Writes all copies of a version without readers.
    fn write(&self, version: &Version, bytes: &[u8]) -> Result<()> {
        let buffers = &version.buffers;
        let places = buffers.iter().zip(&self.streams);
        let on_hosts = places.filter(|(_, stream)| stream.is_none());
        let on_hosts: Vec<&Buffer> = on_hosts.map(|(buffer, _)| &**buffer).collect();
        near::write(&self.near.topology, &on_hosts, bytes)?;
        for wave in &self.waves {
            let staged = wave.iter().filter(|(_, from)| from.is_none());
            let staged: Vec<usize> = staged.map(|(to, _)| *to).collect();
            self.write_staged(version, &staged, bytes)?;
            let passed = wave
                .iter()
                .filter_map(|&(to, from)| Some((to, &buffers[from?])));
            self.copy_each(version, passed, (0, bytes.len() as u64))?;
        }
        Ok(())
    }

    /// Writes copies on GPUs through host memory, piece by piece.
    fn write_staged(&self, version: &Version, to: &[usize], bytes: &[u8]) -> Result<()> {
        let Some(staging) = self.staging.as_ref().filter(|_| !to.is_empty()) else {
            return Ok(());
        };
        let mut offset = 0;
        for piece in bytes.chunks(staging.len() as usize) {
            staging.write_at(0, piece)?;
            let len = piece.len() as u64;
            let copies = to.iter().map(|&to| (to, staging));
            self.copy_each(version, copies, (offset, len))?;
            offset += len;
        }
        Ok(())
    }

    /// Copies `len` bytes from the start of a buffer to `offset` in a place, for each pair of these, and waits for
    /// all copies that have begun, also where another one cannot be started.
    fn copy_each<'a>(
        &self,
        version: &Version,
        copies: impl Iterator<Item = (usize, &'a Arc<Buffer>)>,
        (offset, len): (u64, u64),
    ) -> Result<()> {
        let mut begun: Vec<Copy> = Vec::new();
        let mut result = Ok(());
        for (to, from) in copies {
            let place = (Arc::clone(&version.buffers[to]), offset);
            let why = "the CPU writes this place, which has no stream";
            let stream = self.streams[to].as_ref();
            let stream = stream.ok_or_else(|| Error::invalid("copy", why));
            let start = |stream: &Stream| stream.start_copy(place, (Arc::clone(from), 0), len);
            match stream.and_then(|stream| Ok(start(stream)?)) {
                Ok(copy) => begun.push(copy),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        for copy in begun {
            if let Err(failed) = copy.wait() {
                if failed.operands.is_none() {
                    version.is_lost.store(true, Relaxed);
                }
                result = result.and(Err(*failed.error));
            }
        }
        result
    }
}

/// Waits until a version has no readers. One that is lost is not waited for.
fn wait_for_readers(
    version: &Arc<Version>,
    (others, slot): (&Readers, usize),
    timeout: Duration,
) -> Result<()> {
    version.expect_not_lost()?;
    let start = Instant::now();
    let [mut pause, longest] = PAUSES;
    loop {
        let mut holders = version.holders()?;
        holders.extend(others.holders(slot));
        if holders.is_empty() {
            return Ok(());
        }
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Err(<Version>::still_held(holders));
        }
        std::thread::sleep(pause.min(left));
        pause = longest.min(2 * pause);
    }
}

/// The readers in other processes.
#[derive(Debug, Default)]
pub(super) struct Readers(pub(super) Mutex<Vec<Reader>>);

/// A reader's control page, as one of both ends has it: each word on a cache line of its own.
#[derive(Debug)]
pub(super) struct Control<M> {
    memory: M,
}

impl<M: Memory> Control<M> {
    /// The bytes of a page that mean something.
    pub(super) const BYTES: u64 = 512;

    /// Takes a page.
    ///
    /// # Safety
    /// The CPU may read and write the first [`BYTES`](Self::BYTES) of the memory while it lives, and nothing else in this
    /// process accesses them.
    pub(super) unsafe fn new(memory: M) -> Self {
        Self { memory }
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        let at = self.memory.device_ptr().add(offset);
        // SAFETY: a multiple of 8 within `BYTES` of memory that begins with a page; the rest is the promise of `new`.
        unsafe { counter(at) }
    }

    /// Returns the newest epoch's word.
    pub(super) fn current(&self) -> &AtomicU64 {
        self.word(0)
    }

    /// Returns the word that says whether the reader uses a slot.
    pub(super) fn in_use(&self, slot: usize) -> &AtomicU64 {
        self.word(128 * (1 + (slot as u64 & 1)))
    }
}

/// A reader in another process.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) control: Control<Arc<Buffer>>,
    pub(super) link: Link,
    pub(super) peer: Credentials,
}

impl Readers {
    /// Returns those that use a slot that is no longer the current one. Readers that have ended are forgotten.
    pub(super) fn holders(&self, slot: usize) -> Vec<String> {
        self.forget_ended();
        let all = lock(&self.0);
        // Behind the store of `current` by the publisher before.
        fence(SeqCst);
        let using = all.iter();
        let using = using.filter(|reader| reader.control.in_use(slot).load(SeqCst) != 0);
        using.map(|reader| reader.peer.to_string()).collect()
    }

    /// Gives back what readers that have ended had.
    pub(super) fn forget_ended(&self) {
        lock(&self.0).retain(|reader| !reader.link.is_cut());
    }

    /// Tells all readers the newest epoch, whose copies are written.
    pub(super) fn show(&self, epoch: u64) {
        for reader in &*lock(&self.0) {
            reader.control.current().store(epoch, SeqCst);
        }
    }
}
