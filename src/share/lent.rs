//! Lends allocations of pools, and events, over a channel. What the lender frees last, it frees after every borrower.

use std::io::{self, PipeReader};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::fd::{self, posix};
use super::frame::{Body, Pointer};
use super::{BootId, Channel, Credentials};
use crate::driver::{HandleType, IpcEventHandle, PoolPtrExport, ShareableHandle};
use crate::error::failed;
use crate::fork::PerProcess;
use crate::per_driver::lock;
use crate::pool::{ImportedPool, ImportedPoolBuffer};
use crate::{Driver, Event, MemoryError, MemoryResult, Pool, PoolBuffer, Result, Stream};

/// An allocation of a pool that other processes may have imported. It is not freed before they have freed it.
///
/// Each send gives the importer one end of a pipe. The importer keeps it open until it has freed the
/// allocation or its process ends: the kernel then closes it, so a crash counts as a return, and silence does
/// not. This value holds the other end and checks it. That takes one fd in each process for each allocation
/// and importer.
///
/// If the value is dropped while others hold the allocation, the free is deferred. A deferred free runs, once
/// possible, when the next such value is dropped or sent, or in [`sweep`](Self::sweep).
///
/// ```
/// use egmem::driver::{HandleTypes, NodeId};
/// use egmem::share::{Channel, LentPoolBuffer, Peers};
/// use egmem::{Driver, Machine, Pool, Stream};
/// use std::os::unix::net::UnixStream;
/// use std::time::Duration;
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let pool = Pool::options(NodeId(0)).handle_types(HandleTypes::POSIX_FD).create(&driver)?;
/// let stream = Stream::new(&driver, 0)?;
/// let mut lent = LentPoolBuffer::from(pool.allocate(64 << 10, &stream)?);
/// lent.cpu()?.put(0, 42_u64)?;
/// # let (one, other) = UnixStream::pair().unwrap();
/// # let importer = std::thread::spawn(move || -> egmem::share::Result<()> {
/// # let driver = Driver::simulated(Machine::gh200())?;
/// # let stream = Stream::new(&driver, 0)?;
///
/// // One process, with a channel to another:
/// # let mut channel = Channel::new(other, &Peers::same_user())?;
/// let pool = channel.receive_pool(&driver)?;
/// let imported = channel.receive_pool_buffer(&pool, &stream)?;
/// assert_eq!(imported.cpu()?.get::<u64>(0)?, 42);
/// imported.free()?;
/// # Ok(()) });
///
/// // The other process:
/// # let mut channel = Channel::new(one, &Peers::same_user())?;
/// channel.send_pool(&pool)?;
/// channel.send_pool_buffer(&mut lent)?;
/// lent.wait(Duration::from_secs(10))?; // until it has been freed there
/// let buffer = lent.into_buffer().expect("nobody has it any more");
/// # importer.join().unwrap()?;
/// # Ok::<(), egmem::share::Error>(())
/// ```
#[derive(Debug)]
pub struct LentPoolBuffer {
    /// `None` only after it was taken out.
    buffer: Option<PoolBuffer>,
    holders: Vec<Holder>,
}

#[derive(Debug)]
struct Holder {
    /// Reaches its end when the importer has freed the allocation.
    returned: PipeReader,
    peer: Credentials,
}

/// Allocations, and those who hold them.
type KeptBack = Vec<(PoolBuffer, Vec<Holder>)>;

/// Returns the allocations that this process has dropped while others held them.
fn kept_back() -> MutexGuard<'static, KeptBack> {
    static KEPT_BACK: PerProcess<Mutex<KeptBack>> = PerProcess::new();
    lock(KEPT_BACK.get(|_| Mutex::default()))
}

impl From<PoolBuffer> for LentPoolBuffer {
    fn from(buffer: PoolBuffer) -> Self {
        Self {
            buffer: Some(buffer),
            holders: Vec::new(),
        }
    }
}

impl LentPoolBuffer {
    /// Returns the processes that still hold the allocation.
    pub fn holders(&mut self) -> Vec<Credentials> {
        keep_holders(&mut self.holders);
        self.holders.iter().map(|holder| holder.peer).collect()
    }

    /// Waits until no other process holds the allocation.
    ///
    /// # Errors
    /// [`StillHeld`](MemoryError::StillHeld) with the holders if that takes longer than `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> MemoryResult<()> {
        let until = Instant::now() + timeout.min(fd::FOREVER);
        while let Some(holder) = self.holders.last() {
            let left = until.saturating_duration_since(Instant::now());
            // Nothing is ever written, so only the end can become readable.
            let found = fd::wait_for(&holder.returned, PollFlags::empty(), left);
            let found = found.map_err(failed("waiting for a pipe's end"))?;
            if found.contains(PollFlags::HUP) {
                self.holders.pop();
            } else if left.is_zero() {
                return Err(MemoryError::StillHeld {
                    name: "a pool's memory".into(),
                    holders: self.holders().iter().map(Credentials::to_string).collect(),
                });
            }
        }
        Ok(())
    }

    /// Returns the allocation for exclusive use, or to free it, unless another process still holds it.
    ///
    /// # Errors
    /// `self`, if another process holds it.
    pub fn into_buffer(mut self) -> Result<PoolBuffer, Self> {
        keep_holders(&mut self.holders);
        match self.buffer.take_if(|_| self.holders.is_empty()) {
            Some(buffer) => Ok(buffer),
            None => Err(self),
        }
    }

    /// Runs deferred frees whose holders have returned the allocation; returns how many are left.
    pub fn sweep() -> usize {
        let mut kept = kept_back();
        let free = kept.extract_if(.., |(_, holders)| {
            keep_holders(holders);
            holders.is_empty()
        });
        let free: Vec<_> = free.collect();
        let left = kept.len();
        drop(kept);
        // Outside the lock, because a free takes the driver's time.
        drop(free);
        left
    }
}

impl Deref for LentPoolBuffer {
    type Target = PoolBuffer;

    fn deref(&self) -> &PoolBuffer {
        match &self.buffer {
            Some(buffer) => buffer,
            None => unreachable!("taken out only by `into_buffer`, which consumes it, and `drop`"),
        }
    }
}

impl Drop for LentPoolBuffer {
    fn drop(&mut self) {
        // A forked child gives nothing of its parent's back.
        let own = |buffer: &mut PoolBuffer| buffer.pool().driver().is_of_this_process();
        if let Some(buffer) = self.buffer.take_if(own) {
            kept_back().push((buffer, std::mem::take(&mut self.holders)));
            Self::sweep();
        }
    }
}

/// Removes the holders that have returned the allocation.
fn keep_holders(holders: &mut Vec<Holder>) {
    // If the check fails, the holder counts as still having it.
    holders.retain(|holder| !fd::has_hung_up(&holder.returned));
}

impl Channel {
    /// Shares a pool with the other process, which can then receive the pool's allocations.
    ///
    /// The handle grants access to all of the pool's memory, even if no allocation is sent later.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) for a pool that was created without
    /// [`HandleTypes::POSIX_FD`](crate::driver::HandleTypes::POSIX_FD), the driver's errors, and those of
    /// [`send`](Self::send).
    pub fn send_pool(&mut self, pool: &Pool) -> Result<()> {
        let handle = pool.export(HandleType::PosixFd)?;
        let fds: Vec<_> = posix(&handle).into_iter().collect();
        let location = pool.props().location;
        self.send_body(&Body::Pool { location }, &fds)
    }

    /// Waits for a pool from the other process and imports it. Grants host memory to every GPU, and a GPU's
    /// memory to that GPU.
    ///
    /// # Errors
    /// The driver's errors, and those of [`receive`](Self::receive).
    pub fn receive_pool(&mut self, driver: &Driver) -> Result<ImportedPool> {
        let (Body::Pool { location }, Some(fd)) = self.receive_one()? else {
            return Err(self.unexpected("a pool"));
        };
        let handle = ShareableHandle::PosixFd(fd);
        Ok(ImportedPool::import(driver, &handle, location)?)
    }

    /// Shares an allocation of the pool that was sent last. The other process holds it from now on, until it
    /// has freed it.
    ///
    /// # Errors
    /// The error of earlier work on the allocation's stream, the driver's errors, and those of
    /// [`send`](Self::send).
    pub fn send_pool_buffer(&mut self, lent: &mut LentPoolBuffer) -> Result<()> {
        LentPoolBuffer::sweep();
        // SAFETY: `lent` frees the allocation after all holders of its pipes.
        let pointer = Pointer(unsafe { lent.export_pointer() }?.0);
        let (returned, tether) = io::pipe().map_err(failed("making a pipe"))?;
        let peer = self.peer();
        let bytes = crate::Memory::len(&**lent);
        // First, so that the holder is tracked even if the send fails.
        lent.holders.push(Holder { returned, peer });
        self.send_body(&Body::PoolBuffer { bytes, pointer }, &[tether.as_fd()])?;
        lent.sent_to(peer.into());
        Ok(())
    }

    /// Waits for an allocation of `pool`, which came from this channel. It will be freed on `stream`.
    ///
    /// The other process is trusted to keep the allocation until then, as a [`LentPoolBuffer`] does: nothing can be
    /// asked of the driver to check that. Receive pools only from programs that are trusted with this process's
    /// memory.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) for another driver's stream, or an impossible size;
    /// the driver's INVALID_VALUE for data that is not an allocation of the pool; those of
    /// [`receive`](Self::receive).
    #[track_caller]
    pub fn receive_pool_buffer(
        &mut self,
        pool: &ImportedPool,
        stream: &Stream,
    ) -> Result<ImportedPoolBuffer> {
        let (Body::PoolBuffer { bytes, pointer }, Some(tether)) = self.receive_one()? else {
            return Err(self.unexpected("a pool's memory"));
        };
        let pointer = PoolPtrExport(pointer.0);
        // SAFETY: a `LentPoolBuffer` keeps the allocation while the pipe's other end is open. That the other
        // process sent one is trusted, as documented above: the driver cannot tell.
        let buffer = unsafe { pool.import_pointer(&pointer, bytes, stream, tether) }?;
        buffer.imported_from(self.peer().into());
        Ok(buffer)
    }

    /// Lends an event to the other process, which may then record it and make its streams wait for it. See
    /// [`Event::lend`]: the event exists until the other process has dropped its own.
    ///
    /// ```no_run
    /// # use egmem::share::{Channel, Peers};
    /// # use egmem::{Driver, Event, Stream};
    /// # fn example(driver: &Driver, stream: &Stream, channel: &mut Channel) -> egmem::share::Result<()> {
    /// let event = Event::interprocess(driver, 0)?;
    /// channel.send_event(&event)?;
    /// // … GPU work on `stream` …
    /// event.record(stream)?;
    /// channel.send_text("recorded")?; // the other process: receive_event, receive_text, Stream::wait
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`Event::lend`], and of [`send`](Self::send).
    pub fn send_event(&mut self, event: &Event) -> Result<()> {
        let gpu = event.driver().device_uuid(event.handle().device)?;
        let boot = BootId::current()?;
        let lent = event.lend()?;
        let handle = Pointer(*lent.handle.expose_bytes());
        self.send_body(&Body::Event { boot, gpu, handle }, &[lent.tether.as_fd()])
    }

    /// Waits for an event from the other process. It is opened for the same GPU, whatever its ordinal here.
    ///
    /// The other process is trusted to keep its event until this one is dropped, as [`Event::lend`] does: nothing can be
    /// asked of the driver to check that. Receive events only from programs that are trusted with this process's memory.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) if this process does not have the event's GPU, or if the event is
    /// of another boot of the machine; the driver's errors, also for an event of this process itself; those of
    /// [`receive`](Self::receive).
    pub fn receive_event(&mut self, driver: &Driver) -> Result<Event> {
        let (Body::Event { boot, gpu, handle }, Some(tether)) = self.receive_one()? else {
            return Err(self.unexpected("an event"));
        };
        if boot != BootId::current()? {
            let why = "it belongs to another machine, or to an earlier boot of this one";
            return Err(MemoryError::invalid("event", why).into());
        }
        let device = ordinal_of(driver, &gpu)?;
        let handle = IpcEventHandle::from_bytes(&handle.0);
        // SAFETY: the lender keeps its event while `tether` is open. That the other process is one is trusted, as
        // documented above: the driver cannot tell.
        Ok(unsafe { Event::import(driver, device, &handle, Some(tether)) }?)
    }
}

/// Returns this process's ordinal of a GPU: processes see the GPUs that `CUDA_VISIBLE_DEVICES` names, in its order.
fn ordinal_of(driver: &Driver, uuid: &[u8; 16]) -> MemoryResult<i32> {
    for device in 0..driver.device_count()? {
        if driver.device_uuid(device)? == *uuid {
            return Ok(device);
        }
    }
    let why = "this process does not have its GPU: add it to CUDA_VISIBLE_DEVICES";
    Err(MemoryError::invalid("event", why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(not(miri))]
    fn a_child_that_is_forked_while_the_list_is_locked_looks_at_its_own() {
        let locked = kept_back();
        assert!(crate::fork_check::in_a_child(
            || LentPoolBuffer::sweep() == 0
        ));
        drop(locked);
    }
}
