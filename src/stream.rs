//! Streams and events, and the work that can be put on them.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use crate::driver::{Access, Code, DevicePtr, Driver, EventHandle, StreamHandle};
use crate::explain::name_missing_gpu;
use crate::memory::{Engine, Memory, expect_gpu_access, expect_no_cpu_fault};
use crate::per_driver::lock;
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

/// A stream of one GPU's work, in order. Clones are the same stream; it is destroyed with the last.
///
/// Source: `cuStreamCreate` (non-blocking with respect to the legacy default stream).
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    driver: Driver,
    handle: StreamHandle,
    owned: bool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owned {
            give_back_or_log(&self.driver, "a stream", || {
                // SAFETY: owned by `self`, and this is the last clone; work in flight goes on.
                unsafe { self.driver.stream_destroy(self.handle) }
            });
        }
    }
}

impl Stream {
    /// A new stream on GPU `device`.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], or the driver's.
    pub fn new(driver: &Driver, device: i32) -> Result<Self> {
        Ok(Self(Arc::new(Inner {
            handle: driver
                .stream_create(device)
                .map_err(|error| name_missing_gpu(driver, error, device))?,
            driver: driver.clone(),
            owned: true,
        })))
    }

    /// A stream that somebody else owns, such as cudarc's or a framework's.
    ///
    /// # Safety
    /// `handle` is a stream of that device's primary context and outlives the result's clones and
    /// whatever they were given to.
    pub unsafe fn borrowed(driver: &Driver, handle: StreamHandle) -> Self {
        Self(Arc::new(Inner {
            driver: driver.clone(),
            handle,
            owned: false,
        }))
    }

    /// Waits until all work on the stream is done.
    ///
    /// # Errors
    /// What earlier work failed with: [`Error::ContextLost`] after an illegal access.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.driver().stream_synchronize(self.handle()) }
    }

    /// Whether all work on the stream is done.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.driver().stream_query(self.handle()) }
    }

    /// Whether work put on the stream is captured into a CUDA graph instead of being run.
    ///
    /// Source: `cuStreamIsCapturing`.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize); STREAM_CAPTURE_IMPLICIT for the legacy default stream
    /// while a stream is captured that it would wait for.
    pub fn is_capturing(&self) -> Result<bool> {
        // SAFETY: `self` keeps the handle alive.
        match unsafe { self.driver().stream_is_capturing(self.handle()) } {
            // A driver of somebody's own, which knows no captures.
            Err(error) if error.code() == Some(Code::NOT_SUPPORTED) => Ok(false),
            result => result,
        }
    }

    /// Makes work put on this stream from now on wait for `event`.
    ///
    /// # Errors
    /// The driver's, and [`Error::InvalidArgument`] for another driver's event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.driver().expect_same(&event.driver, "event")?;
        // SAFETY: both handles are kept alive by what is borrowed here.
        unsafe { self.driver().stream_wait_event(self.handle(), event.handle) }
    }

    /// Makes work put on this stream from now on wait for all that is on `other` by now.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        self.driver().expect_same(other.driver(), "stream")?;
        if self.handle() == other.handle() {
            return Ok(());
        }
        let event = Event::new(other.driver(), other.device(), false)?;
        event.record(other)?;
        self.wait(&event)
    }

    /// Waits until the work that the caller has just put on the stream has ended: only then may the borrow
    /// of its memory end, because safe code may reuse the bytes at once.
    ///
    /// A refused wait says nothing about the work, so the wait is repeated for as long as the driver says that
    /// work is still running. It gives up after some refusals of both the wait and the question: CUDA returns
    /// the error of a lost context from every call from then on, and the work of such a context has ended.
    ///
    /// # Errors
    /// The first refusal.
    pub(crate) fn finish(&self) -> Result<()> {
        const TRIES: u32 = 16;
        let first = self.synchronize();
        let mut last = first.clone();
        let mut refusals = 0;
        while let Err(error) = &last
            && !matches!(error, Error::ContextLost { .. })
            && refusals < TRIES
        {
            tracing::warn!(%error, "waiting for a stream is refused: trying once more");
            match self.is_done() {
                Ok(true) => break,
                Ok(false) => {}
                Err(_) => refusals += 1,
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
            last = self.synchronize();
        }
        first
    }

    /// Refuses work that has to end before the call returns where it would become part of a CUDA graph: the
    /// graph could run it at any later time, after the borrow of the memory. Others capture only streams
    /// that they own.
    fn expect_no_capture(&self) -> Result<()> {
        if !self.0.owned && self.is_capturing()? {
            let why = "it is being captured into a graph, which would run the work later";
            return Err(Error::invalid("stream", why));
        }
        Ok(())
    }

    /// Copies between two memories and waits for the end. Memory of a pool may belong to another
    /// stream: the copy comes after its allocation and all that is on that stream by now.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::InvalidArgument`] for another driver's memory, and for a
    /// [borrowed](Self::borrowed) stream that is being captured into a graph; [`Error::NotAccessible`] where
    /// the GPU may not write the destination or not read the source, and where the source is host memory and the
    /// CPU may read the destination but not write it (the driver makes such copies with the CPU); what earlier
    /// work on the stream failed with.
    pub fn copy(
        &self,
        to: &impl Memory,
        to_offset: u64,
        from: &impl Memory,
        from_offset: u64,
        bytes: u64,
    ) -> Result<()> {
        self.driver().expect_same(to.driver(), "destination")?;
        self.driver().expect_same(from.driver(), "source")?;
        let dst = to.range(to_offset, bytes)?;
        let src = from.range(from_offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.expect_no_capture()?;
        let by = (self.device(), Engine::Copy);
        expect_gpu_access(to, by, (to_offset, bytes), Access::ReadWrite)?;
        expect_gpu_access(from, by, (from_offset, bytes), Access::Read)?;
        expect_no_cpu_fault(to, (to_offset, bytes), from)?;
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe {
            to.ready_on(self.handle())?;
            from.ready_on(self.handle())?;
        }
        // SAFETY: both ranges are borrowed until the copy is done, which is before this returns.
        let put = unsafe { self.copy_async(dst, src, bytes) };
        put.and(self.finish())
    }

    /// Sets `bytes` bytes from `offset` on to `byte`, by the GPU, and waits for the end.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn fill(&self, to: &impl Memory, offset: u64, bytes: u64, byte: u8) -> Result<()> {
        self.driver().expect_same(to.driver(), "destination")?;
        let dst = to.range(offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.expect_no_capture()?;
        let by = (self.device(), Engine::Copy);
        expect_gpu_access(to, by, (offset, bytes), Access::ReadWrite)?;
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe { to.ready_on(self.handle())? };
        // SAFETY: the range is borrowed until the work is done, which is before this returns.
        let put = unsafe { self.memset_async(dst, byte, bytes) };
        put.and(self.finish())
    }

    /// Puts a copy on the stream.
    ///
    /// Source: `cuMemcpyAsync`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Both ranges stay allocated until the copy is done, and nobody in this process reads what it
    /// writes or writes what it reads before that, except through [`CpuView`](crate::memory::CpuView).
    pub unsafe fn copy_async(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.driver().memcpy_async(dst, src, bytes, self.handle()) }
    }

    /// Puts setting bytes on the stream.
    ///
    /// Source: `cuMemsetD8Async`.
    ///
    /// # Errors
    /// The driver's: INVALID_VALUE for pool memory that the GPU has no access to.
    ///
    /// # Safety
    /// As [`copy_async`](Self::copy_async).
    pub unsafe fn memset_async(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            self.driver()
                .memset_d8_async(dst, byte, bytes, self.handle())
        }
    }

    /// The GPU's ordinal.
    pub fn device(&self) -> i32 {
        self.0.handle.device
    }

    /// The driver's handle, for calls of your own.
    pub fn handle(&self) -> StreamHandle {
        self.0.handle
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }
}

/// A point in a stream's work, destroyed when dropped.
#[derive(Debug)]
pub struct Event {
    driver: Driver,
    handle: EventHandle,
    /// How many need the mark to stay where it is. Locked while it moves.
    held: Mutex<u32>,
}

impl Event {
    /// A new event on GPU `device`; without `timing` it is cheaper.
    ///
    /// Source: `cuEventCreate`.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], or the driver's.
    pub fn new(driver: &Driver, device: i32, timing: bool) -> Result<Self> {
        Ok(Self {
            handle: driver
                .event_create(device, timing)
                .map_err(|error| name_missing_gpu(driver, error, device))?,
            driver: driver.clone(),
            held: Mutex::new(0),
        })
    }

    /// Marks the end of what is on `stream` by now.
    ///
    /// # Errors
    /// The driver's; [`Error::InvalidArgument`] for another driver's stream, and while a heap's
    /// memory waits for what the event marks by now.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.driver.expect_same(stream.driver(), "stream")?;
        let held = lock(&self.held);
        if *held > 0 {
            return Err(Error::invalid(
                "event",
                "memory is to be reused after what it marks: record another",
            ));
        }
        // SAFETY: both handles are kept alive by what is borrowed here.
        unsafe { self.driver.event_record(self.handle, stream.handle()) }
    }

    /// Waits until the marked work is done; at once if the event was never recorded.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.driver.event_synchronize(self.handle) }
    }

    /// Whether the marked work is done.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.driver.event_query(self.handle) }
    }

    /// Milliseconds from `start` to this event, both created with timing and done; 0 on the
    /// simulator.
    ///
    /// # Errors
    /// The driver's: NOT_READY before both are done, INVALID_HANDLE without timing.
    pub fn elapsed_ms_since(&self, start: &Self) -> Result<f32> {
        self.driver.expect_same(&start.driver, "event")?;
        // SAFETY: both handles are kept alive by what is borrowed here.
        unsafe { self.driver.event_elapsed_ms(start.handle, self.handle) }
    }

    /// The driver's handle.
    pub const fn handle(&self) -> EventHandle {
        self.handle
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Keeps the mark where it is while the result lives: nobody can record the event anew.
    pub(crate) fn hold(self: Arc<Self>) -> Held {
        *lock(&self.held) += 1;
        Held(self)
    }
}

/// An event that is not recorded anew while this lives.
#[derive(Debug)]
pub(crate) struct Held(Arc<Event>);

impl Deref for Held {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        *lock(&self.0.held) -= 1;
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        give_back_or_log(&self.driver, "an event", || {
            // SAFETY: owned by `self`; the driver keeps what is still waited for.
            unsafe { self.driver.event_destroy(self.handle) }
        });
    }
}
