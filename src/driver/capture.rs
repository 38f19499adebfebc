//! Leaves captures of streams into CUDA graphs undisturbed.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::{CaptureMode, Driver};

thread_local! {
    /// The driver whose mode a value of this thread has relaxed, by its address; `None` if none has.
    static RELAXED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Sets the calling thread's capture mode to [`CaptureMode::RELAXED`] until dropped, on that thread.
///
/// ```compile_fail
/// fn sent<T: Send>() {}
/// sent::<egmem_driver::Relaxed<'static>>();
/// ```
///
/// Querying an event is one of the calls that a capture forbids: in the default mode it fails while any
/// thread of the process captures in that mode, and invalidates that capture. A library that queries its own
/// events must not spoil a graph that it knows nothing of.
///
/// Source: `cuThreadExchangeStreamCaptureMode`.
pub struct Relaxed<'a> {
    driver: &'a Driver,
    /// `None`: the mode was not changed.
    before: Option<CaptureMode>,
    /// [`RELAXED`] before.
    outer: Option<usize>,
    /// Stays on its thread.
    _not_send: PhantomData<*const ()>,
}

impl<'a> Relaxed<'a> {
    /// Sets the mode. Inside the life of another value for the driver this costs no call.
    pub fn new(driver: &'a Driver) -> Self {
        let (own, outer) = (Some(driver.address()), RELAXED.get());
        if outer == own {
            return Self {
                driver,
                before: None,
                outer,
                _not_send: PhantomData,
            };
        }
        // A driver without this call cannot capture either, or the later calls return an error.
        let before = driver
            .thread_exchange_capture_mode(CaptureMode::RELAXED)
            .inspect_err(|error| tracing::debug!(%error, "the capture mode cannot be relaxed: a capture may fail"))
            .ok();
        if before.is_some() {
            RELAXED.set(own);
        }
        Self {
            driver,
            before,
            outer,
            _not_send: PhantomData,
        }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let Some(before) = self.before else { return };
        RELAXED.set(self.outer);
        if before == CaptureMode::RELAXED {
            return;
        }
        if let Err(error) = self.driver.thread_exchange_capture_mode(before) {
            tracing::warn!(%error, "this thread's capture mode stays relaxed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;
    use crate::{Call, Code};

    #[test]
    fn the_thread_has_its_mode_back_afterwards() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let swap = |mode| driver.thread_exchange_capture_mode(mode).unwrap();
        assert_eq!(swap(CaptureMode::THREAD_LOCAL), CaptureMode::GLOBAL);
        {
            let _outer = Relaxed::new(&driver);
            let _inner = Relaxed::new(&driver);
            assert_eq!(swap(CaptureMode::RELAXED), CaptureMode::RELAXED);
        }
        assert_eq!(swap(CaptureMode::THREAD_LOCAL), CaptureMode::THREAD_LOCAL);
        let sim = driver.sim().unwrap();
        sim.fail(Call::ThreadExchangeStreamCaptureMode, 1, Code::UNKNOWN);
        drop(Relaxed::new(&driver));
        assert_eq!(swap(CaptureMode::GLOBAL), CaptureMode::THREAD_LOCAL);
    }
}
