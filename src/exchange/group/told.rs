//! The answers to ranks that wait.

use std::sync::Arc;

use super::roster::Roster;
use crate::Refusal;
use crate::protocol::{Agreed, Incomplete, Refused};

/// A request that waits for its answer.
pub(super) type Waiter = u64;

/// The answer to a waiter.
#[derive(Clone)]
pub(super) enum Told {
    Agreed(Agreed),
    Members(Arc<Roster>, usize),
    Done,
    Incomplete(Arc<Incomplete>),
    Refused(Refused),
}

pub(super) fn refused(reason: Refusal, detail: impl Into<String>) -> Refused {
    Refused {
        reason: reason.word().into(),
        detail: detail.into(),
    }
}
