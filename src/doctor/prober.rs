//! Who tries, and what is answered.

use serde::{Deserialize, Serialize};

use super::Reason;
use crate::capability::{Capabilities, Support, Trial};

/// What came of a trial, in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// It works.
    Yes,
    /// It does not.
    No {
        /// Why, and what to do.
        reason: Reason,
    },
    /// It could not be found out.
    Unknown {
        /// Why, and what to do.
        reason: Reason,
    },
}

impl Answer {
    /// Whether it works.
    pub const fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    /// Why it does not, or why that is not known.
    pub const fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Yes => None,
            Self::No { reason } | Self::Unknown { reason } => Some(reason),
        }
    }
}

impl From<Support> for Answer {
    fn from(support: Support) -> Self {
        match support {
            Support::Yes => Self::Yes,
            Support::No(error) => Self::No {
                reason: error.into(),
            },
            Support::Unknown(error) => Self::Unknown {
                reason: error.into(),
            },
        }
    }
}

/// Carries out trials, in this process or, so as to survive a driver that crashes, in others.
pub trait Prober {
    /// Opens the driver once, as a trial would, to see that this can be survived.
    ///
    /// # Errors
    /// In words, those of [`Driver::open`](crate::Driver::open), and [`Error::ProbeDied`](crate::Error::ProbeDied).
    fn open(&mut self) -> Result<(), Reason>;

    /// Tries all of `trials`, which are for one location and path. One answer each, in order.
    fn try_all(&mut self, trials: &[Trial]) -> Vec<Answer>;
}

/// Tries in this process: what crashes takes the process along.
#[derive(Clone, Debug)]
pub struct InProcess(pub Capabilities);

impl Prober for InProcess {
    fn open(&mut self) -> Result<(), Reason> {
        Ok(())
    }

    fn try_all(&mut self, trials: &[Trial]) -> Vec<Answer> {
        trials
            .iter()
            .map(|&trial| self.0.trial(trial).into())
            .collect()
    }
}

/// One trial with its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// What was tried.
    #[serde(flatten)]
    pub trial: Trial,
    /// What came of it.
    #[serde(flatten)]
    pub answer: Answer,
}
