//! The end of a follow's task.

use std::sync::Arc;

use super::super::slot::Slot;
use crate::Error;
use crate::client::session::ClientSession;

/// Says that the task has ended, whatever ended it.
pub(super) struct Ends {
    slot: Arc<Slot>,
    session: Arc<ClientSession>,
    /// `None` while the task runs.
    why: Option<Error>,
}

impl Ends {
    pub(super) fn new(slot: &Arc<Slot>, session: &Arc<ClientSession>) -> Self {
        Self {
            slot: Arc::clone(slot),
            session: Arc::clone(session),
            why: None,
        }
    }

    pub(super) fn because(mut self, why: Error) {
        self.why = Some(why);
    }

    /// Why a task ends that has not found a reason.
    fn cut_off(&self) -> Error {
        if !self.session.is_open() {
            return self.session.down();
        }
        let why = match std::thread::panicking() {
            true => "the task that follows the name has panicked",
            false => "the client's runtime has ended",
        };
        Error::peer_lost(self.session.peer(), why)
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        let why = self.why.take().unwrap_or_else(|| self.cut_off());
        self.slot.end(why);
    }
}
