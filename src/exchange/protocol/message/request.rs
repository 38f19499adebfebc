//! A client's requests.

use serde::{Deserialize, Serialize};

use crate::driver::{Access, HandleType, NodeId};
use crate::protocol::Texts;
use crate::protocol::at_most::{leases, texts};
use crate::share::InstanceId;
use crate::{MAX_PATTERNS, Owner};

/// A client's request after the greeting, `[id, ask]`. Many may be in flight; answers come in any order. The id is unique
/// among a connection's requests that are not answered yet.
pub type Request = (u64, Ask);

/// A request without its id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Ask {
    /// A heartbeat, answered by [`Answer::Done`](super::Answer::Done).
    Ping,
    /// Lists names, answered by [`Answer::Names`](super::Answer::Names).
    List(List),
    /// Waits for a name and returns its entry, answered by [`Answer::Names`](super::Answer::Names) with one.
    Wait(Wait),
    /// Requests handles and a lease, answered by [`Answer::Granted`](super::Answer::Granted).
    Fetch(Fetch),
    /// After a session was resumed: the leases that the client has. The session's other leases end, because their grants
    /// never arrived. Answered by [`Answer::Expired`](super::Answer::Expired). Without this request all leases go on.
    Held(Leases),
    /// Ends a lease: its memory is unmapped. Answered by [`Answer::Done`](super::Answer::Done).
    Release(Release),
    /// Reports that the word at the probe's place is written, answered by
    /// [`Answer::Probed`](super::Answer::Probed).
    Probe(Probe),
    /// Subscribes to events about names, answered by [`Answer::Names`](super::Answer::Names) with all that
    /// exist.
    Watch(Watch),
    /// Requests new memory under a name from an allocator service. Answered by
    /// [`Answer::Names`](super::Answer::Names) with one.
    Create(Create),
    /// Ends a name that this peer created, answered by [`Answer::Done`](super::Answer::Done).
    Delete(Delete),
}

/// See [`Ask::List`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct List {
    /// Only names with this prefix.
    #[serde(default)]
    pub prefix: String,
    /// Only names after this one, in the order of their bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// See [`Ask::Wait`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wait {
    /// The name.
    pub name: String,
    /// The longest wait, in milliseconds; the server may have a lower limit.
    pub ms: u64,
}

/// See [`Ask::Fetch`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fetch {
    /// The name.
    pub name: String,
    /// The handle types that the client can import, most wanted first.
    pub accept: Vec<HandleType>,
    /// The access that the client needs.
    pub access: Access,
    /// Whether to assign a place for a probe.
    #[serde(default)]
    pub probe: bool,
    /// Refuse with `stale` if the name no longer belongs to this instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceId>,
    /// Refuse with `wrong_owner` if the name has another owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
}

/// Leases in ascending order, at most [`MAX_LISTED`](super::MAX_LISTED).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases {
    /// Their numbers.
    #[serde(deserialize_with = "leases")]
    pub leases: Vec<u64>,
}

/// See [`Ask::Release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// The lease.
    pub lease: u64,
}

/// See [`Ask::Probe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The lease.
    pub lease: u64,
    /// The word that the client wrote; `None` if it may only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wrote: Option<u64>,
}

/// See [`Ask::Watch`].
///
/// If there are more names than fit into the answer, [`List`] returns the others. Of several changes of one
/// name only the result may be reported. Watching ends with the connection, not with the session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watch {
    /// Only names with this prefix.
    #[serde(default)]
    pub prefix: String,
}

/// See [`Ask::Create`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Create {
    /// The name.
    pub name: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The host node; without one, the service chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// Which peers may fetch it besides its creator: names of certificates, `uid:1000`, or `*`.
    #[serde(default, deserialize_with = "texts::<_, MAX_PATTERNS>")]
    pub peers: Texts,
}

/// See [`Ask::Delete`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Delete {
    /// The name.
    pub name: String,
    /// How long to wait for holders, in milliseconds.
    #[serde(default)]
    pub ms: u64,
}
