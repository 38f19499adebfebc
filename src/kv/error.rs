//! Errors of a tier.

use crate::driver::{DriverError, Explain, error_texts};
use crate::page::Evicted;
use crate::{Key, MemoryError};

/// A result with the tier's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a tier; [`Error::remedy`] says what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the driver, of the system or of an argument.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// There are fewer free and evictable pages than a store needs. Nothing was evicted, except as `evicted` says.
    Full {
        /// The pages that the store needs.
        needed: usize,
        /// The pages of the tier.
        pages: usize,
        /// The pages that are free, or that could be evicted.
        available: usize,
        /// The ready pages that loads and copies have pinned.
        pinned: usize,
        /// The pages that other stores are writing.
        writing: usize,
        /// The pages without memory: of a tier that grows in the background, or whose growth was stopped.
        missing: usize,
        /// Whether the missing pages come by themselves.
        is_growing: bool,
        /// The keys that were evicted all the same: only if several groups needed more memory of each other than there was.
        evicted: Vec<Evicted>,
    },
    /// A key has no ready page.
    NotReady {
        /// The key.
        key: Key,
        /// Its place in the list of keys.
        index: usize,
    },
    /// A page is not in the state that an operation needs.
    WrongState {
        /// The page.
        page: u32,
        /// Its state: free, being written, ready, or not of this tier.
        is: &'static str,
        /// The state needed.
        need: &'static str,
    },
    /// A process has the tier that may live, and that this one cannot have it beside.
    InUse {
        /// The process.
        pid: u32,
        /// Whether it is in another PID namespace, or on another boot, so that this process cannot know whether it lives.
        is_elsewhere: bool,
    },
    /// As many processes have the tier as can.
    TooManyMembers {
        /// Their number.
        members: u32,
    },
    /// A process holds the tier's lock, or opens the tier, and does not go on, for instance because it is stopped.
    Busy {
        /// The process; 0 if it cannot be known.
        pid: u32,
    },
    /// The table in the tier's memory had values that no tier writes: another program writes to the memory. It was repaired.
    Damaged,
    /// The copy method is not for this driver, this GPU or these addresses.
    UnusableMethod {
        /// What the method needs.
        what: &'static str,
        /// The refused call, if there was one.
        source: Option<DriverError>,
    },
    /// A memory has other data than a tier.
    NotATier {
        /// Why its data is no tier's.
        why: String,
        /// Whether it has a tier in another version of the format.
        is_other_version: bool,
    },
    /// A memory has another tier than the one asked for.
    OtherTier {
        /// The property that differs.
        what: &'static str,
        /// The value of the tier in the memory.
        found: String,
        /// The value that was asked for.
        wanted: String,
    },
    /// Copies into pages of a store have failed: their contents are not known.
    CopyFailed {
        /// The pages.
        pages: usize,
    },
    /// Copies into pages of a store have not ended.
    StillCopying {
        /// The pages under copies.
        pages: usize,
    },
}

// One line without control characters; memory's errors escape their own text.
error_texts! { Error, Self::Memory(error) => error, {
    Self::Memory(error) => ("{error}"), error.remedy();
    Self::Full { needed, pages, available, pinned, writing, missing, is_growing, .. } =>
        ("a store needs {needed} pages and {available} of {pages} are free or evictable: {pinned} are pinned, {writing} are being \
          written{}", absent(*missing, *is_growing)),
        of_full(*missing, *is_growing);
    Self::NotReady { key, index } => ("key {key}, at index {index} of the list, has no ready page"),
        "load only the keys that `lookup` counts, without a store in between";
    Self::WrongState { page, is, need } => ("page {page} is {is}, and must be {need}"),
        "use pages only while the `Store` or `Load` that returned them lives";
    Self::UnusableMethod { what, .. } => ("this copy method cannot be used here: {what}"),
        "use another method: `CopyMethod::Auto` takes one that works here";
    Self::InUse { pid, is_elsewhere: false } => ("process {pid} has the tier"),
        "close the tier there, or wait until the process has ended";
    Self::InUse { pid, .. } => ("process {pid} of another PID namespace or boot has the tier"),
        "make sure that the process has ended, and attach with `take_over`";
    Self::TooManyMembers { members } => ("{members} open tiers have the memory, and no more can"),
        "close tiers that are not used";
    Self::Busy { pid } => ("process {pid} has the tier's lock and does not go on"),
        "let the process go on, or end it: its pages are found then, with `take_over` if it was of another PID namespace";
    Self::Damaged => ("the table in the tier's memory had values that no tier writes"),
        "find the program that writes to the memory; the table was repaired, and the call can be repeated";
    Self::NotATier { why, is_other_version: true } => ("the memory has no tier: {why}"),
        "attach with `reset` to begin a new tier, or use the version of egmem that wrote it";
    Self::NotATier { why, .. } => ("the memory has no tier: {why}"),
        "check the name of the memory, or attach with `reset` to lose what it has";
    Self::OtherTier { what, found, wanted } => ("the memory has a tier with {what} {found}, and not {wanted}"),
        "ask for what the memory has, use another name, or attach with `reset` to lose its pages";
    Self::CopyFailed { pages } => ("copies into {pages} pages of the store have failed"),
        "end the store without a commit, and store the keys again";
    Self::StillCopying { pages } => ("copies into {pages} pages of the store have not ended"),
        "wait for the store's jobs before the commit";
} }

/// Returns what to say of pages without memory.
fn absent(missing: usize, is_growing: bool) -> String {
    match (missing, is_growing) {
        (0, _) => String::new(),
        (_, true) => format!(", {missing} are still to come: the tier is growing"),
        (_, false) => format!(", {missing} never came: the tier's growth was stopped"),
    }
}

const fn of_full(missing: usize, is_growing: bool) -> &'static str {
    match (missing, is_growing) {
        (_, true) => "wait until the tier has grown, or store fewer pages at a time",
        (0, _) => {
            "release loads and wait for copies, store fewer pages at a time, or create the tier with more pages"
        }
        _ => {
            "release loads and wait for copies, store fewer pages at a time, or create the tier again when its node \
             has the memory"
        }
    }
}

impl Error {
    /// Returns the memory's error that this error carries, if it does.
    pub const fn memory(&self) -> Option<&MemoryError> {
        match self {
            Self::Memory(error) => Some(error),
            _ => None,
        }
    }
}

impl Explain for Error {
    fn remedy(&self) -> &'static str {
        self.remedy()
    }

    fn untold_call(&self) -> Option<DriverError> {
        match self {
            Self::Memory(error) => error.untold_call(),
            Self::UnusableMethod { source, .. } => *source,
            _ => None,
        }
    }
}
