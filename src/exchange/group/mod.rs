//! Groups: all ranks of a program map each other's memory with one call.
//!
//! ```text
//! every rank: join ──▶ agree on one handle type ──▶ offer handles ──▶ receive all handles ──▶ map
//! ```
//!
//! The ranks meet at a server, which rank 0 starts or which runs already. The server makes all decisions, so
//! all ranks get the same one. It chooses fabric handles if every rank supports them, else POSIX fds if all
//! ranks are on the server's machine; otherwise all ranks get [`NoCommonHandle`] with each rank's
//! reason. If a rank is missing, or is lost before all have exchanged their handles, all get
//! [`Error::RanksMissing`].
//!
//! A group is identified by its name and its [`Admission`], which says which peers its ranks accept. A rank
//! with a different admission is in a different group and learns nothing about this one. A separately started
//! server gives no peer the right to join a group unless its options or its configuration say so. A server
//! that rank 0 starts serves only the ranks of this group.
//!
//! After joining, the ranks can call [barriers](Group::barrier) and gather [bytes](Group::gather) and further
//! [memory](Group::gather_memory) any number of times. Each call has one result for all ranks.
//!
//! If a rank crashed and joins again, a new round begins, and all other ranks join again too. This does not
//! disturb a group that is complete.
//!
//! Calls that wait for other ranks fail with a group's [`Error`]. It carries the exchange's error for everything that
//! is not about ranks.
//!
//! POSIX fds need Unix sockets. If rank 0 starts a server with a TCP address, the server also listens at a
//! Unix socket in its own directory, and ranks of the same machine switch to it automatically. Every rank
//! gets a file descriptor for every part of every rank's memory, and so does the server: `RLIMIT_NOFILE` must
//! allow for that.
//!
//! [`NoCommonHandle`]: crate::Error::NoCommonHandle

mod admission;
mod agree;
mod asking;
mod calls;
mod collective;
mod coordinator;
mod enter;
mod error;
mod gather;
mod gathered;
#[allow(clippy::module_inception, reason = "it holds the type of that name")]
mod group;
mod handles;
mod host;
mod identity;
mod join;
mod kept;
mod leave;
mod local;
mod member;
mod options;
mod outcomes;
mod phase;
mod present;
mod rights;
mod roster;
mod round;
mod rounds;
mod state;
mod told;

pub use admission::{Admission, GroupSecret};
pub(crate) use coordinator::{Groups, MembersPage, Rules};
pub use error::{Error, Result};
pub use gathered::GatheredMemory;
pub use group::Group;
pub(crate) use identity::Keys;
pub use options::{GroupOptions, Host, Map};
pub use rights::Rights;
pub(crate) use rounds::NO_SUCH_ROUND;
pub use state::GroupState;

pub use crate::protocol::{MAX_GATHER, MAX_GATHER_TOTAL};
