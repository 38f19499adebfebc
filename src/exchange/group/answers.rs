//! Turns the server's answer to all ranks into an error.

use super::error::Error;
use super::handles::tidy;
use crate::Refusal;
use crate::protocol::Incomplete;

/// Returns the error for a failed join or gather of a group of `size` ranks. `what` describes the operation
/// for people; `peer` is the server.
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
        Refusal::NoCommonHandle => Error::Exchange(crate::Error::NoCommonHandle {
            reasons: reasons(why),
        }),
        Refusal::RanksDisagree => Error::RanksDisagree {
            group: group.into(),
            reasons: reasons(why),
        },
        reason => Error::Exchange(crate::Error::refused(peer, what, reason, tidy(&why.detail))),
    }
}

fn reasons(why: &Incomplete) -> Vec<String> {
    why.reasons.iter().map(|reason| tidy(reason)).collect()
}
