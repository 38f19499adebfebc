//! Events that other processes use: CUDA's IPC events.
//!
//! CUDA leaves undefined what another process's calls do once the exporter has destroyed the event. So an importer holds
//! one end of a pipe until it has destroyed its own, and the kernel closes it for a process that dies. The exporter has
//! the other end: an event that is dropped earlier is destroyed later. The same pipe tells an importer of the exporter's
//! end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Duration;

use super::Stream;
use super::event::{Event, LentEvent, Sharing, is_closed, sweep};
use crate::driver::{Driver, IpcEventHandle};
use crate::guard::on_gpu;
use crate::per_driver::lock;
use crate::{Error, Result};

/// How often a thread asks whether another process's work is done.
const PAUSE: Duration = Duration::from_micros(50);

impl Event {
    /// Creates an event on GPU `device` that can be [lent](Self::lend) to other processes, so that their GPU work waits for
    /// this process's, and the other way, with no CPU in between. It has no timing. Streams of its GPU alone record it and
    /// wait for it, unless they are being captured into a graph.
    ///
    /// Source: `cuEventCreate` with `CU_EVENT_INTERPROCESS`.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::InvalidArgument`] in a forked child.
    pub fn interprocess(driver: &Driver, device: i32) -> Result<Self> {
        driver.expect_this_process("event")?;
        sweep();
        let handle = on_gpu(driver, device, driver.event_create_interprocess(device))?;
        Ok(Self::of(driver, handle, Sharing::Lent(Mutex::default())))
    }

    /// Lends the event to another process, which records it and waits for it as this one does. Until that process has
    /// destroyed its event or has ended, this one exists, even if it is dropped: it is then destroyed when this process next
    /// makes an event by [`interprocess`](Self::interprocess), lends one, or drops such an event. An open pipe takes one fd in each process.
    ///
    /// The `Channel` of sharing sends it with the same checks as memory.
    ///
    /// Source: `cuIpcGetEventHandle`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an event that was not made by [`interprocess`](Self::interprocess), and in a forked
    /// child; [`Error::System`] if this process may open no more file descriptors; the driver's errors.
    pub fn lend(&self) -> Result<LentEvent> {
        self.driver.expect_this_process("event")?;
        sweep();
        let mut holders = lock(self.holders()?);
        holders.retain(|holder| !is_closed(holder));
        let (holder, tether) =
            io::pipe().map_err(|error| Error::system("making a pipe", &error))?;
        // SAFETY: `self` keeps the handle alive, and the event is not destroyed while `tether` is open.
        let handle = unsafe { self.driver.ipc_event_handle(self.handle)? };
        holders.push(holder);
        let tether = tether.into();
        Ok(LentEvent { handle, tether })
    }

    /// Returns the pipes of the processes that have it.
    fn holders(&self) -> Result<&Mutex<Vec<io::PipeReader>>> {
        let Sharing::Lent(holders) = &self.sharing else {
            let why = "it was not made for other processes: create it with Event::interprocess";
            return Err(Error::invalid("event", why));
        };
        Ok(holders)
    }

    /// Returns the bytes by which another process opens the event, for other code than this library's, such as
    /// PyTorch.
    ///
    /// Source: `cuIpcGetEventHandle`.
    ///
    /// # Errors
    /// As [`lend`](Self::lend).
    ///
    /// # Safety
    /// The event lives until each process that opened it has destroyed its own, or has ended.
    pub unsafe fn export(&self) -> Result<IpcEventHandle> {
        self.holders()?;
        // SAFETY: `self` keeps the handle alive, and the caller keeps `self`.
        unsafe { self.driver.ipc_event_handle(self.handle) }
    }

    /// Opens another process's event, for streams of GPU `device`, which is the GPU of that event. Both processes may
    /// record it and wait for it. `tether`: an end of the exporter's pipe, which is closed after the event was destroyed.
    ///
    /// Source: `cuIpcOpenEventHandle`.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`]; the driver's errors: for bytes that are no handle, and for an event of this process. After the
    /// exporter's end some drivers open it still.
    ///
    /// # Safety
    /// The exporter keeps its event until this one is dropped, or while `tether` is open.
    pub unsafe fn import(
        driver: &Driver,
        device: i32,
        handle: &IpcEventHandle,
        tether: Option<OwnedFd>,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        let handle = on_gpu(driver, device, unsafe {
            driver.ipc_open_event(device, handle)
        })?;
        Ok(Self::of(driver, handle, Sharing::Imported(tether)))
    }

    /// Returns whether the event can be lent to other processes.
    pub const fn is_interprocess(&self) -> bool {
        matches!(self.sharing, Sharing::Lent(_))
    }

    /// Returns whether another process made the event.
    pub const fn is_imported(&self) -> bool {
        matches!(self.sharing, Sharing::Imported(_))
    }

    /// Returns whether the process that made the event has ended, as far as a pipe tells: always `false` for an event
    /// of this process, and for one that came without a pipe. A child of that process that it forked counts as the process.
    pub fn is_orphaned(&self) -> bool {
        match &self.sharing {
            Sharing::Imported(Some(tether)) => is_closed(tether),
            _ => false,
        }
    }

    /// Refuses to use an event whose exporter has ended.
    pub(super) fn expect_exporter(&self) -> Result<()> {
        if self.is_orphaned() {
            let error = io::Error::from_raw_os_error(libc::EOWNERDEAD);
            return Err(Error::system("using an event of another process", &error));
        }
        Ok(())
    }

    /// Refuses a stream that is being captured: a graph's mark means nothing to another process. And one of another GPU:
    /// driver 580 ends a process by SIGSEGV that has such a stream wait for the event.
    pub(super) fn expect_shareable_on(&self, stream: &Stream) -> Result<()> {
        if let Sharing::Private = self.sharing {
            return Ok(());
        }
        self.expect_exporter()?;
        let (event, stream_gpu) = (self.handle.device, stream.device());
        if event != stream_gpu {
            let why = format!(
                "an event of several processes orders streams of its own GPU alone, and this one is of GPU {stream_gpu}: \
                 use a stream of GPU {event}"
            );
            return Err(Error::invalid("stream", why));
        }
        stream.expect_no_capture()
    }

    /// Waits for work that may be another process's: the driver's wait would not end with that process.
    pub(super) fn synchronize_imported(&self) -> Result<()> {
        while !self.is_done()? {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;
    use crate::Machine;
    use crate::driver::{Call, Code};
    #[cfg(not(miri))]
    use crate::fork_check::in_a_child;
    use crate::per_driver::tests::alone;

    fn driver() -> Driver {
        Driver::simulated(Machine::gh200()).unwrap()
    }

    #[test]
    fn an_event_is_destroyed_after_the_last_tether_is_closed() {
        let _alone = alone();
        let driver = driver();
        let sim = driver.sim().unwrap();
        let event = Event::interprocess(&driver, 0).unwrap();
        let [one, other] = [(); 2].map(|()| event.lend().unwrap());
        assert_eq!(one.handle, other.handle);
        drop(event);
        drop(one);
        sweep();
        assert_eq!(sim.count(Call::EventDestroy), 0);
        let duplicate = other.tether.try_clone().unwrap();
        drop(other);
        sweep();
        assert_eq!(sim.count(Call::EventDestroy), 0);
        drop(duplicate);
        sweep();
        // Another test's thread may have found it first.
        while sim.count(Call::EventDestroy) < 1 {
            std::thread::yield_now();
        }
        // One that nobody has any more is destroyed at once.
        let event = Event::interprocess(&driver, 0).unwrap();
        drop(event.lend().unwrap());
        drop(event);
        assert_eq!(sim.count(Call::EventDestroy), 2);
    }

    /// The child's own events are kept in a list of its own.
    #[test]
    #[cfg(not(miri))]
    fn a_child_that_is_forked_while_the_list_is_locked_looks_at_its_own() {
        let _alone = alone();
        let _locked = super::super::event::kept();
        assert!(in_a_child(|| {
            sweep();
            true
        }));
    }

    #[test]
    #[cfg(not(miri))]
    fn a_child_that_is_forked_while_an_event_is_recorded_drops_its_uses() {
        let _alone = alone();
        let event = Arc::new(Event::new(&driver(), 0, false).unwrap());
        let held = Cell::new(Some(Arc::clone(&event).hold()));
        let _recorded = lock(&event.held);
        assert!(in_a_child(|| held.take().is_some()));
    }

    #[test]
    fn an_event_of_one_process_is_not_lent() {
        let driver = driver();
        let event = Event::new(&driver, 0, false).unwrap();
        let error = event.lend().unwrap_err().to_string();
        assert!(error.contains("Event::interprocess"), "{error}");
        let missing = Event::interprocess(&driver, 1).unwrap_err();
        assert!(matches!(missing, Error::NoSuchGpu { .. }), "{missing}");
        driver
            .sim()
            .unwrap()
            .fail(Call::IpcGetEventHandle, 1, Code::OUT_OF_MEMORY);
        let other = Event::interprocess(&driver, 0).unwrap();
        assert_eq!(other.lend().unwrap_err().code(), Some(Code::OUT_OF_MEMORY));
        drop((event, other));
        assert!(driver.sim().unwrap().held().is_empty());
    }

    #[test]
    fn a_captured_stream_neither_records_it_nor_waits_for_it() {
        let driver = driver();
        let sim = driver.sim().unwrap();
        let event = Event::interprocess(&driver, 0).unwrap();
        let [captured, stream] = [(); 2].map(|()| Stream::new(&driver, 0).unwrap());
        event.record(&stream).unwrap();
        sim.begin_capture(captured.handle(), false);
        for refused in [event.record(&captured), captured.wait(&event)] {
            assert!(
                matches!(refused, Err(Error::InvalidArgument { .. })),
                "{refused:?}"
            );
        }
        assert!(
            sim.end_capture(captured.handle()),
            "the capture stays valid"
        );
    }
}
