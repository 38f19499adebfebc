//! A client's requests.

use serde::{Deserialize, Serialize};

use crate::driver::{Access, HandleType, NodeId};
use crate::protocol::at_most::{at_most, handles, texts};
use crate::protocol::{Payload, Secret, Texts};
use crate::share::{Description, InstanceId};
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
    /// Joins a group as a rank, answered by [`Answer::Agreed`](super::Answer::Agreed) when all have.
    Join(Join),
    /// Offers a rank's handles, answered by [`Answer::Members`](super::Answer::Members) when all ranks have.
    Offer(Offer),
    /// Enters a barrier or a gather of the rank's round. Answered when all ranks have entered: a barrier by
    /// [`Answer::Done`](super::Answer::Done), a gather of bytes by
    /// [`Answer::Members`](super::Answer::Members), one of memory by
    /// [`Answer::Agreed`](super::Answer::Agreed); its members are then requested with [`Gather::first`].
    Gather(Gather),
    /// Leaves a group, after unmapping the others' memory: answered by [`Answer::Done`](super::Answer::Done)
    /// when all have.
    Leave(Leave),
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

/// See [`Ask::Join`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Join {
    /// The group's name, in the form of names.
    pub group: String,
    /// The rank: 0 to `size - 1`.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// Which peers may be its ranks. Ranks that state another admission are in another group of the
    /// same name.
    #[serde(default)]
    pub admission: Admission,
    /// The handle types that this rank can export its memory as and import.
    pub can: Vec<HandleType>,
    /// Why it cannot use the others, for people.
    #[serde(default, deserialize_with = "at_most::<_, _, 64>")]
    pub cannot: Vec<String>,
    /// Its memory; `None` if it contributes none and only maps the others'.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Description>,
    /// How long to wait for the other ranks, in milliseconds.
    pub ms: u64,
}

/// Which peers may be the ranks of a group: see [`Join::admission`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Admission {
    /// Sessions of the joining peer. The server refuses it for `local`, which any process on the server's
    /// machine may be.
    #[default]
    SamePeer,
    /// The peers that this list matches, as in [`Create::peers`] but without `*`; the joining peer must be
    /// one of them. Their order has no meaning.
    Peers(#[serde(deserialize_with = "texts::<_, MAX_PATTERNS>")] Texts),
    /// Peers that know this secret of 16 to 64 bytes.
    Secret(Secret),
}

/// See [`Ask::Offer`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// The group.
    pub group: String,
    /// The round from [`Agreed`](super::Agreed).
    pub round: u64,
    /// The handles of this rank's memory, 64 bytes each, one for each part: empty without memory, and for fds,
    /// which come with the frame.
    #[serde(default, deserialize_with = "handles")]
    pub fabric: Vec<Secret>,
    /// The first rank in the answer. For members that do not fit into a frame, repeat the request without
    /// handles, with the first rank that is still missing.
    #[serde(default)]
    pub first: u32,
}

/// See [`Ask::Gather`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gather {
    /// The group.
    pub group: String,
    /// The round from [`Agreed`](super::Agreed).
    pub round: u64,
    /// The number of the gather in the round: 1 for the first that the rank enters, then one more each time.
    /// A rank that enters one no longer waits for earlier ones.
    pub number: u64,
    /// The operation, and this rank's contribution.
    #[serde(default)]
    pub operation: Operation,
    /// The first rank in the answer, for a gather that is complete: this request enters nothing. It requests
    /// members that do not fit into a frame, and those of a gather of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<u32>,
    /// How long to wait for the other ranks, in milliseconds.
    #[serde(default)]
    pub ms: u64,
}

/// A rank's contribution to a gather: see [`Gather::operation`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Nothing: the ranks wait for each other.
    #[default]
    Barrier,
    /// Bytes, as many as every other rank gives.
    Bytes(Payload),
    /// Memory, or none.
    Memory(Brought),
}

/// See [`Operation::Memory`]. File descriptors come with the frame.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Brought {
    /// The rank's memory; `None` if it contributes none and only maps the others'.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Description>,
    /// Its handles, 64 bytes each, one for each part: empty without memory, and for fds.
    #[serde(default, deserialize_with = "handles")]
    pub fabric: Vec<Secret>,
}

/// See [`Ask::Leave`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    /// The group.
    pub group: String,
    /// The round from [`Agreed`](super::Agreed).
    pub round: u64,
    /// How long to wait for the other ranks, in milliseconds; with 0 the rank leaves anyway.
    #[serde(default)]
    pub ms: u64,
}
