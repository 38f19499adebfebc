//! How calls inside the simulator answer.

use std::io;

use crate::Code;

/// The result of a call inside the simulator.
pub(super) type Answer<T> = Result<T, Fail>;

/// Why a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fail {
    /// With this code.
    Code(Code),
    /// The device's context is lost.
    Lost { device: i32, code: Code },
}

impl From<Code> for Fail {
    fn from(code: Code) -> Self {
        Self::Code(code)
    }
}

pub(super) fn fail<T>(code: Code) -> Answer<T> {
    Err(Fail::Code(code))
}

/// The operating system has run out of a resource.
pub(super) fn exhausted(_: io::Error) -> Fail {
    Fail::Code(Code::OUT_OF_MEMORY)
}
