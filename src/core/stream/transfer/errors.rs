//! Why a transfer failed, and its operands.

use std::fmt;

use crate::Error;

/// Why a copy or a fill was not started, and its operands. If the driver refused the work itself, the destination's bytes
/// are undefined.
pub type NotStarted<T> = TransferError<T>;

/// Why a copy or a fill failed, and its operands with unspecified bytes in the destination. `None` if the driver does
/// not say whether the work has ended: then the [ticket](super::Transfer) has leaked them, or leaks them when it is
/// dropped.
pub type TransferFailed<T> = TransferError<Option<T>>;

/// Why a copy or a fill failed, and its operands.
pub struct TransferError<O> {
    /// The driver's error, that of the work, or that of the wait for it.
    pub error: Box<Error>,
    /// The operands.
    pub operands: O,
}

/// The operands were taken before.
#[cold]
pub(super) fn given_back() -> Error {
    Error::invalid("transfer", "it has ended and its operands were given back")
}

/// A driver that refused without an error.
#[cold]
pub(super) fn silent() -> Error {
    Error::failed(
        "waiting for GPU work",
        "the driver does not say how it ended",
    )
}

impl<O> TransferError<O> {
    pub(super) fn new(error: Error, operands: O) -> Self {
        let error = Box::new(error);
        Self { error, operands }
    }
}

impl<O> fmt::Display for TransferError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a copy or a fill failed: {}", self.error)
    }
}

impl<O> fmt::Debug for TransferError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferError")
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl<O> std::error::Error for TransferError<O> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}

/// Returns only the error; drops the operands.
impl<O> From<TransferError<O>> for Error {
    fn from(failed: TransferError<O>) -> Self {
        *failed.error
    }
}
