//! The open tiers of all processes on one memory.

use crate::geometry::{MAX_MEMBERS, MEMBER, MEMBERS};
use crate::owner::{self, Owner, judge};
use crate::words::Words;
use crate::{Error, MemoryError, Result};

/// An open tier on one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// The process, by its number in its own PID namespace.
    pub pid: u32,
    /// Whether it is this open tier.
    pub is_self: bool,
}

/// The number of an open tier, and its process's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Own {
    number: u32,
    word: u64,
}

impl Own {
    /// Returns the number as words of the memory have it, where 0 is none.
    pub(crate) const fn name(self) -> u64 {
        self.number as u64 + 1
    }

    /// Returns what the lock's word has while the member holds it.
    pub(crate) const fn mark(self) -> u64 {
        self.name() | (self.word as u32 as u64) << 32
    }

    /// Returns the bit of the member in pins.
    pub(crate) const fn bit(self) -> u64 {
        1 << self.number
    }
}

/// Members that have ended, with their words.
pub(crate) struct Ended(Vec<(u32, u64)>);

impl Ended {
    /// Returns a bit for each.
    pub(crate) fn mask(&self) -> u64 {
        self.0
            .iter()
            .fold(0, |mask, (number, _)| mask | 1 << number)
    }
}

/// The words of all members.
#[derive(Clone, Copy)]
pub(crate) struct Members<'a>(&'a Words<'a>);

const fn at(number: u32) -> u64 {
    MEMBERS + number as u64 * MEMBER
}

impl<'a> Members<'a> {
    pub(crate) const fn of(words: &'a Words<'a>) -> Self {
        Self(words)
    }

    /// Iterates over the numbers of the members, with their words.
    fn each(self) -> impl Iterator<Item = (u32, u64)> + 'a {
        let words = (0..MAX_MEMBERS).map(move |number| (number, self.0.get(at(number))));
        words.filter(|&(_, word)| word != 0)
    }

    /// Returns a bit for each member.
    pub(crate) fn all(self) -> u64 {
        self.each().fold(0, |mask, (number, _)| mask | 1 << number)
    }

    pub(crate) fn has_others(self, own: Own) -> bool {
        self.all() & !own.bit() != 0
    }

    /// Returns the members that have ended, and those elsewhere if they are said to have. A member that cannot be judged lives.
    pub(crate) fn ended(self, elsewhere_has: bool) -> Ended {
        let has_ended = |&(_, word): &(u32, u64)| match judge(word) {
            Ok(Owner::Ended) => true,
            Ok(Owner::Elsewhere(_)) => elsewhere_has,
            _ => false,
        };
        Ended(self.each().filter(has_ended).collect())
    }

    /// Judges the member with a name and this half of a word; `None` if there is none.
    pub(crate) fn judge(self, name: u64, half: u32) -> Owner {
        let number = name.wrapping_sub(1);
        if number >= MAX_MEMBERS.into() {
            return Owner::None;
        }
        let word = self.0.get(at(number as u32));
        if word as u32 != half {
            return Owner::Ended; // another one has the number
        }
        // Without `/proc` none has ended.
        judge(word).unwrap_or(Owner::Lives(0))
    }

    /// Forgets members that have ended, unless another one has their number by now.
    pub(crate) fn forget(self, ended: &Ended) {
        for &(number, word) in &ended.0 {
            self.0.swap(at(number), word, 0);
        }
    }

    /// Refuses memory with a member that may live.
    ///
    /// # Errors
    /// [`Error::InUse`]; [`System`](crate::MemoryError::System) without `/proc`.
    pub(crate) fn expect_none(self, elsewhere_has_ended: bool) -> Result<()> {
        let expect = |word| owner::expect_no_other(judge(word)?, elsewhere_has_ended);
        self.each().try_for_each(|(_, word)| expect(word))
    }

    /// Takes a number for this process.
    ///
    /// # Errors
    /// [`Error::InUse`] if a member is elsewhere, unless `take_over` says that it has ended; [`Error::TooManyMembers`];
    /// [`System`](crate::MemoryError::System) without `/proc`.
    pub(crate) fn claim(self, take_over: bool) -> Result<Own> {
        let word = owner::own()?;
        let (mut free, mut ended) = (None, None);
        for number in 0..MAX_MEMBERS {
            let found = self.0.get(at(number));
            match judge(found)? {
                Owner::Lives(_) => {}
                Owner::None => free = free.or(Some((number, found))),
                owner => {
                    owner::expect_no_other(owner, take_over)?;
                    ended = ended.or(Some((number, found)));
                }
            }
        }
        // With the number of one that has ended, the pages of that one are this member's until it joins.
        let members = MAX_MEMBERS;
        let (number, found) = free.or(ended).ok_or(Error::TooManyMembers { members })?;
        match self.0.swap(at(number), found, word) {
            true => Ok(Own { number, word }),
            // Members that end sweep others: only they change a word meanwhile.
            false => self.claim(take_over),
        }
    }

    /// Gives a number up.
    pub(crate) fn release(self, own: Own) {
        owner::release(self.0, at(own.number), own.word);
    }

    /// Fails if another process has taken the tier from this one.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
    pub(crate) fn expect_member(self, own: Own) -> Result<()> {
        match self.0.get(at(own.number)) == own.word {
            true => Ok(()),
            false => {
                let why = "another process has taken it over, or has begun a new one there";
                Err(MemoryError::invalid("tier", why).into())
            }
        }
    }

    /// Returns the members that live, or may live.
    pub(crate) fn list(self, own: Own) -> Vec<Member> {
        let member = |(number, word)| {
            let is_self = number == own.number;
            let (Ok(Owner::Lives(pid)) | Ok(Owner::Elsewhere(pid))) = judge(word) else {
                return None;
            };
            Some(Member { pid, is_self })
        };
        self.each().filter_map(member).collect()
    }
}
