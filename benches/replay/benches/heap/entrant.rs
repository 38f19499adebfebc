//! The contestants: the heap and other allocators.

use std::fmt;
use std::io;

use crate::ours::Ours;
use egmem_replay::contestants::{Kind, Room, SharedVisitor, Visitor};

/// An allocator by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entrant {
    /// egmem's heap.
    Heap,
    /// One to compare with.
    Other(Kind),
}

impl Entrant {
    /// All there are.
    pub fn all() -> Vec<Self> {
        let others = Kind::available().into_iter().map(Self::Other);
        std::iter::once(Self::Heap).chain(others).collect()
    }

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Heap => "egmem",
            Self::Other(kind) => kind.name(),
        }
    }

    /// Whether it manages a given range, so that a capacity and a span have a meaning.
    pub fn is_bounded(self) -> bool {
        match self {
            Self::Heap => true,
            Self::Other(kind) => kind.is_bounded(),
        }
    }

    /// Whether the bytes of its metadata can be counted: it is written in Rust.
    pub fn is_rust(self) -> bool {
        self.is_bounded() && !matches!(self, Self::Other(Kind::Umf(_)))
    }

    /// Makes one and hands it to `visitor`.
    ///
    /// # Errors
    /// The kernel's, for its range; invalid input for room that it cannot manage.
    pub fn with<V: Visitor>(self, room: Room, visitor: V) -> io::Result<V::Output> {
        match self {
            Self::Heap => Ok(visitor.visit(Ours::new(room)?)),
            Self::Other(kind) => kind.with(room, visitor),
        }
    }

    /// Makes one for many threads and hands it to `visitor`.
    ///
    /// # Errors
    /// As [`with`](Self::with).
    pub fn with_shared<V: SharedVisitor>(self, room: Room, visitor: V) -> io::Result<V::Output> {
        match self {
            Self::Heap => Ok(visitor.visit(Ours::new(room)?)),
            Self::Other(kind) => kind.with_shared(room, visitor),
        }
    }
}

impl fmt::Display for Entrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
