//! The messages. In CBOR each is a map with text keys; what a reader does not know it skips.
//!
//! A choice is a map of which exactly one known key is there: `{"id": 7, "fetch": {…}}`. A request
//! with no known key is answered with `unsupported`, an event with none is skipped.

use serde::{Deserialize, Serialize};

use super::Secret;
use super::at_most::at_most;
use crate::driver::{Access, HandleType, NodeId};
use crate::share::{BootId, Description, InstanceId, MAX_PARTS};

/// The newest version of the protocol that this crate speaks.
pub const VERSION: u16 = 1;
/// The oldest.
pub const OLDEST: u16 = 1;
/// The first word of every hello.
pub const MAGIC: &str = "egmem";
/// The longest name in bytes; names are of `A–Z a–z 0–9 . _ - / :` and at least one byte.
pub const MAX_NAME: usize = 255;

/// The first frame, from the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: String,
    /// The oldest version the client speaks.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
    /// The client's machine: the same as the server's means that fds can be passed.
    pub boot: BootId,
    /// Whether the client's driver can import fabric handles.
    pub fabric: bool,
    /// The session to go on with after a broken connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume: Option<Secret>,
    /// With `resume`: the leases that the client still has. The session's others end, for their
    /// grant never arrived; one that the server does not know it reports as [`Event::Ended`].
    /// Without it all go on; left out where there are too many of them for a hello.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Vec<u64>>,
    /// What the client calls itself, for people: at most 255 bytes.
    #[serde(default)]
    pub agent: String,
}

/// The server's answer to a hello: `welcome` or `refused`.
#[derive(Clone, Debug, PartialEq)]
pub enum Greeting {
    /// The session begins.
    Welcome(Welcome),
    /// It does not, and the connection is closed.
    Refused(Refused),
}

/// A session's terms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// The version to speak from now on: the newest that both know.
    pub version: u16,
    /// The server's instance: another after a restart.
    pub instance: InstanceId,
    /// The server's machine.
    pub boot: BootId,
    /// Resumes the session, on another connection of the same peer.
    pub session: Secret,
    /// Whether the session that the client named goes on, with its leases.
    pub resumed: bool,
    /// By what name the server knows the client.
    pub peer: String,
    /// The client pings at least this often, in milliseconds.
    pub heartbeat_ms: u64,
    /// After this long without a word from the client its leases end, in milliseconds.
    pub lease_ms: u64,
    /// The largest frame the server reads, in bytes.
    pub frame_bytes: u32,
    /// The Unix socket at which tickets are redeemed, for clients on the same machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub door: Option<String>,
    /// A Unix socket at which the server speaks this protocol in full, for clients on the same
    /// machine: ranks of a group that share fds join there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<String>,
}

/// A refusal: see [`crate::Refusal`] for the words of `reason`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    /// Why, for programs.
    pub reason: String,
    /// Why, for people.
    #[serde(default)]
    pub detail: String,
}

/// A client's request. Many may be on their way; answers come in any order.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Different for each of a connection's requests that are not answered yet.
    pub id: u64,
    /// What is asked; `None` where this version does not know it.
    pub ask: Option<Ask>,
}

/// What a client asks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Ask {
    /// A sign of life, answered by [`Answer::Done`].
    Ping(Empty),
    /// Which names there are, answered by [`Answer::Names`].
    List(List),
    /// A name's entry as soon as it is there, answered by [`Answer::Names`] with one.
    Wait(Wait),
    /// Handles and a lease, answered by [`Answer::Granted`].
    Fetch(Fetch),
    /// At the door, after a hello like any other: the fds for a ticket, answered by
    /// [`Answer::Fds`]. The door answers nothing else but pings, and its welcome's session is empty.
    Redeem(Redeem),
    /// The memory is unmapped: the lease ends. Answered by [`Answer::Done`].
    Release(Release),
    /// The word at the probe's place has been written, answered by [`Answer::Probed`].
    Probe(Probe),
    /// Events about names from now on, answered by [`Answer::Names`] with all there are.
    Watch(Watch),
    /// New memory under a name, from an allocator service. Answered by [`Answer::Names`] with one.
    Create(Create),
    /// The end of a name that this peer created, answered by [`Answer::Done`].
    Delete(Delete),
    /// A rank joins a group, answered by [`Answer::Agreed`] when all have.
    Join(Join),
    /// A rank's handles, answered by [`Answer::Members`] when all have sent theirs.
    Offer(Offer),
    /// A rank has unmapped the others' memory: answered by [`Answer::Done`] when all have.
    Leave(Leave),
}

/// Nothing to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

/// See [`Ask::List`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct List {
    /// Only names that begin so.
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
    /// How long at most, in milliseconds; the server may have a lower limit.
    pub ms: u64,
}

/// See [`Ask::Fetch`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fetch {
    /// The name.
    pub name: String,
    /// The handle types that the client can import, most wanted first.
    pub accept: Vec<HandleType>,
    /// What the client means to do with the memory.
    pub access: Access,
    /// Whether a place for a probe is wanted.
    #[serde(default)]
    pub probe: bool,
    /// Refuse with `stale` if the name is not this instance's any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceId>,
}

/// See [`Ask::Redeem`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Redeem {
    /// From [`Handles::Ticket`]; good once, for some seconds.
    pub ticket: Secret,
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
/// If there are more names than fit into the answer, [`List`] tells the others. Of several changes
/// of one name only what came of them may be told. Watching ends with the connection, not with the
/// session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watch {
    /// Only names that begin so.
    #[serde(default)]
    pub prefix: String,
}

/// See [`Ask::Create`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Create {
    /// The name.
    pub name: String,
    /// How many bytes.
    pub bytes: u64,
    /// On which host node; without one, the service chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// Which peers may fetch it besides its maker: names of certificates, `uid:1000`, or `*`.
    #[serde(default, deserialize_with = "at_most::<_, _, 1024>")]
    pub peers: Vec<String>,
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
    /// The group's name, of the form of names.
    pub group: String,
    /// Which rank: 0 to `size - 1`.
    pub rank: u32,
    /// How many ranks there are.
    pub size: u32,
    /// The handle types that this rank can export its memory as and import.
    pub can: Vec<HandleType>,
    /// Why it cannot do the others, for people.
    #[serde(default, deserialize_with = "at_most::<_, _, 64>")]
    pub cannot: Vec<String>,
    /// Its memory; `None` where it brings none and only maps the others'.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Description>,
    /// How long to wait for the other ranks, in milliseconds.
    pub ms: u64,
}

/// See [`Ask::Offer`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// The group.
    pub group: String,
    /// The round that [`Agreed`] named.
    pub round: u64,
    /// The handles of this rank's memory, one for each part: empty without memory, and for fds,
    /// which come with the frame.
    #[serde(default, deserialize_with = "at_most::<_, _, MAX_PARTS>")]
    pub fabric: Vec<Secret>,
    /// The first rank to answer with. Members that do not fit into a frame are asked for by the
    /// same request once more, without handles, with the first rank that has not come yet.
    #[serde(default)]
    pub first: u32,
}

/// See [`Ask::Leave`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    /// The group.
    pub group: String,
    /// The round that [`Agreed`] named.
    pub round: u64,
    /// How long to wait for the other ranks, in milliseconds; with 0 the rank leaves all the same.
    #[serde(default)]
    pub ms: u64,
}

/// The server's answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The request's.
    pub id: u64,
    /// The answer; `None` where this version does not know it.
    pub answer: Option<Answer>,
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Answer {
    /// It is done.
    Done(Empty),
    /// It is not.
    Refused(Refused),
    /// See [`Ask::List`].
    Names(Names),
    /// See [`Ask::Fetch`].
    Granted(Granted),
    /// See [`Ask::Redeem`]: so many fds come with the frame.
    Fds(Fds),
    /// See [`Ask::Probe`].
    Probed(Probed),
    /// See [`Ask::Join`].
    Agreed(Agreed),
    /// See [`Ask::Offer`].
    Members(Members),
    /// Instead of [`Agreed`] or [`Members`], to all ranks alike: the group did not come together.
    /// Instead of [`Done`](Self::Done) to a rank that leaves: not all the others have left.
    Incomplete(Incomplete),
}

/// See [`Answer::Names`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Names {
    /// What this peer may fetch, in the order of names.
    pub entries: Vec<Entry>,
    /// Whether there are more: ask again, after the last of these.
    #[serde(default)]
    pub more: bool,
}

/// A name and what is under it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// What it is.
    pub memory: Description,
    /// How many leases of it there are.
    #[serde(default)]
    pub leases: u32,
}

/// See [`Ask::Fetch`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Granted {
    /// Names the lease: a number that the instance gives once. A lease that ended while the client
    /// was silent can still be released by it, in a later session, unless its peer is any local
    /// process.
    pub lease: u64,
    /// What the memory is.
    pub memory: Description,
    /// How to import it.
    pub handles: Handles,
    /// Where a probe may write, in bytes from the start; it may lie beyond `memory.len`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<u64>,
    /// Why it is not a fabric handle, where one was wanted, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_fabric: Option<String>,
}

/// How to import memory: one handle for each part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handles {
    /// Fabric handles: 64 bytes each.
    Fabric(Vec<Secret>),
    /// As many fds, which come with the frame.
    Fds(Fds),
    /// The fds are at the server's door, for this ticket.
    Ticket(Secret),
}

/// So many fds come with the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fds {
    /// How many.
    pub count: u32,
}

/// See [`Ask::Probe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probed {
    /// The word that the server read; right if it is the one that the client wrote.
    pub found: u64,
    /// The word that the server wrote afterwards.
    pub wrote: u64,
}

/// See [`Ask::Join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agreed {
    /// Which life of the group this is.
    pub round: u64,
    /// How all ranks share.
    pub via: HandleType,
    /// How many handles all ranks have together: as many fds will come.
    #[serde(default)]
    pub handles: u32,
}

/// See [`Ask::Offer`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Members {
    /// The ranks, in order, from [`Offer::first`] on.
    pub members: Vec<Member>,
    /// Whether there are more: ask again, for the rank after the last of these.
    #[serde(default)]
    pub more: bool,
}

/// See [`Answer::Incomplete`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incomplete {
    /// Why: `timed_out` where ranks are missing, `closing` where ranks were lost,
    /// `no_common_handle`, or another word of [`crate::Refusal`].
    pub reason: String,
    /// Why, for people.
    #[serde(default)]
    pub detail: String,
    /// The ranks that are missing, in order.
    #[serde(default)]
    pub ranks: Vec<u32>,
    /// How many ranks there should be.
    pub size: u32,
    /// Without a common handle type: which ranks cannot do what, and why, for people.
    #[serde(default)]
    pub reasons: Vec<String>,
}

/// A rank of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its peer name.
    pub peer: String,
    /// Its memory, where it has brought some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Description>,
    /// How to import that; fds come with the frame, in the order of ranks and parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handles: Option<Handles>,
}

/// What a client reads after the greeting: a reply has an `id`, a notice has none.
#[derive(Clone, Debug, PartialEq)]
pub enum FromServer {
    /// An answer.
    Reply(Reply),
    /// An event.
    Notice(Notice),
}

/// What a server says unasked; `None` where this version does not know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Notice(pub Option<Event>);

/// See [`Notice`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// The exporter wants memory back: unmap and release it by then.
    Withdrawing(Withdrawing),
    /// A lease has ended without the client's doing.
    Ended(Ended),
    /// A watched name is there, or has other memory than before.
    Published(Entry),
    /// A watched name is gone.
    Gone(Gone),
    /// The server is about to end.
    Closing(Closing),
    /// Ranks of a group are gone without having left.
    Lost(Lost),
}

/// See [`Event::Withdrawing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withdrawing {
    /// The lease.
    pub lease: u64,
    /// In how many milliseconds.
    pub ms: u64,
}

/// See [`Event::Ended`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// The lease.
    pub lease: u64,
    /// Why.
    pub why: Refused,
}

/// See [`Event::Gone`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gone {
    /// The name.
    pub name: String,
}

/// See [`Event::Closing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closing {
    /// In how many milliseconds.
    pub ms: u64,
}

/// See [`Event::Lost`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// The group.
    pub group: String,
    /// The round that [`Agreed`] named.
    pub round: u64,
    /// The ranks.
    pub ranks: Vec<u32>,
}
