//! The remedy of each error.

use super::{End, Error, Refusal};
use crate::DriverError;
use crate::driver::Explain;

impl Error {
    /// Returns what to do about it, in a sentence.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Share(error) => error.remedy(),
            Self::Insecure { .. } => {
                "give certificates (`egmem certs init`, `egmem certs issue`), or allow plain TCP, which \
                 anyone on the network path can read: `--plain-anywhere`, `plain_anywhere = true` of `egmem serve`, \
                 Security::PlainAnywhere"
            }
            Self::Tls { .. } => "check the file's path, form, owner and dates",
            Self::Refused { reason, .. } => remedy_for_refusal(reason),
            Self::Mismatched { what, .. } => what.remedy(),
            Self::Stale { .. } => "look the name up and fetch it again",
            Self::Import { end, source, .. } => match end {
                End::Here => source.remedy(),
                End::There => "check that the exporter still has the memory, and fetch it again",
                End::Between => {
                    "check that both nodes are in one IMEX domain and its links are up (nvidia-imex-ctl -N); \
                     fetch it again, because the exporter may have ended meanwhile"
                }
            },
            Self::DataPlane { .. } => {
                "the control connection works, the memory's does not: check the IMEX domain's state and \
                 the links on both nodes (nvidia-imex-ctl -N, nvidia-smi nvlink -s)"
            }
            Self::NoCommonHandle { .. } => {
                "give every node an IMEX channel of one domain, or keep to the processes of one machine"
            }
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

fn remedy_for_refusal(reason: &Refusal) -> &'static str {
    match reason {
        Refusal::NotFound => "check the name with `egmem ls`, or wait for it",
        Refusal::ReadOnly => {
            "fetch it read-only (`--read-only`), or have its owner publish it read-write"
        }
        Refusal::Configured => {
            "remove its [[buffer]] from the service's configuration and restart the service"
        }
        Refusal::Forbidden => "have this peer's certificate name or user put on the other's list",
        Refusal::Unsupported | Refusal::Version => "update the older of the two",
        Refusal::Limit | Refusal::Quota => {
            "release what is not needed, or have the peer's limits raised"
        }
        Refusal::WrongOwner => {
            "do not use the memory: ask the administrator why another peer has the name"
        }
        Refusal::Exists => "choose another name, or withdraw the old one",
        Refusal::Closing | Refusal::Expired | Refusal::Stale => "fetch the name again later",
        Refusal::NoCommonHandle => "give both nodes an IMEX channel of one domain",
        Refusal::RanksDisagree => {
            "call the same operations in the same order, with the same number of bytes, in every rank"
        }
        Refusal::NoMemory => "ask for less, or for another node",
        Refusal::TimedOut => "try again, or wait longer",
        Refusal::NotTrusted => "renew this process's certificate and load it again",
        Refusal::Invalid => "correct the part of the request that the message names",
        Refusal::Internal | Refusal::Other(_) => "see the peer's log",
    }
}
