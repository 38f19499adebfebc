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
        let valid = true;
        let key = (stream.device, stream.raw);
        self.captures.insert(key, Capture { blocking, valid });
    }

    pub(super) fn end_capture(&mut self, stream: StreamHandle) -> bool {
        let ended = self.captures.remove(&(stream.device, stream.raw));
        ended.is_some_and(|capture| capture.valid)
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
