//! Identifies the memory behind a name.

use crate::Owner;
use crate::driver::Access;
use crate::protocol::Entry;
use crate::share::{Description, Identity};

/// One memory and a byte range of it. Two values are equal only if both are the same.
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

/// The parts of a name's entry that decide whether this client can fetch its memory.
#[derive(PartialEq)]
pub(super) struct Listed {
    pub(super) generation: Generation,
    access: Access,
    owner: Owner,
}

impl Listed {
    pub(super) fn of(entry: &Entry) -> Self {
        Self {
            generation: Generation::of(&entry.memory),
            access: entry.memory.access,
            owner: entry.owner.clone(),
        }
    }
}
