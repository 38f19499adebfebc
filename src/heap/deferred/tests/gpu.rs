//! GPUs whose streams advance only when a test says so, or when a thread waits for them.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use crate::driver::{
    Backend, Call, CaptureMode, Code, Driver, EventHandle, PoolCalls, StreamHandle,
};
use crate::per_driver::lock;
use crate::stream::Stream;
use crate::{DriverError, Error, Result};

/// Shared with the driver above it.
#[derive(Clone, Debug)]
pub(super) struct Gpus(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    count: i32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    numbers: u64,
    /// For each stream, the work submitted and the work done.
    streams: HashMap<StreamHandle, (u64, u64)>,
    events: HashMap<EventHandle, Mark>,
    capturing: HashSet<StreamHandle>,
    lost: HashSet<i32>,
    fault: Option<(Call, Code)>,
    calls: HashMap<Call, u64>,
    mode: u32,
    modes_of_queries: HashSet<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Mark {
    device: i32,
    at: Option<(StreamHandle, u64)>,
    captured: bool,
}

impl Gpus {
    pub(super) fn new(count: i32) -> (Self, Driver) {
        let gpus = Self(Arc::new(Inner {
            count,
            state: Mutex::default(),
        }));
        let driver = Driver::from_backend(Arc::new(gpus.clone()));
        (gpus, driver)
    }

    /// Returns a stream with a piece of work on it.
    pub(super) fn busy(&self, driver: &Driver, device: i32) -> Stream {
        let stream = Stream::new(driver, device).unwrap();
        self.work(&stream);
        stream
    }

    /// Submits a piece of work to a stream.
    pub(super) fn work(&self, stream: &Stream) {
        self.with(|state| state.streams.entry(stream.handle()).or_default().0 += 1);
    }

    /// Completes one piece of a stream's work, if there is one.
    pub(super) fn step(&self, stream: &Stream) {
        self.with(|state| {
            let (put, done) = state.streams.entry(stream.handle()).or_default();
            *done = (*done + 1).min(*put);
        });
    }

    /// Returns the work submitted to a stream and the work done.
    pub(super) fn progress(&self, stream: &Stream) -> (u64, u64) {
        self.with(|state| state.streams.get(&stream.handle()).copied())
            .unwrap_or_default()
    }

    pub(super) fn capture(&self, stream: &Stream, on: bool) {
        self.with(|state| {
            if on {
                state.capturing.insert(stream.handle())
            } else {
                state.capturing.remove(&stream.handle())
            }
        });
    }

    pub(super) fn lose(&self, device: i32) {
        self.with(|state| state.lost.insert(device));
    }

    /// Makes the next use of `call` fail, once.
    pub(super) fn fail(&self, call: Call, code: Code) {
        self.with(|state| state.fault = Some((call, code)));
    }

    /// Clears the fault; returns whether it had happened already.
    pub(super) fn forget_fault(&self) -> bool {
        self.with(|state| state.fault.take()).is_none()
    }

    pub(super) fn count(&self, call: Call) -> u64 {
        self.with(|state| state.calls.get(&call).copied().unwrap_or(0))
    }

    /// Returns the capture modes in which events were queried and waited for.
    pub(super) fn modes_of_queries(&self) -> HashSet<u32> {
        self.with(|state| state.modes_of_queries.clone())
    }

    /// Returns the number of events.
    pub(super) fn events(&self) -> usize {
        self.with(|state| state.events.len())
    }

    fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut lock(&self.0.state))
    }

    fn call<T>(
        &self,
        call: Call,
        device: impl FnOnce(&State) -> Option<i32>,
        answer: impl FnOnce(&mut State) -> Result<T, Code>,
    ) -> Result<T> {
        self.with(|state| {
            *state.calls.entry(call).or_default() += 1;
            if let Some((_, code)) = state.fault.take_if(|(which, _)| *which == call) {
                return Err(Error::driver(call, code));
            }
            if let Some(device) = device(state)
                && state.lost.contains(&device)
            {
                let code = Code::ILLEGAL_ADDRESS;
                let source = DriverError { call, code };
                return Err(Error::ContextLost { device, source });
            }
            answer(state).map_err(|code| Error::driver(call, code))
        })
    }

    fn ask(&self, call: Call, event: EventHandle, wait: bool) -> Result<bool> {
        self.call(
            call,
            |state| state.events.get(&event).map(|mark| mark.device),
            |state| {
                state.modes_of_queries.insert(state.mode);
                let mark = *state.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
                if mark.captured {
                    return Err(Code::CAPTURED_EVENT);
                }
                let Some((stream, place)) = mark.at else {
                    return Ok(true);
                };
                let Some((_, done)) = state.streams.get_mut(&stream) else {
                    return Ok(true);
                };
                if wait {
                    *done = place.max(*done);
                }
                Ok(*done >= place)
            },
        )
    }
}

struct NoPools;

// SAFETY: it reports nothing as done.
unsafe impl PoolCalls for NoPools {
    fn api(&self) -> &'static str {
        "none"
    }
}

// SAFETY: no memory is ever reported as mapped.
unsafe impl Backend for Gpus {
    fn name(&self) -> &'static str {
        "by hand"
    }

    fn driver_pools(&self) -> &dyn PoolCalls {
        &NoPools
    }

    fn device_count(&self) -> Result<i32> {
        Ok(self.0.count)
    }

    fn stream_create(&self, device: i32) -> Result<StreamHandle> {
        self.call(
            Call::StreamCreate,
            |_| Some(device),
            |state| {
                state.numbers += 16;
                let raw = state.numbers;
                let stream = StreamHandle { device, raw };
                state.streams.insert(stream, (0, 0));
                Ok(stream)
            },
        )
    }

    unsafe fn stream_destroy(&self, _: StreamHandle) -> Result<()> {
        Ok(()) // Its work goes on.
    }

    unsafe fn stream_is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        self.call(
            Call::StreamIsCapturing,
            |_| Some(stream.device),
            |state| Ok(state.capturing.contains(&stream)),
        )
    }

    fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let call = Call::ThreadExchangeStreamCaptureMode;
        self.call(
            call,
            |_| None,
            |state| Ok(CaptureMode(std::mem::replace(&mut state.mode, mode.0))),
        )
    }

    fn ctx_synchronize(&self, device: i32) -> Result<()> {
        self.call(
            Call::CtxSynchronize,
            |_| Some(device),
            |state| {
                for (stream, (put, done)) in &mut state.streams {
                    if stream.device == device {
                        *done = *put;
                    }
                }
                Ok(())
            },
        )
    }

    fn event_create(&self, device: i32, _timing: bool) -> Result<EventHandle> {
        self.call(
            Call::EventCreate,
            |_| Some(device),
            |state| {
                state.numbers += 16;
                let raw = state.numbers;
                let event = EventHandle { device, raw };
                let mark = Mark {
                    device,
                    at: None,
                    captured: false,
                };
                state.events.insert(event, mark);
                Ok(event)
            },
        )
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        self.with(|state| state.events.remove(&event));
        Ok(())
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.call(
            Call::EventRecord,
            |_| Some(stream.device),
            |state| {
                let captured = state.capturing.contains(&stream);
                let put = state.streams.entry(stream).or_default().0;
                let mark = state.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
                if mark.device != stream.device {
                    return Err(Code::INVALID_HANDLE);
                }
                mark.captured = captured;
                mark.at = Some((stream, put));
                Ok(())
            },
        )
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        self.ask(Call::EventQuery, event, false)
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        self.ask(Call::EventSynchronize, event, true).map(drop)
    }
}
