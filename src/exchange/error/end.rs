//! Which of two ends a failure is at.

use std::fmt;
use std::io::ErrorKind;

use crate::MemoryError;
use crate::driver::{Code, HandleType};

/// Where to look when an operation between two processes fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum End {
    /// In this process, on this machine.
    Here,
    /// At the other end.
    There,
    /// At both ends, or between them: the IMEX domain, the links.
    Between,
    /// At the way between two processes of one machine: a fabric handle was refused there, and no POSIX fd came.
    SameMachine,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Here => "look at this end",
            Self::There => "look at its end",
            Self::Between => "look at both ends and the fabric between them",
            Self::SameMachine => {
                "both ends are on this machine, and no POSIX fd came, only a fabric handle"
            }
        })
    }
}

impl End {
    /// Returns where to look when memory that arrived as `via`, from this machine or from another, cannot be imported
    /// for this reason.
    pub(crate) fn of(error: &MemoryError, via: HandleType, same_machine: bool) -> Self {
        match error {
            MemoryError::InvalidArgument { what, .. }
                if matches!(*what, "description" | "handles") =>
            {
                Self::There
            }
            // The exporter has ended before it sent all handles.
            MemoryError::System {
                kind: ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe,
                ..
            } => Self::There,
            // The handle refers to nothing, or to nothing reachable.
            MemoryError::Driver(source) => match source.code {
                Code::OUT_OF_MEMORY | Code::NOT_PERMITTED => Self::Here,
                _ if via == HandleType::Fabric && same_machine => Self::SameMachine,
                _ if via == HandleType::Fabric => Self::Between,
                Code::INVALID_VALUE | Code::INVALID_HANDLE | Code::UNKNOWN => Self::There,
                _ => Self::Here,
            },
            _ => Self::Here,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Call;

    #[test]
    fn each_failure_points_somewhere() {
        let driver = |code| MemoryError::driver(Call::MemImportFromShareableHandle, code);
        for (error, via, end) in [
            (driver(Code::INVALID_VALUE), HandleType::PosixFd, End::There),
            (
                driver(Code::INVALID_VALUE),
                HandleType::Fabric,
                End::Between,
            ),
            (driver(Code::OUT_OF_MEMORY), HandleType::Fabric, End::Here),
            (
                MemoryError::invalid("description", ""),
                HandleType::PosixFd,
                End::There,
            ),
            (
                MemoryError::invalid("access", ""),
                HandleType::PosixFd,
                End::Here,
            ),
        ] {
            assert_eq!(End::of(&error, via, false), end, "{error} {via}");
            let here = match end {
                End::Between => End::SameMachine,
                end => end,
            };
            assert_eq!(End::of(&error, via, true), here, "{error} {via}");
        }
    }
}
