//! The next step of a follow after a request or a fetch has failed.

use std::time::Duration;

use tokio::time::Instant;

use super::super::decide::{Fate, Seen, fate};
use super::super::followed::Absence;
use super::super::slot::{Offered, Told};
use super::Follower;
use crate::client::Reconnect;
use crate::limits::deadline;
use crate::{Error, Refusal, Result};

/// The number of attempts that fail for a reason that is not known to pass, before the follow ends.
const ATTEMPTS: u32 = 3;

/// Failures in a row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Failures {
    all: u32,
    /// Those of which it is not known whether they pass.
    unknown: u32,
}

impl Failures {
    /// Counts a failure.
    ///
    /// # Errors
    /// The same error, if no further attempt is made.
    fn count(&mut self, error: &Error) -> Result<()> {
        match fate(error) {
            Fate::Final | Fate::Rejected => return Err(error.clone()),
            Fate::Passes => {}
            Fate::Unknown => {
                self.unknown = self.unknown.saturating_add(1);
                if self.unknown >= ATTEMPTS {
                    return Err(error.clone());
                }
            }
        }
        self.all = self.all.saturating_add(1);
        Ok(())
    }
}

impl Follower {
    /// Notes that the server did not answer a look-up of the name. The follow keeps its knowledge of the name: a
    /// lease that is held says that its memory is still there.
    pub(super) fn look_failed(&mut self, error: Error) -> Result<()> {
        self.check_open()?;
        let pause = self.pause_after(self.looks.all);
        self.looks.count(&error)?;
        tracing::debug!(name = self.fetch.name, %error, "cannot look a followed name up");
        let view = self.slot.view();
        let returned = view
            .returned
            .as_ref()
            .is_some_and(|memory| memory.is_held())
            && matches!(view.told, Told::Memory);
        let offered = matches!(&view.offered, Offered::Memory(memory) if memory.is_held());
        if !returned && !offered {
            self.seen = Seen::Absent(Absence::Unavailable(error));
        }
        self.stale = true;
        self.not_before = Some(pause);
        Ok(())
    }

    /// Notes that the memory could not be fetched: the next attempt follows after a pause, if another may help.
    pub(super) fn fetch_failed(&mut self, error: Error) -> Result<()> {
        self.check_open()?;
        if fate(&error) == Fate::Rejected {
            tracing::debug!(name = self.fetch.name, %error, "followed memory is rejected");
            self.seen = Seen::Absent(Absence::Unavailable(error.clone()));
            self.rejected = Some(error);
            return Ok(());
        }
        let pause = self.pause_after(self.fetches.all);
        self.fetches.count(&error)?;
        tracing::debug!(name = self.fetch.name, %error, "followed memory is not available");
        self.seen = Seen::Absent(match error.refusal() {
            Some(Refusal::NotFound) => Absence::NotThere,
            _ => Absence::Unavailable(error),
        });
        self.stale = true;
        self.not_before = Some(pause);
        Ok(())
    }

    /// Notes that a fetch returned other memory than the entry says, or memory that is withdrawn already. News
    /// of it may be on their way, so the caller is told only if that happens again.
    pub(super) fn not_as_listed(&mut self, denoted: bool) {
        let pause = self.pause_after(self.unmatched);
        self.unmatched = self.unmatched.saturating_add(1);
        if self.unmatched >= ATTEMPTS && matches!(self.seen, Seen::Present(_)) {
            let why = match denoted {
                true => "its exporter withdraws it at once",
                false => "the server grants other memory than it lists under the name",
            };
            self.seen = Seen::Absent(Absence::Unavailable(Error::Stale {
                what: format!("the lease on '{}'", self.fetch.name),
                why: why.into(),
            }));
        }
        self.stale = true;
        self.not_before = Some(pause);
    }

    /// # Errors
    /// Why the client has ended, if it has.
    fn check_open(&self) -> Result<()> {
        match self.session().is_open() {
            true => Ok(()),
            false => Err(self.session().down()),
        }
    }

    /// When the pause after so many failures ends, if it begins now.
    pub(super) fn pause_after(&self, failures: u32) -> Instant {
        let mut reconnect = self.session().dial.options.reconnect;
        if reconnect.is_never() {
            reconnect = Reconnect::default();
        }
        let pause = reconnect.pause(failures);
        deadline(pause.max(Duration::from_millis(1)))
    }
}
