//! Which contestants there are, and how to make one.

use std::fmt;
use std::io;

use super::best_fit::BestFit;
use super::glibc::Glibc;
use super::umf::{Pool, Umf};
use super::{Contestant, Locked, Room, Shared};

/// A contestant by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The C library's malloc.
    Glibc,
    /// Best fit over B-trees.
    BestFit,
    /// mimalloc.
    Mimalloc,
    /// talc.
    Talc,
    /// rlsf.
    Tlsf,
    /// offset-allocator.
    Offset,
    /// buddy_system_allocator.
    Buddy,
    /// A pool of the Unified Memory Framework.
    Umf(Pool),
}

/// A function over a contestant for one thread.
pub trait Visitor {
    /// The function's result.
    type Output;

    /// Does it.
    fn visit<C: Contestant + Send + 'static>(self, contestant: C) -> Self::Output;
}

/// A function over a contestant for many threads.
pub trait SharedVisitor {
    /// The function's result.
    type Output;

    /// Does it.
    fn visit<S: Shared + Send + 'static>(self, contestant: S) -> Self::Output;
}

impl Kind {
    /// All that this program was built with, and the UMF pools whose library is there.
    pub fn available() -> Vec<Self> {
        let pools = [Pool::Disjoint, Pool::DisjointSmall, Pool::Jemalloc];
        let pools = pools.into_iter().filter(|&pool| Umf::has(pool));
        let mut kinds = vec![Self::Glibc];
        kinds.extend([
            Self::Mimalloc,
            Self::Talc,
            Self::Tlsf,
            Self::Offset,
            Self::Buddy,
        ]);
        kinds.push(Self::BestFit);
        kinds.extend(pools.map(Self::Umf));
        kinds
    }

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Glibc => "glibc",
            Self::BestFit => "best fit",
            Self::Mimalloc => "mimalloc",
            Self::Talc => "talc",
            Self::Tlsf => "rlsf",
            Self::Offset => "offset-allocator",
            Self::Buddy => "buddy",
            Self::Umf(Pool::Disjoint) => "umf disjoint",
            Self::Umf(Pool::DisjointSmall) => "umf disjoint, small",
            Self::Umf(Pool::Jemalloc) => "umf jemalloc",
        }
    }

    /// Whether it manages a given range: the others take memory anywhere from the kernel, without a
    /// limit, so a capacity and a span have no meaning for them.
    pub fn is_bounded(self) -> bool {
        !matches!(self, Self::Glibc | Self::Mimalloc)
    }

    /// Makes one and hands it to `visitor`.
    ///
    /// # Errors
    /// The kernel's, for its range; invalid input for room that it cannot manage.
    pub fn with<V: Visitor>(self, room: Room, visitor: V) -> io::Result<V::Output> {
        Ok(match self {
            Self::Glibc => visitor.visit(Glibc),
            Self::BestFit => visitor.visit(BestFit::new(room.capacity)),
            Self::Mimalloc => visitor.visit(super::mimalloc::Mimalloc),
            Self::Talc => visitor.visit(super::talc::Talc::new(room.capacity)?),
            Self::Tlsf => visitor.visit(super::tlsf::Tlsf::new(room.capacity)?),
            Self::Offset => visitor.visit(super::offset::Offset::new(room)?),
            Self::Buddy => visitor.visit(super::buddy::Buddy::new(room)),
            Self::Umf(pool) => visitor.visit(Umf::new(pool, room.capacity)?),
        })
    }

    /// Makes one for many threads, behind a lock if it is for one by itself, and hands it to `visitor`.
    ///
    /// # Errors
    /// As [`with`](Self::with).
    pub fn with_shared<V: SharedVisitor>(self, room: Room, visitor: V) -> io::Result<V::Output> {
        Ok(match self {
            Self::Glibc => visitor.visit(Glibc),
            Self::BestFit => visitor.visit(Locked::new(BestFit::new(room.capacity))),
            Self::Mimalloc => visitor.visit(super::mimalloc::Mimalloc),
            Self::Talc => visitor.visit(Locked::new(super::talc::Talc::new(room.capacity)?)),
            Self::Tlsf => visitor.visit(Locked::new(super::tlsf::Tlsf::new(room.capacity)?)),
            Self::Offset => visitor.visit(Locked::new(super::offset::Offset::new(room)?)),
            Self::Buddy => visitor.visit(Locked::new(super::buddy::Buddy::new(room))),
            Self::Umf(pool) => visitor.visit(Umf::new(pool, room.capacity)?),
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
