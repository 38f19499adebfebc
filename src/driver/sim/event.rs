//! Events: positions in streams that others wait for.

use super::answer::{Answer, fail};
use super::share::{self, Sharing};
use super::state::State;
use super::work::{Event, Point, StreamKey, Work};
use crate::{Code, EventHandle, IpcEventHandle, StreamHandle};

impl State {
    pub(super) fn stream_wait_event(
        &mut self,
        handle: StreamHandle,
        event: EventHandle,
    ) -> Answer<()> {
        let key = self.stream(handle)?;
        let event = self.events.get(&event.raw).ok_or(Code::INVALID_HANDLE)?;
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
        let streams = &self.streams;
        let alive: Vec<StreamKey> = streams.keys().copied().collect();
        if let Some(stream) = self.streams.get_mut(&key) {
            if stream.waited.len() > 2 * alive.len() + 16 {
                stream.waited.retain(|other, _| alive.contains(other));
            }
            let seq = stream.waited.entry(point.0).or_default();
            *seq = point.1.max(*seq);
        }
        if !self.is_complete(point) {
            self.submit(key, Work::Wait(point));
        }
    }

    pub(super) fn event_create(&mut self, device: i32, timing: bool) -> Answer<EventHandle> {
        self.new_event(device, timing, Sharing::Private)
    }

    pub(super) fn event_create_interprocess(&mut self, device: i32) -> Answer<EventHandle> {
        self.new_event(device, false, Sharing::Interprocess(None))
    }

    pub(super) fn ipc_event_handle(&mut self, event: EventHandle) -> Answer<IpcEventHandle> {
        self.event(event)?;
        let event = self.events.get_mut(&event.raw);
        event.ok_or(Code::INVALID_HANDLE)?.sharing.export()
    }

    pub(super) fn ipc_open_event(
        &mut self,
        device: i32,
        handle: &IpcEventHandle,
    ) -> Answer<EventHandle> {
        self.context(device)?;
        share::check(handle)?;
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

    pub(super) fn event_destroy(&mut self, event: EventHandle) -> Answer<()> {
        let event = self.events.remove(&event.raw).ok_or(Code::INVALID_HANDLE)?;
        self.context(event.device).map(drop)
    }

    fn event(&self, event: EventHandle) -> Answer<&Event> {
        let event = self.events.get(&event.raw).ok_or(Code::INVALID_HANDLE)?;
        self.context(event.device).map(|_| event)
    }

    pub(super) fn event_record(&mut self, event: EventHandle, stream: StreamHandle) -> Answer<()> {
        let key = self.stream(stream)?;
        if self.event(event)?.device != stream.device {
            return fail(Code::INVALID_HANDLE);
        }
        let captured = self.valid_capture_of(key)?;
        let point = self.submit(key, Work::Record);
        let mut is_interprocess = false;
        if let Some(event) = self.events.get_mut(&event.raw) {
            event.recorded = Some(point);
            event.captured = captured;
            is_interprocess = !matches!(event.sharing, Sharing::Private);
        }
        if is_interprocess {
            self.run(point);
        }
        Ok(())
    }

    pub(super) fn event_synchronize(&mut self, handle: EventHandle) -> Answer<()> {
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

    pub(super) fn event_query(&mut self, event: EventHandle) -> Answer<bool> {
        self.event_synchronize(event).map(|()| true)
    }

    pub(super) fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> Answer<f32> {
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
}
