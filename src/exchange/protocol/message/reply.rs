//! A server's answers.

use serde::{Deserialize, Serialize};

use super::{Refused, is_false};
use crate::Owner;
use crate::driver::HandleType;
use crate::protocol::sanitize;
use crate::protocol::{Payload, Secret};
use crate::share::Description;

/// A server's answer to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Answer {
    /// The request succeeded.
    Done,
    /// The request was refused.
    Refused(Refused),
    /// See [`Ask::List`](super::Ask::List).
    Names(Names),
    /// See [`Ask::Fetch`](super::Ask::Fetch).
    Granted(Granted),
    /// See [`Ask::Probe`](super::Ask::Probe).
    Probed(Probed),
    /// See [`Ask::Join`](super::Ask::Join) and [`Ask::Gather`](super::Ask::Gather).
    Agreed(Agreed),
    /// See [`Ask::Offer`](super::Ask::Offer) and [`Ask::Gather`](super::Ask::Gather).
    Members(Members),
    /// Instead of [`Agreed`] or [`Members`], the same for all ranks: the group did not gather. In answer to a
    /// gather, the same for all ranks: it has failed. Instead of [`Done`](Self::Done) to a rank that leaves:
    /// not all the others have left.
    Incomplete(Incomplete),
}

/// See [`Answer::Names`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Names {
    /// The names that this peer may fetch, in order.
    pub entries: Vec<Entry>,
    /// Whether there are more: ask again, after the last of these.
    #[serde(default)]
    pub more: bool,
}

/// A name and its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The name.
    #[serde(deserialize_with = "sanitize::name")]
    pub name: String,
    /// The memory.
    pub memory: Description,
    /// The number of its leases.
    #[serde(default)]
    pub leases: u32,
    /// The name's owner; omitted for the server itself.
    #[serde(default, skip_serializing_if = "Owner::is_server")]
    pub owner: Owner,
}

/// See [`Ask::Fetch`](super::Ask::Fetch).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Granted {
    /// Identifies the lease: a number that the instance uses once. If a lease ended while the client was
    /// silent, the client can still release it in a later session, unless its peer is any local process.
    pub lease: u64,
    /// The memory.
    pub memory: Description,
    /// How to import it.
    pub handles: Handles,
    /// Where a probe may write, in bytes from the start; it may lie beyond `memory.len`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<u64>,
    /// Why it is not a fabric handle, if one was requested; for people.
    #[serde(
        deserialize_with = "sanitize::maybe_words",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub no_fabric: Option<String>,
    /// The name's owner; omitted for the server itself.
    #[serde(default, skip_serializing_if = "Owner::is_server")]
    pub owner: Owner,
}

/// How to import memory: one handle for each part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handles {
    /// Fabric handles: 64 bytes each.
    Fabric(Vec<Secret>),
    /// File descriptors, which come with the frame.
    Fds(Fds),
}

/// This many fds come with the frame: one for each part, or one through which those are received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fds {
    /// The number of fds.
    pub count: u32,
    /// The one fd is a socket: the fds of the parts come through it, 16 at a time. Only for clients whose
    /// [`Hello::queues`](super::Hello::queues) allows it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub queue: bool,
    /// The one fd is a socket through which a rank requests a queue. Only in rounds whose
    /// [`Agreed::sources`] allows it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub source: bool,
}

impl Fds {
    /// Returns so many fds of parts.
    pub const fn of(count: u32) -> Self {
        Self {
            count,
            queue: false,
            source: false,
        }
    }

    /// Returns a queue.
    pub const fn in_queue() -> Self {
        Self {
            queue: true,
            ..Self::of(1)
        }
    }

    /// Returns a source.
    pub const fn from_source() -> Self {
        Self {
            source: true,
            ..Self::of(1)
        }
    }
}

/// See [`Ask::Probe`](super::Ask::Probe).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probed {
    /// The word that the server read; correct if it is the one that the client wrote.
    pub found: u64,
    /// The word that the server wrote afterwards.
    pub wrote: u64,
}

/// See [`Ask::Join`](super::Ask::Join).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agreed {
    /// Identifies this round of the group.
    pub round: u64,
    /// The handle type for all ranks.
    pub via: HandleType,
    /// How many handles all ranks have together: as many fds will follow.
    #[serde(default)]
    pub handles: u32,
    /// Whether ranks offer one fd, a source, for memory of many parts: all ranks can take fds from queues.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sources: bool,
}

/// See [`Ask::Offer`](super::Ask::Offer).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Members {
    /// The ranks, in order, from [`Offer::first`](super::Offer::first) or
    /// [`Gather::first`](super::Gather::first) on.
    pub members: Vec<Member>,
    /// Whether there are more: ask again, for the rank after the last of these.
    #[serde(default)]
    pub more: bool,
}

/// See [`Answer::Incomplete`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incomplete {
    /// The reason: `timed_out` if ranks are missing, `closing` if ranks were lost, `no_common_handle`,
    /// `ranks_disagree`, or another word of [`crate::Refusal`].
    #[serde(deserialize_with = "sanitize::words")]
    pub reason: String,
    /// The reason, for people.
    #[serde(deserialize_with = "sanitize::words", default)]
    pub detail: String,
    /// The ranks that are missing, in order.
    #[serde(default)]
    pub ranks: Vec<u32>,
    /// The number of ranks in the group.
    pub size: u32,
    /// Without a common handle type: which ranks cannot use which type, and why, for people. If ranks
    /// disagree: their requests.
    #[serde(deserialize_with = "sanitize::all_words", default)]
    pub reasons: Vec<String>,
}

/// A rank of a group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its peer name.
    #[serde(deserialize_with = "sanitize::words")]
    pub peer: String,
    /// Its memory, if it contributed any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Description>,
    /// How to import that; fds come with the frame, in the order of ranks and parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handles: Option<Handles>,
    /// In answer to [`Ask::Gather`](super::Ask::Gather) of bytes: its contribution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Payload>,
}
