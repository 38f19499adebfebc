//! Streams and events, and the work that runs on them.

mod event;
mod interprocess;
mod order;
#[cfg(feature = "async")]
mod poller;
mod transfer;
mod work;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::{Code, DevicePtr, Driver, Relaxed, StreamHandle};
use crate::guard::on_gpu;
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

pub use event::{Event, Held, LentEvent, Waited};
use order::Marks;
pub use order::{after_captures, run_due};
pub use transfer::{NotStarted, Started, Transfer, TransferError, TransferFailed};
pub use work::BatchCopy;

/// A stream: orders the work of one GPU. Clones are the same stream; it is destroyed with the last clone.
///
/// Source: `cuStreamCreate` (non-blocking with respect to the legacy default stream).
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    driver: Driver,
    handle: StreamHandle,
    owned: bool,
    /// Identifies the stream: addresses and handles are reused.
    id: u64,
    /// Dropped after the stream: work that waits for an event continues without it.
    marks: Mutex<Marks>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owned {
            give_back_or_log(&self.driver, "a stream", || {
                // SAFETY: owned by `self`, and this is the last clone; work in flight continues.
                unsafe { self.driver.stream_destroy(self.handle) }
            });
        }
    }
}

impl Stream {
    /// Creates a stream on GPU `device`.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], or the driver's error.
    pub fn new(driver: &Driver, device: i32) -> Result<Self> {
        let handle = on_gpu(driver, device, driver.stream_create(device))?;
        Ok(Self::of(driver, handle, true))
    }

    fn of(driver: &Driver, handle: StreamHandle, owned: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(Arc::new(Inner {
            driver: driver.clone(),
            handle,
            owned,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            marks: Mutex::default(),
        }))
    }

    /// Wraps a stream that other code owns, such as cudarc or a framework.
    ///
    /// # Safety
    /// `handle` is a stream of that device's primary context and outlives the result's clones and everything
    /// that received one: pool memory, and [tickets](Transfer) for copies and fills. Memory that is freed while one of
    /// its streams is being captured into a graph keeps its streams until a pool or a heap's handle for a stream is used
    /// after the capture.
    pub unsafe fn borrowed(driver: &Driver, handle: StreamHandle) -> Self {
        Self::of(driver, handle, false)
    }

    /// Waits until all work on the stream is done. Captures of other streams into CUDA graphs are not disturbed.
    ///
    /// # Errors
    /// The error of earlier work: [`Error::ContextLost`] after an illegal access. STREAM_CAPTURE_UNSUPPORTED if the
    /// stream itself is being captured, which makes the capture invalid.
    pub fn synchronize(&self) -> Result<()> {
        let _relaxed = Relaxed::new(self.driver());
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.driver().stream_synchronize(self.handle()) }
    }

    /// Returns whether all work on the stream is done. Captures of other streams into CUDA graphs are not disturbed.
    ///
    /// Source: `cuStreamQuery`, in relaxed capture mode.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn is_done(&self) -> Result<bool> {
        let _relaxed = Relaxed::new(self.driver());
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.driver().stream_query(self.handle()) }
    }

    /// Returns whether work submitted to the stream is captured into a CUDA graph instead of running.
    ///
    /// Source: `cuStreamIsCapturing`.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize); STREAM_CAPTURE_IMPLICIT for the legacy default stream during a
    /// capture of a stream that it would wait for.
    pub fn is_capturing(&self) -> Result<bool> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { is_capturing(self.driver(), self.handle()) }
    }

    /// Waits for the end of the work that the caller has just submitted to the stream. The borrow of its
    /// memory may end only then, because safe code may reuse the bytes at once. See
    /// [`wait_until_over`](Self::wait_until_over): where that does not tell, this waits for all work of the GPU.
    ///
    /// A driver that refuses all three questions again and again, about 16 ms each, with errors that do not say that the context is
    /// lost, would let the borrow end before the work. No driver is known to: after a reset, a fault or its own end it answers every
    /// call with such an error. Waiting on would hang where an error of a later driver says the same by a new code.
    ///
    /// # Errors
    /// The driver's first error.
    pub fn finish(&self) -> Result<()> {
        let waited = self.wait_until_over();
        if !waited.over {
            self.wait_for_gpu();
        }
        waited.result
    }

    #[cold]
    fn wait_for_gpu(&self) {
        let _relaxed = Relaxed::new(self.driver());
        let wait = || self.driver().ctx_synchronize(self.device());
        let waited = event::wait_until_over(wait, || wait().map(|()| true));
        if let (false, Err(error)) = (waited.over, waited.result) {
            tracing::error!(%error, "the driver does not say whether work has ended whose memory the caller may free now");
        }
    }

    /// Waits until all work on the stream has ended, for a caller that must not unmap the work's memory before. A
    /// driver that refuses the wait is asked again, for about 16 ms; then the answer says that the work may still
    /// run.
    pub fn wait_until_over(&self) -> Waited {
        event::wait_until_over(|| self.synchronize(), || self.is_done())
    }

    /// Refuses work that the caller waits for if the stream is being captured into a CUDA graph: the graph
    /// could run the work at any later time, after the borrow of the memory. A stream that this crate created
    /// is captured too once it [waits](Self::wait) for an event of a captured stream.
    pub fn expect_no_capture(&self) -> Result<()> {
        if self.is_capturing()? {
            let why = "it is being captured into a graph, which would run the work later";
            return Err(Error::invalid("stream", why));
        }
        Ok(())
    }

    /// Submits a copy of memory that the caller keeps allocated. [`start_copy`](Self::start_copy) is the safe
    /// form: its ticket keeps the memory.
    ///
    /// Source: `cuMemcpyAsync`.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// Both ranges stay allocated until the copy is done. Until then nothing in this process reads the bytes
    /// that it writes, or writes those that it reads, except through [`CpuView`](crate::memory::CpuView).
    pub unsafe fn copy_async(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.driver().memcpy_async(dst, src, bytes, self.handle()) }
    }

    /// Submits a fill to the stream.
    ///
    /// Source: `cuMemsetD8Async`.
    ///
    /// # Errors
    /// The driver's errors: INVALID_VALUE for pool memory that the GPU has no access to.
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

    /// Returns the GPU's ordinal.
    pub fn device(&self) -> i32 {
        self.0.handle.device
    }

    /// Returns the driver's handle, for calls of your own.
    pub fn handle(&self) -> StreamHandle {
        self.0.handle
    }

    /// Returns the stream's driver.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }
}

/// As [`Stream::is_capturing`].
///
/// # Safety
/// `stream` is a live stream of the driver.
pub unsafe fn is_capturing(driver: &Driver, stream: StreamHandle) -> Result<bool> {
    // SAFETY: the caller's promise.
    match unsafe { driver.stream_is_capturing(stream) } {
        // A driver of the program's own, which knows no captures.
        Err(error) if error.code() == Some(Code::NOT_SUPPORTED) => Ok(false),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;
    use crate::driver::Call;

    #[test]
    fn a_query_relaxes_the_capture_mode_meanwhile() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let sim = driver.sim().unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let before = sim.count(Call::ThreadExchangeStreamCaptureMode);
        assert_eq!(stream.is_done(), Ok(true));
        let exchanges = sim.count(Call::ThreadExchangeStreamCaptureMode) - before;
        assert_eq!(exchanges, 2, "relaxed, and restored");
    }

    #[test]
    fn a_silent_driver_does_not_end_work() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let sim = driver.sim().unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        sim.fail(Call::StreamSynchronize, 1, Code::UNKNOWN);
        let waited = stream.wait_until_over();
        assert!(waited.over && waited.result.is_err(), "{waited:?}");
        for nth in 1..100 {
            sim.fail(Call::StreamSynchronize, nth, Code::UNKNOWN);
            sim.fail(Call::StreamQuery, nth, Code::UNKNOWN);
        }
        let waited = stream.wait_until_over();
        assert!(!waited.over && waited.result.is_err(), "{waited:?}");
    }

    #[test]
    fn waits_leave_the_captures_of_other_streams_alone() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let sim = driver.sim().unwrap();
        let [captured, stream] = [(); 2].map(|()| Stream::new(&driver, 0).unwrap());
        let event = Event::new(&driver, 0, false).unwrap();
        sim.begin_capture(captured.handle(), false);
        event.record(&stream).unwrap();
        assert_eq!((event.is_done(), stream.is_done()), (Ok(true), Ok(true)));
        event.synchronize().unwrap();
        stream.synchronize().unwrap();
        captured.wait_for(&stream).unwrap();
        assert!(sim.end_capture(captured.handle()));
    }
}
