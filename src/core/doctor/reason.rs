//! Errors as text, for a report, or from a probe to its parent.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::driver::{Call, Code};
use crate::error::RUN_DOCTOR;
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
        let remedy = in_report(error).to_owned();
        Self {
            kind,
            message: Explained(error).message(),
            remedy,
            call: source.map(|source| source.call),
            code: source.map(|source| source.code),
        }
    }
}

/// Returns an error's remedy, without the advice to run the doctor, which shows it.
fn in_report(error: &Error) -> &'static str {
    match (error, error.remedy()) {
        (Error::PlatformUnsupported { .. }, _) => "use a path that this report answers with yes",
        (_, RUN_DOCTOR) => {
            "look the code up in the documentation of the CUDA driver API, and look for NVRM and Xid in the kernel's \
             log (dmesg)"
        }
        (_, remedy) => match remedy.split_once(" (`egmem doctor` shows") {
            Some((remedy, _)) => remedy,
            None => remedy,
        },
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
        assert!(reason.to_string().starts_with(&Explained(&error).message()));

        let unit = Reason::from(Error::driver(Call::MemCreate, Code(4242)));
        assert_eq!(unit.kind, "Driver");
        assert_eq!(unit.message, "cuMemCreate failed: unknown code 4242");
    }

    #[test]
    fn no_remedy_in_a_report_is_to_run_the_doctor() {
        let codes = (0..1000).map(Code);
        let errors = codes.map(|code| Error::driver(Call::Init, code));
        let unsupported = Error::unsupported("fabric handles", None);
        for error in errors.chain([unsupported]) {
            let reason = Reason::from(error);
            assert!(!reason.remedy.contains("egmem doctor"), "{reason}");
        }
    }
}
