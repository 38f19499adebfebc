//! The FFI boundary: every function's body runs in [`call`].

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::args;
use crate::egm_status;
use crate::failure::{Failure, Outcome};
use crate::last_error;

/// Runs a function's body and returns its status. Keeps a failure for the thread, and a panic as a failure.
///
/// A body that panics leaves its objects as the crate `egmem` leaves them: usable, since its locks are taken again
/// after a panic, or leaked.
#[inline]
pub(crate) fn call(body: impl FnOnce() -> Outcome) -> egm_status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => egm_status::EGM_OK,
        Ok(Err(failure)) => last_error::set(failure),
        Err(payload) => last_error::set(Failure::panicked(&*payload)),
    }
}

/// Runs a function that asks an object and writes the answer, on success only.
///
/// # Safety
/// `object` is null, or a handle of this library that is not destroyed meanwhile; `out` is null or may be written.
#[inline]
pub(crate) unsafe fn ask<T, A>(
    object: *const T,
    what: &'static str,
    out: *mut A,
    answer: impl FnOnce(&T) -> Outcome<A>,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let object = unsafe { args::object(object, what)? };
        let out = args::out(out, "out")?;
        let answer = answer(object)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(answer) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::{egm_last_error_message, egm_last_error_remedy};

    #[test]
    fn a_panic_becomes_a_status_with_its_message() {
        let status = call(|| panic!("number {}", 7));
        assert_eq!(status, egm_status::EGM_INTERNAL);
        // SAFETY: valid until the thread's next failed call.
        let (message, remedy) = unsafe {
            (
                CStr::from_ptr(egm_last_error_message()),
                CStr::from_ptr(egm_last_error_remedy()),
            )
        };
        let message = message.to_str().unwrap();
        assert!(message.ends_with("number 7"), "{message}");
        assert!(!remedy.is_empty());
    }

    #[test]
    fn a_call_that_succeeds_keeps_the_last_error() {
        assert_eq!(
            egm_status::EGM_INVALID_ARGUMENT,
            call(|| Err(Failure::invalid("it", "that is why")))
        );
        assert_eq!(egm_status::EGM_OK, call(|| Ok(())));
        // SAFETY: valid until the thread's next failed call.
        let message = unsafe { CStr::from_ptr(egm_last_error_message()) };
        assert!(
            message.to_str().unwrap().contains("that is why"),
            "{message:?}"
        );
    }
}
