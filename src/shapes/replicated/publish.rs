//! New versions: written to the slots without readers, then made the current one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::Transfer;
use egmem_core::per_driver::lock;

use super::Replicated;
use super::near;
use super::readers::Readers;
use super::version::Version;
use crate::{Buffer, Error, Result};

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
        spare.set_epoch(epoch);
        *lock(&self.current) = slot;
        self.readers.show(epoch);
        Ok(epoch)
    }

    /// Writes all copies of a version without readers.
    fn write(&self, version: &Version, bytes: &[u8]) -> Result<()> {
        let buffers = version.buffers();
        let places = buffers.iter().zip(&self.streams);
        let on_hosts = places.filter(|(_, stream)| stream.is_none());
        let on_hosts: Vec<&Buffer> = on_hosts.map(|(buffer, _)| &**buffer).collect();
        near::write(self.near.topology(), &on_hosts, bytes)?;
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
        let mut begun = Vec::new();
        let mut result = Ok(());
        for (to, from) in copies {
            match self.start(version.buffers(), to, from, (offset, len)) {
                Ok(copy) => begun.push(copy),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        result.and(finish(version, begun))
    }

    /// Submits a copy of the first `len` bytes to `offset` in a place.
    fn start(
        &self,
        buffers: &[Arc<Buffer>],
        to: usize,
        from: &Arc<Buffer>,
        (offset, len): (u64, u64),
    ) -> Result<Copy> {
        let Some(stream) = &self.streams[to] else {
            return Err(Error::invalid(
                "copy",
                "the CPU writes this place, which has no stream",
            ));
        };
        let to = (Arc::clone(&buffers[to]), offset);
        Ok(stream.start_copy(to, (Arc::clone(from), 0), len)?)
    }
}

/// Waits for all of the copies, also after one has failed.
fn finish(version: &Version, copies: Vec<Copy>) -> Result<()> {
    let mut result = Ok(());
    for copy in copies {
        if let Err(failed) = copy.wait() {
            if failed.operands.is_none() {
                version.lose();
            }
            result = result.and(Err(*failed.error));
        }
    }
    result
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
