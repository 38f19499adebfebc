//! Why a transfer failed, and its operands.

use std::fmt;

use crate::Error;

/// Why a copy or a fill was not started, and its operands.
pub struct NotStarted<T> {
    /// The error.
    pub error: Box<Error>,
    /// The operands. If the driver refused the work itself, the destination's bytes are undefined.
    pub operands: T,
}

/// Why a copy or a fill failed, and its operands if they are returned.
pub struct TransferFailed<T> {
    /// The error of the work, or of the wait for it.
    pub error: Box<Error>,
    /// The operands, with unspecified bytes in the destination. `None` if the driver does not say whether the work
    /// has ended: then the [ticket](super::Transfer) has leaked them, or leaks them when it is dropped.
    pub operands: Option<T>,
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

macro_rules! error {
    ($name:ident, $operands:ty, $what:literal) => {
        impl<T> $name<T> {
            pub(super) fn new(error: Error, operands: $operands) -> Self {
                let error = Box::new(error);
                Self { error, operands }
            }
        }

        impl<T> fmt::Display for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($what, ": {}"), self.error)
            }
        }

        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("error", &self.error)
                    .finish_non_exhaustive()
            }
        }

        impl<T> std::error::Error for $name<T> {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                Some(&*self.error)
            }
        }

        /// Returns only the error; drops the operands.
        impl<T> From<$name<T>> for Error {
            fn from(failed: $name<T>) -> Self {
                *failed.error
            }
        }
    };
}

error!(NotStarted, T, "a copy or a fill was not started");
error!(TransferFailed, Option<T>, "a copy or a fill failed");
