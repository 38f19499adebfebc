//! A server's answers.

use serde::{Deserialize, Serialize};

use super::{Leases, Refused, is_false};
use crate::Owner;
use crate::protocol::Secret;
use crate::protocol::sanitize;
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
    /// The leases of [`Ask::Held`](super::Ask::Held) that have ended.
    Expired(Leases),
    /// See [`Ask::Probe`](super::Ask::Probe).
    Probed(Probed),
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
}

impl Fds {
    /// Returns so many fds of parts.
    pub const fn of(count: u32) -> Self {
        Self {
            count,
            queue: false,
        }
    }

    /// Returns a queue.
    pub const fn in_queue() -> Self {
        Self {
            queue: true,
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
