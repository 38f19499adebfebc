//! Giving things back, where nobody is left to hear of a failure.

use crate::driver::{Code, Driver};
use crate::{Error, Result};

/// Gives something back: `call` is tried a second time if the driver refuses for a reason that may
/// pass.
///
/// A refused call has had no effect, except that INVALID_VALUE and the like say that the object is
/// not (or no longer) there; then a second try could hit another object under the same number.
pub(crate) fn give_back(mut call: impl FnMut() -> Result<()>) -> Result<()> {
    match call() {
        Err(Error::Driver(first)) if may_pass(Some(first.code)) => {
            tracing::warn!(%first, "trying once more");
            call()
        }
        result => result,
    }
}

/// The same in `Drop`: what cannot be given back is logged. A forked child gives nothing back.
pub(crate) fn give_back_or_log(
    driver: &Driver,
    what: &'static str,
    call: impl FnMut() -> Result<()>,
) {
    if driver.is_of_this_process() {
        log_lost(what, give_back(call));
    }
}

/// Logs what was not given back.
pub(crate) fn log_lost(what: &'static str, result: Result<()>) {
    if let Err(error) = result {
        // A process that is exiting may have torn the driver down already; nothing is lost then.
        if error.code() == Some(Code::DEINITIALIZED) {
            return;
        }
        tracing::error!(%error, "cannot give back {what}: it is lost until the process ends");
    }
}

/// Whether a refusal with this code may pass: the object is still there.
pub(crate) fn may_pass(code: Option<Code>) -> bool {
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
    use super::*;
    use crate::driver::Call;

    fn tries(code: Code) -> (u32, bool) {
        let mut count = 0;
        let result = give_back(|| {
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
