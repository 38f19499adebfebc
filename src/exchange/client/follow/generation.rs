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
pub(super) type Listed = (Generation, Access, Owner);

pub(super) fn listed(entry: &Entry) -> Listed {
    let memory = &entry.memory;
    (Generation::of(memory), memory.access, entry.owner.clone())
}
