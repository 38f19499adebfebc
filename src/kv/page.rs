//! Pages: their names and their states.

use crate::Key;

/// A page of a tier for one key: the page's number, and how often the page has become free before. Once the page is given to another
/// key, the tier refuses this value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    number: u32,
    uses: u32,
}

impl PageId {
    /// The bits of `uses`: one less than it has room for, so that the bits are a positive `i64` too, as arrays of numbers have.
    const USES: u32 = u32::MAX >> 1;

    /// The page before it was free again for the first time.
    pub(crate) const fn first(number: u32) -> Self {
        Self { number, uses: 0 }
    }

    /// The page for its next key.
    const fn next(self) -> Self {
        let uses = self.uses.wrapping_add(1) & Self::USES;
        Self { uses, ..self }
    }

    /// Returns the page's number, from 0 on.
    pub const fn number(self) -> u32 {
        self.number
    }

    /// Returns the value as an integer below 2^63, for other languages: the number and, from bit 32 on, how often the page has become
    /// free. For a page's first key it is the number.
    pub const fn to_bits(self) -> u64 {
        (self.uses as u64) << 32 | self.number as u64
    }

    /// Returns the value of [`to_bits`](Self::to_bits). A tier refuses one that it has not given out.
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            number: bits as u32,
            uses: (bits >> 32) as u32,
        }
    }
}

/// A key whose page made room for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// The key, which the tier has no longer.
    pub key: Key,
    /// The page.
    pub page: PageId,
}

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    /// A store has it. `abandoned`: the store is gone, and copies into the page still run.
    Writing {
        abandoned: bool,
    },
    Ready,
}

impl State {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Writing { .. } => "being written",
            Self::Ready => "ready",
        }
    }
}

/// A table's entry for a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) id: PageId,
    pub(crate) state: State,
    /// Of a page that is being written or ready.
    pub(crate) key: Key,
    /// Loads and copies that have the page.
    pub(crate) users: u32,
    /// When a ready page was used last.
    pub(crate) stamp: u64,
    /// A copy into a page that is being written has failed.
    pub(crate) has_failed: bool,
    /// The checksum of the contents; 0 for none.
    pub(crate) sum: u64,
}

impl Slot {
    /// A free page.
    pub(crate) const fn free(number: u32) -> Self {
        Self {
            id: PageId::first(number),
            state: State::Free,
            key: Key::new([0; Key::BYTES]),
            users: 0,
            stamp: 0,
            has_failed: false,
            sum: 0,
        }
    }

    /// Frees the page. Its names so far are refused from now on.
    pub(crate) fn set_free(&mut self) {
        self.state = State::Free;
        self.id = self.id.next();
    }
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From pages to a GPU.
    Load,
    /// From a GPU to pages.
    Store,
}

/// A change of a slot. Changes are written to the memory's table in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Freed(PageId),
    Writing(PageId),
    Ready(PageId, Key, u64),
    /// A ready page was used, with its new stamp.
    Used(PageId, u64),
}

/// The pages for the keys of a store.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    /// The keys that were not there, by their index in the list, with their pages.
    pub(crate) placed: Vec<(usize, PageId)>,
    pub(crate) evicted: Vec<Evicted>,
}
