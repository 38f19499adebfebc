//! The blocks of a heap that a C program has.

mod mapping;
mod table;

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use egmem::heap::RawBlock;

use table::Table;

/// The blocks in use, by their offset.
pub(crate) enum Blocks {
    /// Of a heap as usual.
    Plain(Table),
    /// Of a heap in debug mode, where pages do not tell blocks apart.
    Debug(Listed),
}

/// All blocks of a heap in debug mode. Its functions stay out of line, to keep the inlined ones of
/// [`Blocks`] short.
#[derive(Default)]
pub(crate) struct Listed(Mutex<HashMap<u64, RawBlock>>);

impl Listed {
    fn all(&self) -> MutexGuard<'_, HashMap<u64, RawBlock>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cold]
    #[inline(never)]
    fn put(&self, raw: RawBlock) {
        self.all().insert(raw.offset, raw);
    }

    #[cold]
    #[inline(never)]
    fn take(&self, offset: u64) -> Option<RawBlock> {
        self.all().remove(&offset)
    }
}

impl Blocks {
    /// Creates a table for a heap of `limit` bytes.
    pub(crate) fn new(limit: u64, debug: bool) -> io::Result<Self> {
        Ok(match debug {
            true => Self::Debug(Listed::default()),
            false => Self::Plain(Table::new(limit)?),
        })
    }

    /// Returns whether the heap is in debug mode.
    #[inline]
    pub(crate) fn is_debug(&self) -> bool {
        matches!(self, Self::Debug(_))
    }

    /// Notes a block, which is in use from now on. Returns `false` if it is not below the limit.
    #[inline]
    #[must_use]
    pub(crate) fn put(&self, raw: RawBlock) -> bool {
        match self {
            Self::Plain(table) => table.put(raw),
            Self::Debug(all) => {
                all.put(raw);
                true
            }
        }
    }

    /// Returns the block in use that begins at `offset`.
    pub(crate) fn get(&self, offset: u64) -> Option<RawBlock> {
        match self {
            Self::Plain(table) => table.get(offset),
            Self::Debug(all) => all.all().get(&offset).copied(),
        }
    }

    /// Removes the block in use that begins at `offset`, and returns it.
    #[inline]
    pub(crate) fn take(&self, offset: u64) -> Option<RawBlock> {
        match self {
            Self::Plain(table) => table.take(offset),
            Self::Debug(all) => all.take(offset),
        }
    }

    /// Returns the most bytes of memory that the table has for a heap that had `backed` bytes at once; 0 in debug
    /// mode.
    pub(crate) fn metadata(&self, backed: u64) -> u64 {
        match self {
            Self::Plain(_) => Table::metadata(backed),
            Self::Debug(_) => 0,
        }
    }
}
