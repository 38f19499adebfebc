//! Errors as text, for a report, or from a probe to its parent.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::driver::{Call, Code};
use crate::{Error, Explained};

/// Why something does not work, and what to do: an [`Error`] as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// The name of the [`Error`]'s variant, such as `NoImexChannel`.
    pub kind: String,
    /// The failure and its cause.
    pub message: String,
    /// The remedy.
    pub remedy: String,
    /// The failed driver call behind it, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<Call>,
    /// The call's result code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
}

impl From<&Error> for Reason {
    fn from(error: &Error) -> Self {
        // Derived `Debug` output starts with the variant's name.
        let mut kind = format!("{error:?}");
        if let Some(end) = kind.find(|c: char| !c.is_ascii_alphanumeric()) {
            kind.truncate(end);
        }
        let source = error.driver_error();
        let remedy = error.remedy().to_owned();
        Self {
            kind,
            message: Explained(error).message(),
            remedy,
            call: source.map(|source| source.call),
            code: source.map(|source| source.code),
        }
    }
}

impl From<Error> for Reason {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.message, self.remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_says_what_the_error_says() {
        let error = Error::PlatformUnsupported {
            what: "fabric handles",
            source: Some(crate::DriverError {
                call: Call::MemCreate,
                code: Code::NOT_SUPPORTED,
            }),
        };
        let reason = Reason::from(&error);
        assert_eq!(reason.kind, "PlatformUnsupported");
        assert_eq!(
            reason.message,
            "this platform does not support fabric handles \
             (cuMemCreate failed: CUDA_ERROR_NOT_SUPPORTED (801))"
        );
        assert_eq!(reason.code, Some(Code::NOT_SUPPORTED));
        assert_eq!(reason.to_string(), Explained(&error).to_string());

        let unit = Reason::from(Error::driver(Call::MemCreate, Code(4242)));
        assert_eq!(unit.kind, "Driver");
        assert_eq!(unit.message, "cuMemCreate failed: unknown code 4242");
    }
}
