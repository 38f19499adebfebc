//! Decides the next step of a follow, without any I/O.

use super::followed::Absence;
use super::generation::Generation;
use super::slot::{Offered, Told, View};
use crate::client::greet::{is_final, may_pass};
use crate::{Error, MemoryError, Refusal, ShareError};

/// The state of the name as this client knows it.
#[derive(Debug)]
pub(super) enum Seen {
    Unknown,
    Absent(Absence),
    Present(Generation),
}

/// The next step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Take the offer back: it is out of date.
    Retract,
    /// Tell the caller that the name has no memory.
    Gone,
    /// Fetch the memory and offer it.
    Fetch,
}

/// How to treat a failed fetch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It ends the follow.
    Final,
    /// This memory cannot be fetched by this client, but other memory under the name may be.
    Rejected,
    Passes,
    /// Unknown whether it will pass: try a few times.
    Unknown,
}

/// Returns the next step for the `seen` state of the name.
pub(super) fn due(seen: &Seen, view: &View) -> Due {
    match seen {
        Seen::Unknown => Due::Nothing,
        Seen::Absent(_) => match (&view.told, &view.offered) {
            (Told::Gone, Offered::Nothing) | (Told::Nothing | Told::Memory, Offered::Gone) => {
                Due::Nothing
            }
            (Told::Gone, _) => Due::Retract,
            _ if view.wanted => Due::Gone,
            (_, Offered::Memory(_)) => Due::Retract,
            _ => Due::Nothing,
        },
        Seen::Present(generation) => {
            let has =
                view.returned.as_ref().is_some_and(|returned| {
                    returned.generation == *generation && returned.is_held()
                }) && matches!(view.told, Told::Memory);
            match &view.offered {
                Offered::Nothing if has => Due::Nothing,
                _ if has => Due::Retract,
                Offered::Memory(offer) if offer.generation == *generation && offer.is_held() => {
                    Due::Nothing
                }
                Offered::Memory(_) => Due::Retract,
                // "No memory" stays true until the fetch succeeds.
                _ if view.wanted => Due::Fetch,
                Offered::Gone => Due::Retract,
                Offered::Nothing => Due::Nothing,
            }
        }
    }
}

pub(super) fn fate(error: &Error) -> Fate {
    use Refusal::*;
    match error {
        error if may_pass(error) => Fate::Passes,
        error if is_final(error) => Fate::Final,
        // The ticket is from before a restart of the server.
        Error::Stale { .. } => Fate::Passes,
        Error::Refused { reason, .. } => match reason {
            NotFound | Expired | TimedOut | Quota | NoMemory => Fate::Passes,
            Internal | Other(_) => Fate::Unknown,
            ReadOnly | WrongOwner | NoCommonHandle => Fate::Rejected,
            _ => Fate::Final,
        },
        Error::Mismatched { .. } | Error::NoCommonHandle { .. } => Fate::Rejected,
        Error::Share(
            ShareError::Memory(MemoryError::InvalidArgument { .. }) | ShareError::Protocol { .. },
        ) => Fate::Final,
        _ => Fate::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::Description;

    fn refused(reason: Refusal) -> Error {
        Error::refused("node-a", "'x'", reason, String::new())
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        use Refusal::*;
        for reason in [Closing, Limit, NotFound, Expired, TimedOut, Quota, NoMemory] {
            assert_eq!(fate(&refused(reason.clone())), Fate::Passes, "{reason:?}");
        }
        for reason in [Forbidden, NotTrusted, Version, Unsupported, Invalid, Stale] {
            assert_eq!(fate(&refused(reason.clone())), Fate::Final, "{reason:?}");
        }
        for reason in [ReadOnly, WrongOwner, NoCommonHandle] {
            assert_eq!(fate(&refused(reason.clone())), Fate::Rejected, "{reason:?}");
        }
        for reason in [Internal, Other("new".into())] {
            assert_eq!(fate(&refused(reason.clone())), Fate::Unknown, "{reason:?}");
        }
        let detail = || "x".to_owned();
        let (peer, why) = (detail(), detail());
        assert_eq!(fate(&Error::peer_lost(peer, why)), Fate::Passes);
        let (what, peer) = (detail(), detail());
        let detail = detail();
        assert_eq!(
            fate(&Error::DataPlane { what, peer, detail }),
            Fate::Unknown
        );
    }

    #[test]
    fn what_is_due_for_whom() {
        let memory = Description {
            len: 1,
            offset: None,
            access: crate::driver::Access::Read,
            parts: Vec::new(),
        };
        let present = || Seen::Present(Generation::of(&memory));
        let absent = || Seen::Absent(Absence::NotThere);
        let view = |wanted, told, offered| View {
            wanted,
            told,
            returned: None,
            offered,
        };
        for (seen, view, expected) in [
            (
                Seen::Unknown,
                view(true, Told::Nothing, Offered::Nothing),
                Due::Nothing,
            ),
            (
                absent(),
                view(true, Told::Nothing, Offered::Nothing),
                Due::Gone,
            ),
            (
                absent(),
                view(false, Told::Nothing, Offered::Nothing),
                Due::Nothing,
            ),
            (
                absent(),
                view(true, Told::Memory, Offered::Nothing),
                Due::Gone,
            ),
            (
                absent(),
                view(true, Told::Memory, Offered::Gone),
                Due::Nothing,
            ),
            (
                absent(),
                view(true, Told::Gone, Offered::Nothing),
                Due::Nothing,
            ),
            (
                absent(),
                view(false, Told::Gone, Offered::Gone),
                Due::Retract,
            ),
            (
                present(),
                view(true, Told::Gone, Offered::Nothing),
                Due::Fetch,
            ),
            (present(), view(true, Told::Gone, Offered::Gone), Due::Fetch),
            (
                present(),
                view(false, Told::Gone, Offered::Gone),
                Due::Retract,
            ),
            (
                present(),
                view(false, Told::Nothing, Offered::Nothing),
                Due::Nothing,
            ),
            // No memory was returned yet, so it cannot be the same.
            (
                present(),
                view(true, Told::Memory, Offered::Nothing),
                Due::Fetch,
            ),
        ] {
            assert_eq!(due(&seen, &view), expected, "{seen:?} {view:?}");
        }
    }
}
