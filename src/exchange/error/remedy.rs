//! The remedy of each error.

use super::{End, Error};
use crate::DriverError;
use crate::driver::Explain;

impl Error {
    /// Returns what to do about it, in a sentence; nothing where the text says it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Share(error) => error.remedy(),
            Self::Insecure { .. } => {
                "give certificates (`egmem certs init`, `egmem certs issue`), or allow plain TCP, which \
                 anyone on the network path can read: `--plain-anywhere`, `plain_anywhere = true` of `egmem serve`, \
                 `Security::PlainAnywhere`"
            }
            Self::TlsAtOneEnd { here: false, .. } => {
                "give ca, cert and key: certificates of an authority that the other end trusts"
            }
            Self::TlsAtOneEnd { here: true, .. } => {
                "give the other end certificates too, or connect to an address of it that has TLS"
            }
            Self::Tls { .. } => "check the file's path, form, owner and dates",
            Self::Refused { reason, .. } => reason.remedy(),
            Self::Mismatched { what, .. } => what.remedy(),
            Self::Stale { .. } => "look the name up and fetch it again",
            Self::Import { end, source, .. } => match end {
                End::Here => source.remedy(),
                End::There => "check that the exporter still has the memory, and fetch it again",
                End::Between => {
                    "check that both nodes are in one IMEX domain and its links are up (nvidia-imex-ctl -N); \
                     fetch it again, because the exporter may have ended meanwhile"
                }
                End::SameMachine => {
                    "take a POSIX fd: have the server listen at a unix: address too, and mount the folder of that socket into \
                     this container at the same path"
                }
            },
            Self::DataPlane { .. } => {
                "the control connection works, the memory's does not: check the IMEX domain's state and \
                 the links on both nodes (nvidia-imex-ctl -N, nvidia-smi nvlink -s)"
            }
            Self::NoCommonHandle { .. } => {
                "give every node an IMEX channel of one domain, or keep to the processes of one machine"
            }
            Self::Interrupted => "call it again; a creation or deletion may have happened",
            Self::LimitReached { .. } => "raise the limit, or use less",
            Self::Directory { .. } => {
                "check the directory's address and credentials; exporters can be asked directly meanwhile"
            }
        }
    }
}

impl Explain for Error {
    fn remedy(&self) -> &'static str {
        self.remedy()
    }

    fn untold_call(&self) -> Option<DriverError> {
        match self {
            Self::Share(error) => error.untold_call(),
            // An import's text has its source's, without the call.
            Self::Import { source, .. } => source.untold_call(),
            _ => None,
        }
    }
}
