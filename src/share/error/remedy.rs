//! The remedy of each error.

use super::Error;
use crate::DriverError;
use crate::driver::Explain;

impl Error {
    /// Returns what to do about it, in a sentence.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Memory(error) => error.remedy(),
            Self::NotTrusted { cause, .. } => cause.remedy(),
            Self::Unreachable { cause, .. } => cause.remedy(),
            Self::PeerLost { .. } => {
                "check the peer's process and its log, and the network; what was imported from it before stays mapped until dropped, but its \
                 contents are no longer maintained"
            }
            Self::Protocol { .. } => {
                "check that the address is an egmem exchange and that both ends run compatible versions"
            }
            Self::TimedOut { .. } => "check that the peer runs, or wait longer",
        }
    }
}

impl Explain for Error {
    fn remedy(&self) -> &'static str {
        self.remedy()
    }

    fn untold_call(&self) -> Option<DriverError> {
        match self {
            Self::Memory(error) => error.untold_call(),
            _ => None,
        }
    }
}
