//! Failed driver calls, and the errors that contain one.

use super::Error;
use crate::{Call, Code};

/// A driver call that failed, and the code it failed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {code}")]
pub struct DriverError {
    /// The call.
    pub call: Call,
    /// Its result.
    pub code: Code,
}

impl Error {
    /// Creates the error of a failed driver call.
    pub const fn driver(call: Call, code: Code) -> Self {
        Self::Driver(DriverError { call, code })
    }

    /// Returns the failed driver call behind the error, if any.
    pub const fn driver_error(&self) -> Option<DriverError> {
        match self {
            Self::Driver(source)
            | Self::NoImexChannel { source, .. }
            | Self::OutOfMemory { source, .. }
            | Self::OutOfAddresses { source, .. }
            | Self::TooManyReferences { source }
            | Self::TooManyMappings { source, .. }
            | Self::NoPeerAccess { source, .. }
            | Self::ContextLost { source, .. } => Some(*source),
            Self::PlatformUnsupported { source, .. } => *source,
            _ => None,
        }
    }

    /// Returns the result code behind the error, if a driver call failed.
    pub const fn code(&self) -> Option<Code> {
        match self.driver_error() {
            Some(source) => Some(source.code),
            None => None,
        }
    }
}
