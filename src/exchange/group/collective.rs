//! The gathers of a complete round: which ranks have entered, and the results of the last gathers.
//!
//! Each rank numbers its gathers from 1, and a gather is the same for all ranks that enter its number. It
//! completes when all ranks have entered, or fails for all of them; only then can the next number be entered.
//! A barrier is a gather without data. Only the join, the gather that ranks are
//! entering, and the last completed one keep the ranks' data.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::roster::Roster;
use super::told::{Told, Waiter, refused};
use crate::Refusal;
use crate::account::Charge;
use crate::driver::HandleType;
use crate::protocol::{Agreed, Fds, Handles, Incomplete, Payload, Secret};
use crate::share::Description;
use crate::transport::HeldFd;

/// The arguments on which all ranks of a gather must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Barrier,
    /// This many bytes from each rank.
    Bytes(usize),
    Memory,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Barrier => f.write_str("a barrier"),
            Self::Bytes(bytes) => write!(f, "a gather of {bytes} bytes"),
            Self::Memory => f.write_str("a gather of memory"),
        }
    }
}

/// Handles that a rank gives to the others.
pub(super) enum Given {
    Fabric(Vec<Secret>),
    /// Counted for their peer as long as the round keeps them.
    Fds(Vec<HeldFd>),
    /// One fd, through which each rank requests those of the parts.
    Source(Vec<HeldFd>),
}

impl Given {
    /// Returns the handles as a message has them, after moving fds to those of all ranks.
    pub(super) fn into_message(self, fds: &mut Vec<HeldFd>) -> Handles {
        match self {
            Self::Fabric(own) => Handles::Fabric(own),
            Self::Fds(own) => {
                let count = u32::try_from(own.len()).unwrap_or(u32::MAX);
                fds.extend(own);
                Handles::Fds(Fds::of(count))
            }
            Self::Source(own) => {
                fds.extend(own);
                Handles::Fds(Fds::from_source())
            }
        }
    }
}

/// A rank's part in a gather.
pub(super) enum Contribution {
    Nothing,
    Bytes(Payload),
    Memory(Option<Description>, Given),
}

impl Contribution {
    pub(super) fn shape(&self) -> Shape {
        match self {
            Self::Nothing => Shape::Barrier,
            Self::Bytes(bytes) => Shape::Bytes(bytes.expose().len()),
            Self::Memory(..) => Shape::Memory,
        }
    }

    pub(super) fn parts(&self) -> usize {
        match self {
            Self::Memory(Some(memory), _) => memory.parts.len(),
            _ => 0,
        }
    }

    /// Returns the number of handles.
    pub(super) fn handles(&self) -> usize {
        match self {
            Self::Memory(Some(_), Given::Source(own)) => own.len(),
            _ => self.parts(),
        }
    }
}

/// A rank that has entered.
pub(super) struct Entered {
    pub(super) contribution: Contribution,
    /// `None` while its connection is broken.
    pub(super) waiter: Option<Waiter>,
    /// When the gather fails for all ranks, because of this rank's deadline.
    pub(super) deadline: Duration,
    /// For the bytes that it contributed.
    pub(super) charge: Option<Charge>,
}

/// The result that ranks are sent.
#[derive(Default)]
pub(super) enum Outcome {
    Nothing,
    /// The members, kept until a time for ranks whose connection broke. If they have handles, a rank learns first how
    /// many.
    Members(Arc<Roster>, Option<Agreed>, Duration),
    /// No longer or not yet kept.
    #[default]
    Forgotten,
}

impl Outcome {
    /// Returns the time until which the result is kept.
    pub(super) fn until(&self) -> Option<Duration> {
        match self {
            Self::Members(_, _, until) => Some(*until),
            Self::Nothing | Self::Forgotten => None,
        }
    }

    /// Drops the result when its time is over.
    fn forget(&mut self, now: Duration) {
        if self.until().is_some_and(|until| until <= now) {
            *self = Self::Forgotten;
        }
    }

    /// Returns the answer to a rank that asks for the members from `first` on, or has entered.
    pub(super) fn told(&self, first: Option<u32>) -> Told {
        match (self, first) {
            (Self::Nothing, None) => Told::Done,
            (Self::Nothing, Some(_)) => {
                Told::Refused(refused(Refusal::Invalid, "a barrier has no members"))
            }
            (Self::Members(_, Some(agreed), _), None) => Told::Agreed(*agreed),
            (Self::Members(roster, ..), first) => Told::page(roster, first.unwrap_or(0)),
            (Self::Forgotten, _) => {
                Told::Refused(refused(Refusal::Stale, "the members were sent already"))
            }
        }
    }
}

/// A completed gather.
pub(super) struct Completed {
    number: u64,
    outcome: Outcome,
}

/// The gathers of a round.
#[derive(Default)]
pub(super) struct Collective {
    /// The members that have joined, with the memory that they brought.
    pub(super) joined: Outcome,
    /// The number of gathers that are over: ranks enter the next one.
    pub(super) over: u64,
    pub(super) entered: BTreeMap<u32, Box<Entered>>,
    /// The last completed gather.
    pub(super) completed: Option<Completed>,
    /// Why gathers since the last that completed have failed: the last [`FAILURES`] of them, in order, each
    /// with the last number that it failed.
    failures: VecDeque<(u64, Arc<Incomplete>)>,
    /// The handle type by which memory is gathered.
    pub(super) via: Option<HandleType>,
    /// Whether ranks offer sources instead of many fds.
    pub(super) sources: bool,
}

/// The number of failures whose reasons are kept.
pub(super) const FAILURES: usize = 8;

impl Collective {
    /// Returns the number of the gather that ranks enter now.
    pub(super) const fn number(&self) -> u64 {
        self.over.saturating_add(1)
    }

    /// Returns the next time at which something changes without a request.
    pub(super) fn next(&self) -> Option<Duration> {
        let kept = self
            .completed
            .as_ref()
            .and_then(|completed| completed.outcome.until());
        let times = [self.deadline(), self.joined.until(), kept];
        times.into_iter().flatten().min()
    }

    /// Returns the time at which the current gather fails.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.entered.values().map(|entered| entered.deadline).min()
    }

    /// Drops the kept results whose time is over.
    pub(super) fn forget(&mut self, now: Duration) {
        self.joined.forget(now);
        if let Some(completed) = &mut self.completed {
            completed.outcome.forget(now);
        }
    }

    /// Returns the answer to a rank that asks for a gather that is over.
    ///
    /// A gather after the last completed one has failed. A waiting rank cannot ask for one before it: that
    /// gather completed only because all ranks had entered a later number.
    pub(super) fn ended(&self, number: u64, first: Option<u32>) -> Told {
        let mut is_after = true;
        if let Some(completed) = &self.completed {
            if completed.number == number {
                return completed.outcome.told(first);
            }
            is_after = completed.number < number;
        }
        let mut failures = self.failures.iter();
        match failures.find(|(last, _)| is_after && number <= *last) {
            Some((_, why)) => Told::Incomplete(Arc::clone(why)),
            None => Told::Refused(refused(
                Refusal::Stale,
                "the rank has entered a later gather",
            )),
        }
    }

    /// Records that all gathers up to `last` that are not over have failed.
    pub(super) fn fail(&mut self, last: u64, why: Arc<Incomplete>) {
        self.over = last;
        if self.failures.len() == FAILURES {
            self.failures.pop_front();
        }
        self.failures.push_back((last, why));
    }

    /// Records that the gather that ranks enter has completed.
    pub(super) fn complete(&mut self, outcome: Outcome) {
        self.over = self.number();
        self.failures = VecDeque::new();
        let number = self.over;
        self.completed = Some(Completed { number, outcome });
    }

    /// Returns a rank whose gather has a shape other than `shape`, if there is one.
    pub(super) fn other_shape(&self, shape: Shape) -> Option<(u32, Shape)> {
        let mut entered = self.entered.iter();
        let other = entered.find(|(_, entered)| entered.contribution.shape() != shape)?;
        Some((*other.0, other.1.contribution.shape()))
    }

    /// Returns how many bytes each rank contributes.
    pub(super) fn bytes(&self) -> usize {
        let first = self.entered.values().next();
        match first.map(|first| first.contribution.shape()) {
            Some(Shape::Bytes(bytes)) => bytes,
            _ => 0,
        }
    }

    /// Returns the number of parts of all memories that ranks have contributed.
    pub(super) fn parts(&self) -> usize {
        let contributions = self.entered.values().map(|entered| &entered.contribution);
        contributions.map(Contribution::parts).sum()
    }
}
