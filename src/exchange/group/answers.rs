//! What a group's server says to all ranks alike, as an error.

use super::handles::tidy;
use crate::exchange::protocol::Incomplete;
use crate::{Error, Refusal};

/// The error that says why ranks of a group of `size` did not come together, or did not gather; `what` is
/// that for people, `peer` the server.
pub(super) fn incomplete(
    group: &str,
    size: u32,
    peer: String,
    what: String,
    why: &Incomplete,
) -> Error {
    match Refusal::from_word(&why.reason) {
        Refusal::TimedOut | Refusal::Closing if !why.ranks.is_empty() => {
            let ranks = why.ranks.iter().copied();
            Error::RanksMissing {
                group: group.into(),
                missing: ranks.filter(|rank| *rank < size).collect(),
                size,
            }
        }
        Refusal::NoCommonHandle => Error::NoCommonHandle {
            reasons: reasons(why),
        },
        Refusal::RanksDisagree => Error::RanksDisagree {
            group: group.into(),
            reasons: reasons(why),
        },
        reason => Error::Refused {
            peer,
            what,
            reason,
            detail: tidy(&why.detail),
        },
    }
}

fn reasons(why: &Incomplete) -> Vec<String> {
    why.reasons.iter().map(|reason| tidy(reason)).collect()
}
