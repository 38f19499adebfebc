//! Which memory a name denotes.

use crate::share::{Description, Identity};

/// One memory, and which bytes of it: equal for the same memory alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Generation {
    parts: Vec<Identity>,
    offset: Option<u64>,
    len: u64,
}

impl Generation {
    pub(super) fn of(memory: &Description) -> Self {
        Self {
            parts: memory.parts.iter().map(|part| part.identity).collect(),
            offset: memory.offset,
            len: memory.len,
        }
    }
}
