//! Captures of streams into CUDA graphs, as far as other calls meet them. No graph is made: work that is submitted to
//! a captured stream runs.

use std::cell::Cell;

use super::answer::{Answer, fail};
use super::state::State;
use super::work::{Capture, StreamKey};
use crate::{Call, CaptureMode, Code, StreamHandle};

thread_local! {
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::GLOBAL) };
}

impl State {
    pub(super) fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> Answer<CaptureMode> {
        Ok(MODE.replace(mode))
    }

    pub(super) fn begin_capture(&mut self, stream: StreamHandle, blocking: bool) {
        let capture = Capture {
            id: self.number(),
            is_joined: true,
            blocking,
            valid: true,
        };
        self.captures.insert((stream.device, stream.raw), capture);
    }

    /// Ends the capture that began on `stream`, for all of its streams. It is valid if no call has disturbed it and each
    /// stream that was drawn in has joined again.
    pub(super) fn end_capture(&mut self, stream: StreamHandle) -> bool {
        let key = (stream.device, stream.raw);
        let Some(id) = self.captures.get(&key).map(|capture| capture.id) else {
            return false;
        };
        let parts = self.captures.extract_if(|_, capture| capture.id == id);
        let parts: Vec<Capture> = parts.map(|(_, capture)| capture).collect();
        parts
            .iter()
            .all(|capture| capture.valid && capture.is_joined)
    }

    /// Returns the number of the capture that the stream is part of.
    ///
    /// # Errors
    /// STREAM_CAPTURE_INVALIDATED if a call has disturbed it.
    pub(super) fn valid_capture_of(&self, key: StreamKey) -> Answer<Option<u64>> {
        match self.captures.get(&key) {
            Some(capture) if !capture.valid => fail(Code::STREAM_CAPTURE_INVALIDATED),
            capture => Ok(capture.map(|capture| capture.id)),
        }
    }

    /// Refuses a call on a captured stream with `code`, and makes the capture invalid.
    pub(super) fn expect_not_captured(&mut self, key: StreamKey, code: Code) -> Answer<()> {
        match self.captures.get(&key).map(|capture| capture.id) {
            Some(id) => {
                self.spoil(id);
                fail(code)
            }
            None => Ok(()),
        }
    }

    /// Draws a stream into a capture that waits for work of it, and refuses a wait over the border of a capture.
    pub(super) fn wait_in_captures(
        &mut self,
        key: StreamKey,
        of: StreamKey,
        captured: Option<u64>,
    ) -> Answer<()> {
        match (self.valid_capture_of(key)?, captured) {
            (None, None) => Ok(()),
            (Some(own), None) => {
                self.spoil(own);
                fail(Code::STREAM_CAPTURE_ISOLATION)
            }
            (None, Some(id)) => {
                if self.captures.get(&of).is_none_or(|other| other.id != id) {
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
                self.spoil(own);
                self.spoil(id);
                fail(Code::STREAM_CAPTURE_MERGE)
            }
            (Some(_), Some(_)) => {
                if let Some(other) = self.captures.get_mut(&of).filter(|_| key != of) {
                    other.is_joined = true;
                }
                Ok(())
            }
        }
    }

    fn spoil(&mut self, id: u64) {
        let parts = self.captures.values_mut();
        parts
            .filter(|capture| capture.id == id)
            .for_each(|capture| capture.valid = false);
    }

    /// Refuses a call that the calling thread's mode forbids while a stream is captured, and makes the captures
    /// invalid.
    pub(super) fn expect_allowed(&mut self, call: Call) -> Answer<()> {
        let forbidden = matches!(
            call,
            Call::EventQuery
                | Call::EventSynchronize
                | Call::StreamQuery
                | Call::StreamSynchronize
                | Call::MemHostAlloc
                | Call::MemAllocAsync
        );
        match forbidden && MODE.get() == CaptureMode::GLOBAL {
            true => self.invalidate(|_| true),
            false => Ok(()),
        }
    }

    /// Refuses a wait for a device's whole context while one of its streams is captured, in every mode of the thread.
    pub(super) fn expect_no_capture_on(&mut self, device: i32) -> Answer<()> {
        self.invalidate(|key| key.0 == device)
    }

    fn invalidate(&mut self, which: impl Fn(&StreamKey) -> bool) -> Answer<()> {
        let mut any = false;
        for (_, capture) in self.captures.iter_mut().filter(|(key, _)| which(key)) {
            capture.valid = false;
            any = true;
        }
        match any {
            true => fail(Code::STREAM_CAPTURE_UNSUPPORTED),
            false => Ok(()),
        }
    }

    pub(super) fn stream_is_capturing(&mut self, handle: StreamHandle) -> Answer<bool> {
        let key = self.stream(handle)?;
        let implicit =
            |(other, capture): (&StreamKey, &Capture)| capture.blocking && other.0 == handle.device;
        if handle.raw == 0 && self.captures.iter().any(implicit) {
            return fail(Code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(self.captures.contains_key(&key))
    }
}
