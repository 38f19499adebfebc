//! The memory that a rank keeps for the others after its calls.

use crate::share::Shared;

/// The state of this rank's barriers and gathers.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// The number of the last call.
    pub(super) last: u64,
    /// The memories that this rank shared in its last successful call and in later ones, with the calls' numbers.
    /// Other ranks may still map them until a later call has succeeded, and a fabric handle opens nothing once the
    /// memory is freed.
    pub(super) kept: Vec<(u64, Shared)>,
}

impl Calls {
    /// Takes the memory that was shared in a call.
    pub(super) fn take(&mut self, of: u64) -> Vec<(u64, Shared)> {
        self.kept
            .extract_if(.., |(number, _)| *number == of)
            .collect()
    }

    /// Takes the memories that were shared before a call that has succeeded.
    pub(super) fn before(&mut self, succeeded: u64) -> Vec<(u64, Shared)> {
        let before = |kept: &mut (u64, Shared)| kept.0 < succeeded;
        self.kept.extract_if(.., before).collect()
    }
}
