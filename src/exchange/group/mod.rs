//! Groups: all ranks of a program get each other's memory mapped with one call.
//!
//! ```text
//! every rank: join ──▶ agreed on one handle type ──▶ offer handles ──▶ everybody's handles ──▶ map
//! ```
//! The ranks meet at a server, which rank 0 starts, or which runs already. All decisions are its own,
//! so that no rank is told another than the others: fabric handles where every rank can, else POSIX
//! fds where all ranks are on the server's machine, else [`Error::NoCommonHandle`] with each rank's
//! reason. Where a rank is missing, or lost before all have everything, all get
//! [`Error::RanksMissing`].
//!
//! A group is its name and its [`Admission`]: which peers its ranks accept. A rank that states another
//! admission is in another group and learns nothing about this one. A server that runs already gives
//! no peer the right to join a group, unless its options or its configuration say so; one that rank 0
//! starts serves the ranks of this group alone.
//!
//! After that ranks meet at [barriers](Group::barrier) and gather [bytes](Group::gather) and further
//! [memory](Group::gather_memory) of all, as often as they like. Each call has one result for all ranks.
//!
//! A rank that crashed and joins again begins a new round with all the others, who join again too;
//! a group that is complete is not disturbed by that.
//!
//! POSIX fds go through Unix sockets. A server with a TCP address that rank 0 starts has one too, in
//! a directory of its own, and ranks of the same machine go over to it by themselves. Every rank
//! gets a file descriptor for every part of every rank's memory, and so does the server:
//! `RLIMIT_NOFILE` must allow for it.
//!
//! [`Error::NoCommonHandle`]: crate::Error::NoCommonHandle
//! [`Error::RanksMissing`]: crate::Error::RanksMissing

mod admission;
mod agree;
mod answers;
mod calls;
mod collective;
mod coordinator;
mod enter;
mod gather;
mod gathered;
#[allow(clippy::module_inception, reason = "it holds the type of that name")]
mod group;
mod handles;
mod host;
mod identity;
mod join;
mod local;
mod member;
mod options;
mod outcomes;
mod present;
mod rights;
mod roster;
mod round;
mod rounds;
mod settle;

pub use admission::{Admission, GroupSecret};
pub(crate) use coordinator::{Groups, MembersPage, Rules};
pub use gathered::GatheredMemory;
pub use group::{Group, GroupState};
pub(crate) use identity::Keys;
pub use options::{GroupOptions, Host, Map};
pub(crate) use rights::Rights;
pub(crate) use rounds::NO_SUCH_ROUND;

pub use crate::exchange::protocol::MAX_GATHER;
