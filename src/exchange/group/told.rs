//! The answers to ranks that wait.

use std::collections::HashMap;
use std::sync::Arc;

use super::roster::Roster;
use crate::Refusal;
use crate::account::shrink;
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

impl Told {
    /// Returns the members from rank `first` on, which must begin a page.
    pub(super) fn page(roster: &Arc<Roster>, first: u32) -> Self {
        match roster.page(first) {
            Some(page) => Self::Members(Arc::clone(roster), page),
            None => Self::Refused(refused(Refusal::Invalid, "no page begins with that rank")),
        }
    }
}

pub(super) fn refused(reason: Refusal, detail: impl Into<String>) -> Refused {
    Refused {
        reason: reason.word().into(),
        detail: detail.into(),
    }
}

/// The requests that wait for an answer, and the answers that are not sent yet.
#[derive(Default)]
pub(super) struct Waiters {
    /// The round and the rank that each request waits for.
    pub(super) places: HashMap<Waiter, (u64, u32)>,
    told: Vec<(Waiter, Told)>,
}

impl Waiters {
    /// Lets a waiter take a rank's place. The rank's previous waiter, if any, is told.
    pub(super) fn wait(&mut self, of: &mut Option<Waiter>, waiter: Waiter, place: (u64, u32)) {
        let no = refused(Refusal::Stale, "the rank has asked again since");
        self.answer(of.replace(waiter), Told::Refused(no));
        self.places.insert(waiter, place);
    }

    /// Answers a waiter, if there is one, which then stops waiting.
    pub(super) fn answer(&mut self, waiter: impl Into<Option<Waiter>>, told: Told) {
        if let Some(waiter) = waiter.into() {
            self.forget(waiter);
            self.told.push((waiter, told));
        }
    }

    /// Forgets a waiter, if there is one; returns the place that it waited for.
    pub(super) fn forget(&mut self, waiter: impl Into<Option<Waiter>>) -> Option<(u64, u32)> {
        self.places.remove(&waiter.into()?)
    }

    /// Takes the answers that are due.
    pub(super) fn take_told(&mut self) -> Vec<(Waiter, Told)> {
        shrink(&mut self.places);
        std::mem::take(&mut self.told)
    }
}
