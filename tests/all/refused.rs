//! Refusals by a server.

use egmem::exchange::{Error, Refusal};

/// The error is a refusal for this reason.
#[track_caller]
pub fn assert_refused(error: &Error, why: Refusal) {
    assert!(
        matches!(error, Error::Refused { reason, .. } if *reason == why),
        "{error}"
    );
}
