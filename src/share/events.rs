//! Sends events over a channel, so that GPU work of two processes runs in order with no CPU in between.

use std::os::fd::AsFd;

use super::frame::{Body, EventBody, Pointer};
use super::{BootId, Channel};
use crate::driver::IpcEventHandle;
use crate::{Driver, Event, MemoryError, MemoryResult, Result};

impl Channel {
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
        let handle = Pointer(lent.handle.expose_bytes().to_vec());
        let body = Body::Event(EventBody { boot, gpu, handle });
        self.send_body(&body, &[lent.tether.as_fd()])
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
        let (body, tether) = match self.receive_body()? {
            (Body::Event(body), mut fds) => match fds.pop() {
                Some(tether) => (body, tether),
                None => return Err(self.refuse("an event without its fd")),
            },
            (other, _) => return Err(self.unexpected(&other)),
        };
        if body.boot != BootId::current()? {
            let why = "it belongs to another machine, or to an earlier boot of this one";
            return Err(MemoryError::invalid("event", why).into());
        }
        let device = ordinal_of(driver, &body.gpu)?;
        let Ok(bytes) = <&[u8; 64]>::try_from(&body.handle.0[..]) else {
            return Err(self.refuse("an event's handle of another size"));
        };
        let handle = IpcEventHandle::from_bytes(bytes);
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
    use std::io;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::driver::{Call, Code};
    use crate::{Error, Machine, Peers};

    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        let channel = |stream| Channel::new(stream, &Peers::same_user()).unwrap();
        (channel(one), channel(other))
    }

    fn driver() -> Driver {
        Driver::simulated(Machine::gh200x4()).unwrap()
    }

    fn body(boot: BootId, gpu: [u8; 16]) -> Body {
        let handle = Pointer(vec![7; 64]);
        Body::Event(EventBody { boot, gpu, handle })
    }

    /// Sends a message and an fd as a peer could make them, and receives it as an event.
    fn received(body: &Body) -> Error {
        let (mut one, mut other) = pair();
        let (_holder, tether) = io::pipe().unwrap();
        one.send_body(body, &[tether.as_fd()]).unwrap();
        other.receive_event(&driver()).unwrap_err()
    }

    #[test]
    fn an_event_of_another_boot_or_another_gpu_is_refused() {
        let boot = BootId::current().unwrap();
        let gpu = driver().device_uuid(1).unwrap();
        for (body, why) in [
            (body(BootId::from_bytes([9; 16]), gpu), "another machine"),
            (body(boot, [9; 16]), "CUDA_VISIBLE_DEVICES"),
        ] {
            let error = received(&body).to_string();
            assert!(error.contains(why), "{error}");
        }
        // Bytes that are no handle: the driver says so, for the right GPU.
        let error = received(&body(boot, gpu));
        let call = error.driver_error().map(|error| error.call);
        assert_eq!(call, Some(Call::IpcOpenEventHandle), "{error}");
    }

    #[test]
    fn an_event_of_this_process_cannot_be_received() {
        let driver = driver();
        let event = Event::interprocess(&driver, 2).unwrap();
        let (mut one, mut other) = pair();
        one.send_event(&event).unwrap();
        let error = other.receive_event(&driver).unwrap_err();
        let code = error.driver_error().map(|error| error.code);
        assert_eq!(code, Some(Code::INVALID_CONTEXT), "{error}");
    }

    #[test]
    fn other_messages_are_no_event() {
        let (mut one, mut other) = pair();
        one.send_text("event").unwrap();
        let error = other.receive_event(&driver()).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    }
}
