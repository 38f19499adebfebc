//! The failures of groups.

use std::fmt;

use crate::driver::Explain;
use crate::text::escape;
use crate::{DriverError, MemoryError, ShareError};

/// A result with the groups' [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The failures of a group; [`Error::remedy`] says what to do.
///
/// Its text has no control characters.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A failure of this rank that any use of the exchange may meet.
    #[error(transparent)]
    Exchange(#[from] crate::Error),
    /// Ranks did not come in time, or have ended.
    #[error("{} missing", ranks(.missing, *.size))]
    RanksMissing {
        /// The missing ranks.
        missing: Vec<u32>,
        /// The number of ranks in the group.
        size: u32,
    },
    /// Other ranks have failed; this one has not.
    #[error("{}", escape(&.reasons.join("; ")))]
    RanksFailed {
        /// Each failed rank and its reason.
        reasons: Vec<String>,
    },
    /// A contribution is not sealed with this group's secret, for its rank and this gather: the secrets differ, or it was
    /// changed, replayed or swapped on its way.
    #[error(
        "the contribution of rank {rank} is not sealed with this group's secret for this gather"
    )]
    Forged {
        /// The rank whose contribution it should be.
        rank: u32,
    },
    /// The ranks' transport has failed, or returned what it should not.
    #[error("the ranks' all-gather: {}", escape(.detail))]
    AllGather {
        /// The fault.
        detail: String,
    },
}

impl Error {
    /// Creates the error of a transport.
    pub fn all_gather(detail: impl fmt::Display) -> Self {
        Self::AllGather {
            detail: detail.to_string(),
        }
    }

    /// Returns what to do about it, in a sentence; nothing where the text says it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Exchange(error) => error.remedy(),
            Self::RanksMissing { .. } => {
                "check that each missing rank has started, with the same size, address and secret, and has not ended"
            }
            Self::RanksFailed { .. } => "see the failed ranks' own errors",
            Self::Forged { .. } => {
                "give all ranks the same secret; if they have it, something between them changes their messages"
            }
            Self::AllGather { .. } => {
                "see the transport's own log; let all ranks call it equally often"
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

/// Formats missing ranks: `rank 1 of 2 is`, `ranks 1, 3 of 4 are`.
fn ranks(missing: &[u32], size: u32) -> String {
    const SHOWN: usize = 16;
    let shown = missing.iter().take(SHOWN).map(u32::to_string);
    let mut text = shown.collect::<Vec<_>>().join(", ");
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

    #[test]
    fn other_ranks_texts_cannot_steer_a_terminal() {
        let reasons = vec!["rank 1: a\u{1b}[2Jb".into(), "c\nd".into()];
        let text = Error::RanksFailed { reasons }.to_string();
        assert_eq!(text, "rank 1: a\\u{1b}[2Jb; c\\nd");
        let missing = |missing: Vec<u32>| Error::RanksMissing { missing, size: 40 }.to_string();
        assert_eq!(missing(vec![3]), "rank 3 of 40 is missing");
        let many = missing((0..40).collect());
        assert!(many.ends_with("15 and 24 more of 40 are missing"), "{many}");
    }
}
