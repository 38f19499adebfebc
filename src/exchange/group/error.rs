//! The failures of joining a group and of its calls.

use std::fmt::{self, Write};

use crate::driver::Explain;
use crate::text::Escaping;
use crate::{DriverError, MemoryError, ShareError};

/// A result with the groups' [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The failures of joining a group and of its barriers and gathers; [`Error::remedy`] says what to do.
///
/// Its text has no control characters.
// The texts of the variants are below, in `describe`, which escapes all of them.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A failure that any use of the exchange may meet.
    #[error(transparent)]
    Exchange(#[from] crate::Error),
    /// Ranks of a group did not join, or did not enter a barrier or a gather, in time; or they have left
    /// or were lost.
    RanksMissing {
        /// The group.
        group: String,
        /// The missing ranks.
        missing: Vec<u32>,
        /// The number of ranks in the group.
        size: u32,
    },
    /// Ranks of a group have called different operations, or with different sizes, as their same call.
    RanksDisagree {
        /// The group.
        group: String,
        /// The calls of two of the ranks.
        reasons: Vec<String>,
    },
}

impl Error {
    /// Returns what to do about it, in a sentence; nothing where the text says it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Exchange(error) => error.remedy(),
            Self::RanksMissing { .. } => {
                "check that each missing rank has started, with the same group, size and address, and has not ended"
            }
            Self::RanksDisagree { .. } => {
                "call the same operations in the same order, with the same number of bytes, in every rank"
            }
        }
    }

    /// Returns the exchange's error that this error carries, if it does.
    pub const fn exchange(&self) -> Option<&crate::Error> {
        match self {
            Self::Exchange(error) => Some(error),
            _ => None,
        }
    }

    /// Returns the memory's error that this error carries, if it does.
    pub const fn memory(&self) -> Option<&MemoryError> {
        match self {
            Self::Exchange(error) => error.memory(),
            _ => None,
        }
    }

    /// Returns the failed driver call behind the error, if any.
    pub const fn driver_error(&self) -> Option<DriverError> {
        match self {
            Self::Exchange(error) => error.driver_error(),
            _ => None,
        }
    }

    fn describe(&self, f: &mut Escaping<'_, '_>) -> fmt::Result {
        match self {
            // The error inside escapes its own text.
            Self::Exchange(error) => write!(f.0, "{error}"),
            Self::RanksMissing {
                group,
                missing,
                size,
            } => write!(f, "group {group}: {} missing", ranks(missing, *size)),
            Self::RanksDisagree { group, reasons } => {
                write!(f, "group {group}: ranks disagree: {}", reasons.join("; "))
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
            Self::Exchange(error) => error.untold_call(),
            _ => None,
        }
    }
}

impl From<MemoryError> for Error {
    fn from(error: MemoryError) -> Self {
        Self::Exchange(error.into())
    }
}

impl From<ShareError> for Error {
    fn from(error: ShareError) -> Self {
        Self::Exchange(error.into())
    }
}

/// One line without control characters: a group's name and the reasons may come from a peer.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(&mut Escaping(f))
    }
}

/// Formats missing ranks: `rank 1 of 2 is`, `ranks 1, 3 of 4 are`.
fn ranks(missing: &[u32], size: u32) -> String {
    const SHOWN: usize = 16;
    let mut text = missing
        .iter()
        .take(SHOWN)
        .map(u32::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if missing.len() > SHOWN {
        text += &format!(" and {} more", missing.len() - SHOWN);
    }
    match missing {
        [_] => format!("rank {text} of {size} is"),
        _ => format!("ranks {text} of {size} are"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Call, Code, Explained, Location};

    #[test]
    fn each_layer_carries_the_errors_of_those_below() {
        let source = DriverError {
            call: Call::MemCreate,
            code: Code::OUT_OF_MEMORY,
        };
        let memory = MemoryError::OutOfMemory {
            location: Location::HostNuma(0),
            requested: 1 << 20,
            source,
        };
        let share = ShareError::from(memory.clone());
        let exchange = crate::Error::from(share.clone());
        let error = Error::from(exchange.clone());
        assert_eq!(crate::Error::from(memory.clone()), exchange);
        assert_eq!(Error::from(share.clone()), error);
        assert_eq!(Error::from(memory.clone()), error);
        assert_eq!(error.exchange(), Some(&exchange));
        assert_eq!(exchange.share(), Some(&share));
        for found in [share.memory(), exchange.memory(), error.memory()] {
            assert_eq!(found, Some(&memory));
        }
        let found = [
            share.driver_error(),
            exchange.driver_error(),
            error.driver_error(),
        ];
        assert_eq!(found, [Some(source); 3]);
        // All have the text of the first, with its driver call and its remedy.
        let text = Explained(&memory).to_string();
        assert!(text.contains(&source.to_string()), "{text}");
        assert_eq!(Explained(&share).to_string(), text);
        assert_eq!(Explained(&exchange).to_string(), text);
        assert_eq!(Explained(&error).to_string(), text);
    }
}
