//! Events, which are positions in streams that others wait for; captures of streams into CUDA graphs, as far as other calls
//! meet them. No graph is made: work that is submitted to a captured stream runs.

use std::cell::Cell;

use super::fault::{Answer, fail};
use super::memory::{self, Sharing};
use super::state::{Capture, Event, Point, State, StreamKey, Work};
use super::stream::key_of;
use crate::*;

thread_local! {
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::GLOBAL) };
}

impl State {
    pub fn stream_wait_event(&mut self, handle: StreamHandle, event: EventHandle) -> Answer {
        let key = self.stream(handle)?;
        let event = self.events.get(event.raw).ok_or(Code::INVALID_HANDLE)?;
        let point = match event.recorded {
            Some(point) => point,
            // Another process may have recorded it, outside of this process's captures.
            None if matches!(event.sharing, Sharing::Imported) => {
                return self.wait_in_captures(key, key, None);
            }
            None => return Ok(()),
        };
        let captured = event.captured;
        self.wait_in_captures(key, point.0, captured)?;
        self.wait_for_point(key, point);
        Ok(())
    }

    fn wait_for_point(&mut self, key: StreamKey, point: Point) {
        let alive: Vec<StreamKey> = self.streams.keys().collect();
        if let Some(stream) = self.streams.get_mut(key) {
            if stream.waited.entries().len() > 2 * alive.len() + 16 {
                stream.waited.retain(|other, _| alive.contains(other));
            }
            let seq = stream.waited.get_or_default(point.0);
            *seq = point.1.max(*seq);
        }
        if !self.is_complete(point) {
            self.submit(key, Work::Wait(point));
        }
    }

    pub fn event_create(&mut self, device: i32, timing: bool) -> Answer<EventHandle> {
        self.new_event(device, timing, Sharing::Private)
    }

    pub fn event_create_interprocess(&mut self, device: i32) -> Answer<EventHandle> {
        self.new_event(device, false, Sharing::Interprocess(None))
    }

    pub fn ipc_event_handle(&mut self, event: EventHandle) -> Answer<IpcEventHandle> {
        self.event(event)?;
        let event = self.events.get_mut(event.raw);
        event.ok_or(Code::INVALID_HANDLE)?.sharing.export()
    }

    pub fn ipc_open_event(&mut self, device: i32, handle: &IpcEventHandle) -> Answer<EventHandle> {
        self.context(device)?;
        memory::check(handle)?;
        self.new_event(device, false, Sharing::Imported)
    }

    fn new_event(&mut self, device: i32, timing: bool, sharing: Sharing) -> Answer<EventHandle> {
        self.context(device)?;
        let raw = self.number();
        let new = Event {
            device,
            timing,
            sharing,
            recorded: None,
            captured: None,
        };
        self.events.insert(raw, new);
        Ok(EventHandle { device, raw })
    }

    pub fn event_destroy(&mut self, event: EventHandle) -> Answer {
        let event = self.events.remove(event.raw).ok_or(Code::INVALID_HANDLE)?;
        self.context(event.device).map(drop)
    }

    fn event(&self, event: EventHandle) -> Answer<&Event> {
        let event = self.events.get(event.raw).ok_or(Code::INVALID_HANDLE)?;
        self.context(event.device).map(|_| event)
    }

    pub fn event_record(&mut self, event: EventHandle, stream: StreamHandle) -> Answer {
        let key = self.stream(stream)?;
        if self.event(event)?.device != stream.device {
            return fail(Code::INVALID_HANDLE);
        }
        let captured = self.valid_capture_of(key)?;
        let point = self.submit(key, Work::Record);
        let mut is_interprocess = false;
        if let Some(event) = self.events.get_mut(event.raw) {
            event.recorded = Some(point);
            event.captured = captured;
            is_interprocess = !matches!(event.sharing, Sharing::Private);
        }
        if is_interprocess {
            self.run(point);
        }
        Ok(())
    }

    pub fn event_synchronize(&mut self, handle: EventHandle) -> Answer {
        let event = self.event(handle)?;
        let device = event.device;
        if event.captured.is_some() {
            return fail(Code::CAPTURED_EVENT);
        }
        if let Some(point) = event.recorded {
            self.run(point);
            self.release_pools();
        }
        self.context(device).map(drop)
    }

    pub fn event_query(&mut self, event: EventHandle) -> Answer {
        self.event_synchronize(event)
    }

    pub fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> Answer<f32> {
        let (start, end) = (self.event(start)?, self.event(end)?);
        match (start.recorded, end.recorded) {
            (Some(from), Some(to)) if start.timing && end.timing => {
                if !self.is_complete(from) || !self.is_complete(to) {
                    fail(Code::NOT_READY)
                } else {
                    Ok(0.0) // the duration of simulated work means nothing
                }
            }
            _ => fail(Code::INVALID_HANDLE),
        }
    }

    pub fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> Answer<CaptureMode> {
        Ok(MODE.replace(mode))
    }

    pub fn begin_capture(&mut self, stream: StreamHandle, blocking: bool) {
        let capture = Capture {
            id: self.number(),
            is_joined: true,
            blocking,
            valid: true,
        };
        self.captures.insert(key_of(stream), capture);
    }

    /// Ends the capture that began on `stream`, for all of its streams. It is valid if no call has disturbed it and each
    /// stream that was drawn in has joined again.
    pub fn end_capture(&mut self, stream: StreamHandle) -> bool {
        let key = key_of(stream);
        let Some(id) = self.captures.get(key).map(|capture| capture.id) else {
            return false;
        };
        let mut is_valid = true;
        self.captures.retain(|_, capture| {
            let is_part = capture.id == id;
            is_valid &= !is_part || (capture.valid && capture.is_joined);
            !is_part
        });
        is_valid
    }

    /// Returns the number of the capture that the stream is part of.
    ///
    /// # Errors
    /// STREAM_CAPTURE_INVALIDATED if a call has disturbed it.
    pub fn valid_capture_of(&self, key: StreamKey) -> Answer<Option<u64>> {
        match self.captures.get(key) {
            Some(capture) if !capture.valid => fail(Code::STREAM_CAPTURE_INVALIDATED),
            capture => Ok(capture.map(|capture| capture.id)),
        }
    }

    /// Refuses a call on a captured stream with `code`, and makes the capture invalid.
    pub fn expect_not_captured(&mut self, key: StreamKey, code: Code) -> Answer {
        match self.captures.get(key).map(|capture| capture.id) {
            Some(id) => self.invalidate(code, |_, capture| capture.id == id),
            None => Ok(()),
        }
    }

    /// Draws a stream into a capture that waits for work of it, and refuses a wait over the border of a capture.
    pub fn wait_in_captures(
        &mut self,
        key: StreamKey,
        of: StreamKey,
        captured: Option<u64>,
    ) -> Answer {
        match (self.valid_capture_of(key)?, captured) {
            (None, None) => Ok(()),
            (Some(own), None) => {
                self.invalidate(Code::STREAM_CAPTURE_ISOLATION, |_, it| it.id == own)
            }
            (None, Some(id)) => {
                if self.captures.get(of).is_none_or(|other| other.id != id) {
                    return fail(Code::CAPTURED_EVENT); // the capture has ended
                }
                let drawn_in = Capture {
                    id,
                    is_joined: false,
                    blocking: false,
                    valid: true,
                };
                self.captures.insert(key, drawn_in);
                Ok(())
            }
            (Some(own), Some(id)) if own != id => {
                let both = [own, id];
                self.invalidate(Code::STREAM_CAPTURE_MERGE, |_, it| both.contains(&it.id))
            }
            (Some(_), Some(_)) => {
                if let Some(other) = self.captures.get_mut(of).filter(|_| key != of) {
                    other.is_joined = true;
                }
                Ok(())
            }
        }
    }

    /// Refuses a call that the calling thread's mode forbids while a stream is captured, and makes the captures
    /// invalid.
    pub fn expect_allowed(&mut self, call: Call) -> Answer {
        let forbidden = matches!(
            call,
            Call::EventQuery
                | Call::EventSynchronize
                | Call::StreamQuery
                | Call::StreamSynchronize
                | Call::MemHostAlloc
                | Call::MemAllocAsync
                | Call::MemAllocFromPoolAsync
                | Call::RtMallocAsync
                | Call::RtMallocFromPoolAsync
                // By CUDA's documentation.
                | Call::MemAlloc
                | Call::MemAllocManaged
                | Call::MemFree
                | Call::MemFreeHost
                | Call::MemHostRegister
                | Call::MemHostUnregister
        );
        if forbidden && MODE.get() == CaptureMode::GLOBAL {
            self.invalidate(Code::STREAM_CAPTURE_UNSUPPORTED, |_, _| true)
        } else {
            Ok(())
        }
    }

    /// Makes some captures invalid, and refuses the call with `code` if there are any.
    pub fn invalidate(
        &mut self,
        code: Code,
        which: impl Fn(&StreamKey, &Capture) -> bool,
    ) -> Answer {
        let mut refused = Ok(());
        self.captures.retain(|key, capture| {
            if which(key, capture) {
                capture.valid = false;
                refused = fail(code);
            }
            true
        });
        refused
    }

    pub fn stream_is_capturing(&mut self, handle: StreamHandle) -> Answer<bool> {
        let key = self.stream(handle)?;
        let implicit =
            |(other, capture): &(StreamKey, Capture)| capture.blocking && other.0 == handle.device;
        if key.1 == 0 && self.captures.entries().iter().any(implicit) {
            return fail(Code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(self.captures.get(key).is_some())
    }
}
