//! Releases resources when no caller can handle a failure.

use crate::driver::{Code, DevicePtr, Driver};
use crate::{Error, Result};

/// Releases a resource: calls `call` a second time if the driver refuses for a temporary reason.
///
/// A refused call has had no effect, except that INVALID_VALUE and similar codes mean that the object does
/// not (or no longer) exist; a second try could then hit another object with the same number.
///
/// # Errors
/// The driver's error; [`Error::InvalidArgument`] in a forked child, which releases nothing.
pub fn give_back(
    driver: &Driver,
    what: &'static str,
    mut call: impl FnMut() -> Result<()>,
) -> Result<()> {
    driver.expect_this_process(what)?;
    match call() {
        Err(first) if is_worth_retrying(&first) => call(),
        result => result,
    }
}

#[cold]
fn is_worth_retrying(error: &Error) -> bool {
    let is_so = matches!(error, Error::Driver(first) if may_pass(Some(first.code)));
    if is_so {
        tracing::warn!(first = %error, "trying once more");
    }
    is_so
}

/// As [`give_back`], for `Drop`: logs memory that cannot be released. A forked child releases nothing.
///
/// Returns whether it is lost: this process keeps it until it ends.
pub fn give_back_or_log(
    driver: &Driver,
    what: &'static str,
    call: impl FnMut() -> Result<()>,
) -> bool {
    if !driver.is_of_this_process() {
        return false;
    }
    let result = give_back(driver, what, call);
    if result.is_ok() {
        return false;
    }
    log_lost(what, result);
    true
}

/// Ends the registration of pages, which a context that was destroyed has ended already. A call in one that is lost otherwise may
/// report the loss even where it has ended the registration: the next one tells.
///
/// # Errors
/// The driver's: the pages are registered as before.
///
/// # Safety
/// That of [`Backend::mem_host_unregister`](crate::driver::Backend::mem_host_unregister).
pub unsafe fn unregister(driver: &Driver, device: i32, start: DevicePtr) -> Result<()> {
    // SAFETY: the caller's promise.
    let call = || unsafe { driver.mem_host_unregister(device, start) };
    match call() {
        // The registration has ended with its context. Source: docs/driver-behaviour.md.
        Err(Error::ContextLost { source, .. }) if source.code == Code::CONTEXT_IS_DESTROYED => {
            Ok(())
        }
        Err(lost @ Error::ContextLost { .. }) => match call() {
            Err(error) if error.code() != Some(Code::HOST_MEMORY_NOT_REGISTERED) => Err(lost),
            _ => Ok(()),
        },
        ended => ended,
    }
}

/// Waits for the work of all GPUs that have a context in this process and are not lost. A lost one runs nothing any more, but work of its streams may have
/// waited for another GPU's, which goes on.
///
/// # Errors
/// The driver's: a GPU may still run its work.
pub fn wait_for_all_gpus(driver: &Driver) -> Result<()> {
    for device in 0..driver.device_count()? {
        if driver.has_context(device) == Some(false) {
            continue; // waiting would create one
        }
        match driver.ctx_synchronize(device) {
            Ok(()) | Err(Error::ContextLost { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Logs memory that was not released.
pub fn log_lost(what: &'static str, result: Result<()>) {
    if let Err(error) = result {
        // A process that is exiting may have torn the driver down already; nothing is lost then.
        if error.code() == Some(Code::DEINITIALIZED) {
            return;
        }
        tracing::error!(%error, "cannot give back {what}: it is lost until the process ends");
    }
}

/// Returns whether a refusal with this code may be temporary: the object still exists.
pub fn may_pass(code: Option<Code>) -> bool {
    !matches!(
        code,
        None | Some(
            Code::INVALID_VALUE
                | Code::INVALID_HANDLE
                | Code::INVALID_CONTEXT
                | Code::DEINITIALIZED
                | Code::NOT_INITIALIZED
        )
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::driver::{Backend, Call, PoolCalls};

    /// A driver of three GPUs, which this process uses, does not use, and may use. Has a bit for each that was waited for.
    #[derive(Debug, Default)]
    struct SomeUsed(AtomicU32);

    // SAFETY: it maps no memory.
    unsafe impl PoolCalls for SomeUsed {
        fn api(&self) -> &'static str {
            "none"
        }
    }

    // SAFETY: as above.
    unsafe impl Backend for SomeUsed {
        fn name(&self) -> &'static str {
            "some-used"
        }
        fn driver_pools(&self) -> &dyn PoolCalls {
            self
        }
        fn device_count(&self) -> Result<i32> {
            Ok(3)
        }
        fn has_context(&self, device: i32) -> Option<bool> {
            [Some(true), Some(false), None][device as usize]
        }
        fn ctx_synchronize(&self, device: i32) -> Result<()> {
            self.0.fetch_or(1 << device, Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn gpus_without_a_context_are_not_waited_for() {
        let used = Arc::new(SomeUsed::default());
        wait_for_all_gpus(&Driver::from_backend(used.clone())).unwrap();
        assert_eq!(used.0.load(Ordering::Relaxed), 0b101);
    }

    fn tries(code: Code) -> (u32, bool) {
        let driver = Driver::simulated(crate::Machine::gh200()).unwrap();
        let mut count = 0;
        let result = give_back(&driver, "memory", || {
            count += 1;
            if count == 1 {
                Err(Error::driver(Call::MemRelease, code))
            } else {
                Ok(())
            }
        });
        (count, result.is_ok())
    }

    #[test]
    fn only_refusals_that_may_pass_are_tried_again() {
        assert_eq!(tries(Code::OUT_OF_MEMORY), (2, true));
        assert_eq!(tries(Code(99_999)), (2, true));
        assert_eq!(tries(Code::INVALID_VALUE), (1, false));
        assert_eq!(tries(Code::DEINITIALIZED), (1, false));
    }
}
