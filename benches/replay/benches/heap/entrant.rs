//! The contestants: the heap and other allocators.

use std::fmt;
use std::io;

use crate::ours::{Ours, OursEach};
use egmem_replay::contestants::{Kind, Room, SharedVisitor, Visitor};

/// An allocator by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entrant {
    /// egmem's heap.
    Heap,
    /// A heap for each thread: what a machine's processors allow, where threads have nothing in common.
    HeapEach,
    /// One to compare with.
    Other(Kind),
}

impl Entrant {
    /// All that take part unless some are named.
    pub fn all() -> Vec<Self> {
        let others = Kind::available().into_iter().map(Self::Other);
        std::iter::once(Self::Heap).chain(others).collect()
    }

    /// All that can be named.
    pub fn named() -> Vec<Self> {
        let mut all = Self::all();
        all.push(Self::HeapEach);
        all
    }

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Heap => "egmem",
            Self::HeapEach => "egmem-each",
            Self::Other(kind) => kind.name(),
        }
    }

    /// Whether it manages a given range, so that a capacity and a span have a meaning.
    pub fn is_bounded(self) -> bool {
        match self {
            Self::Heap | Self::HeapEach => true,
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
            Self::Heap | Self::HeapEach => Ok(visitor.visit(Ours::new(room)?)),
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
            Self::HeapEach => Ok(visitor.visit(OursEach::new(room)?)),
            Self::Other(kind) => kind.with_shared(room, visitor),
        }
    }
}

impl fmt::Display for Entrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
