//! The messages between client and server, and their encoding: docs/protocol.md is their specification.
//!
//! In CBOR each message is a map with text keys; a reader skips unknown keys. An enumeration is a map of one entry,
//! such as `{"fetch": {…}}`, or the text of a variant without fields.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::{fmt, io};

use serde::de::{self, DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::driver::{Access, HandleType, NodeId, ShareableHandle};
use crate::share::{BootId, Description, InstanceId, Shared};
use crate::text::{MAX_TEXT, bounded, is_unsafe};
use crate::{Error, Owner, Refusal, Result};

/// The newest version of the protocol that this crate supports.
pub const VERSION: u16 = 2;
/// The oldest version.
pub const OLDEST: u16 = 2;
/// The first word of every hello.
pub const MAGIC: &str = "egmem";
/// The most bytes of a hello's frame.
pub const MAX_HELLO: u32 = 4 << 10;
/// The most bytes of a request's frame: one that creates memory may list 64 KiB of peers.
pub const MAX_REQUEST: u32 = 68 << 10;
/// The most leases in one message.
pub const MAX_LISTED: usize = 1024;

/// The first frame, from the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: String,
    /// The oldest version that the client supports.
    pub oldest: u16,
    /// The newest version.
    pub newest: u16,
    /// The client's machine: if it is the server's too, fds can be passed.
    pub boot: BootId,
    /// The session to resume after a broken connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume: Option<Secret>,
    /// The client's name for itself, for display: at most 255 bytes.
    #[serde(default)]
    pub agent: String,
    /// Over a Unix socket: `resume` names a session that has a connection over TCP now, and moves here with the
    /// name and the rights of that connection.
    #[serde(default, skip_serializing_if = "is_false")]
    pub moves: bool,
    /// For a server of version 1, which reads no hello without this, and could not say that the client is too new.
    #[serde(default)]
    pub fabric: bool,
}

/// The server's answer to a hello: `welcome` or `refused`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Greeting {
    /// The session begins.
    Welcome(Welcome),
    /// It does not begin, and the connection is closed.
    Refused(Refused),
}

/// A session's terms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// The version to use from now on: the newest that both support.
    pub version: u16,
    /// The server's instance, which changes at a restart.
    pub instance: InstanceId,
    /// The server's machine.
    pub boot: BootId,
    /// Lets another connection of the same peer resume the session.
    pub session: Secret,
    /// Whether the session that the client named is resumed, with its leases.
    pub resumed: bool,
    /// The name by which the server knows the client.
    #[serde(deserialize_with = "words")]
    pub peer: String,
    /// The client pings at least this often, in milliseconds.
    pub heartbeat_ms: u64,
    /// After this long without a message from the client its leases end, in milliseconds.
    pub lease_ms: u64,
    /// The largest frame the server reads, in bytes.
    pub frame_bytes: u32,
    /// The Unix socket to which sessions of clients on the same machine [move](Hello::moves): an absolute path, or an
    /// abstract name after `@`.
    #[serde(
        deserialize_with = "path",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub local: Option<String>,
}

/// A refusal: see [`crate::Refusal`] for the words of `reason`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    /// The reason, for programs.
    #[serde(deserialize_with = "words")]
    pub reason: String,
    /// The reason, for people.
    #[serde(deserialize_with = "words", default)]
    pub detail: String,
}

impl Refused {
    pub(crate) fn new(reason: &Refusal, detail: &str) -> Self {
        let reason = reason.word().into();
        let detail = detail.into();
        Self { reason, detail }
    }
}

/// A client's request after the greeting, `[id, ask]`. Many may be in flight; answers come in any order. The id is unique
/// among a connection's requests that are not answered yet.
pub type Request = (u64, Ask);

/// A request without its id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Ask {
    /// A heartbeat, answered by [`Answer::Done`].
    Ping,
    /// Lists names, answered by [`Answer::Names`].
    List(List),
    /// Waits for a name and returns its entry, answered by [`Answer::Names`] with one.
    Wait {
        /// The name.
        name: String,
        /// The longest wait, in milliseconds; the server may have a lower limit.
        ms: u64,
    },
    /// Requests handles and a lease, answered by [`Answer::Granted`].
    Fetch(Fetch),
    /// After a session was resumed: the leases that the client has. The session's other leases end, because their grants
    /// never arrived. Events about recalled ones are sent again. Answered by [`Answer::Expired`]. Without this request all
    /// leases go on.
    Held(Held),
    /// Ends a lease: its memory is unmapped. Answered by [`Answer::Done`].
    Release {
        /// The lease.
        lease: u64,
    },
    /// Reports that the word at the probe's place is written, if the client may write, answered by
    /// [`Answer::Probed`].
    Probe {
        /// The lease.
        lease: u64,
    },
    /// Requests new memory under a name from an allocator service. Answered by
    /// [`Answer::Names`] with one.
    Create(Create),
    /// Ends a name that this peer created, answered by [`Answer::Done`].
    Delete {
        /// The name.
        name: String,
        /// How long to wait for holders, in milliseconds.
        #[serde(default)]
        ms: u64,
    },
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

/// See [`Ask::Fetch`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fetch {
    /// The name.
    pub name: String,
    /// The handle types that the client can import, most wanted first.
    pub accept: Vec<HandleType>,
    /// The access that the client needs; without it, as much as there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
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

/// See [`Ask::Held`]. Several requests list the leases of a client that has many.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The client's leases in ascending order, each once, at most [`MAX_LISTED`].
    #[serde(deserialize_with = "ascending")]
    pub leases: Vec<u64>,
    /// This request is about leases after this one only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// Whether it is about leases up to the last of `leases` only: the next request is about those after it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub more: bool,
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
    /// Which peers may fetch it besides its creator: the text of a [`PeerList`](crate::PeerList), such as
    /// `node7.cluster, uid:1000`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub peers: String,
}

/// A server's answer to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Answer {
    /// The request succeeded.
    Done,
    /// The request was refused.
    Refused(Refused),
    /// See [`Ask::List`].
    Names(Names),
    /// See [`Ask::Fetch`].
    Granted(Granted),
    /// The leases of [`Ask::Held`] that have ended.
    Expired {
        /// Their numbers in ascending order, each once, at most [`MAX_LISTED`].
        #[serde(deserialize_with = "ascending")]
        leases: Vec<u64>,
    },
    /// See [`Ask::Probe`].
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
    #[serde(deserialize_with = "name")]
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

/// See [`Ask::Fetch`].
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
        deserialize_with = "words",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub no_fabric: Option<String>,
    /// The name's owner; omitted for the server itself.
    #[serde(default, skip_serializing_if = "Owner::is_server")]
    pub owner: Owner,
}

/// How to import memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handles {
    /// Fabric handles, one for each part: 64 bytes each.
    Fabric(Vec<Secret>),
    /// So many file descriptors, one for each part, which come with the frame.
    Fds(u32),
    /// Memory of more than [32 parts](crate::share::queue::MAX_WITH_MESSAGE). One fd comes with the frame, a socket through
    /// which the fds of the parts come, 16 at a time.
    Queue,
}

/// See [`Ask::Probe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probed {
    /// The word that the server read; correct if it is the one that the client wrote.
    pub found: u64,
    /// The word that the server wrote afterwards.
    pub wrote: u64,
}

/// A message to a client after the greeting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromServer {
    /// The answer to the request with this id, `[id, answer]`.
    Reply(u64, Answer),
    /// An event.
    Event(Event),
}

/// An unsolicited message of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The exporter recalls memory: unmap and release it by then.
    Withdrawing {
        /// The lease.
        lease: u64,
        /// In how many milliseconds.
        ms: u64,
    },
    /// The server has ended a lease.
    Ended {
        /// The lease.
        lease: u64,
        /// The reason.
        why: Refused,
    },
    /// The server is about to end.
    Closing {
        /// In how many milliseconds.
        ms: u64,
    },
    /// The server has ended the session: it cannot be resumed, and the connection ends.
    Dismissed(Refused),
}

/// Leaves a flag that is not set out of a message.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}

/// Deserializes leases. A set, because numbers that repeat would take many times the memory of their frame.
fn ascending<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    let leases = BTreeSet::deserialize(deserializer)?;
    if leases.len() > MAX_LISTED {
        let most = "at most 1024 leases";
        return Err(de::Error::invalid_length(leases.len(), &most));
    }
    Ok(Vec::from_iter(leases))
}

// What a server sends is checked as it is read. A server checks requests itself, so that it can answer with a refusal.

/// Deserializes a name of memory.
fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    check_name(&name).map_err(de::Error::custom)?;
    Ok(name)
}

/// Deserializes a text for people: at most [`MAX_TEXT`] bytes, without control characters.
fn words<'de, D: Deserializer<'de>, T: From<String>>(deserializer: D) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    Ok(bounded(&text, MAX_TEXT).into())
}

/// Deserializes the path of a Unix socket that a client may connect to.
fn path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let path = Option::<String>::deserialize(deserializer)?;
    match path.as_deref().and_then(fault_of_path) {
        Some(why) => Err(de::Error::custom(why)),
        None => Ok(path),
    }
}

/// Returns why a client refuses the path of a Unix socket: it is to be absolute, or an abstract name after `@`, and short
/// enough for `sockaddr_un`, which has 108 bytes with a final NUL.
pub(crate) fn fault_of_path(path: &str) -> Option<&'static str> {
    if !path.starts_with(['/', '@']) {
        Some("a socket's path that is not absolute")
    } else if path.len() > 107 {
        Some("a socket's path of more than 107 bytes")
    } else if path.contains(is_unsafe) {
        Some("a socket's path with a control character")
    } else {
        None
    }
}

/// How many bytes of a decoder's message an error contains: it may quote the peer.
const MAX_DETAIL: usize = 160;

/// Encodes a message in CBOR; the bytes are wiped when dropped, and no copy is left elsewhere.
///
/// Returns no bytes for a type that CBOR cannot represent; this protocol has none.
pub fn encode<T: Serialize + ?Sized>(message: &T) -> Zeroizing<Vec<u8>> {
    let mut bytes = Wiped(Zeroizing::new(Vec::with_capacity(SHORT)));
    if ciborium::into_writer(message, &mut bytes).is_err() {
        bytes.0.clear();
    }
    bytes.0
}

/// Decodes a message from exactly these bytes.
///
/// The result takes at most a small multiple of the input's size, for any lengths that the input claims. The decoder's
/// scratch memory is wiped.
///
/// # Errors
/// [`Protocol`](crate::ShareError::Protocol) of `peer` for anything else.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    // As long as the input, so that every string goes through it and no copy is left elsewhere.
    let mut scratch = Zeroizing::new(vec![0; bytes.len().max(64)]);
    let mut rest = bytes;
    let message = ciborium::de::from_reader_with_buffer(&mut rest, &mut scratch)
        .map_err(|error| fault(&error.to_string()))?;
    if !rest.is_empty() {
        return Err(fault("bytes after the message"));
    }
    Ok(message)
}

fn fault(detail: &str) -> Error {
    Error::protocol("peer", bounded(detail, MAX_DETAIL))
}

/// The bytes of most messages.
const SHORT: usize = 512;

/// A vector that grows by hand: by itself it leaves its bytes behind in freed memory.
struct Wiped(Zeroizing<Vec<u8>>);

impl io::Write for Wiped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let need = self.0.len() + bytes.len();
        if need > self.0.capacity() {
            let mut more = Zeroizing::new(Vec::with_capacity(need.max(2 * self.0.capacity())));
            more.extend_from_slice(&self.0);
            self.0 = more;
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The most bytes of a secret.
pub const MAX_SECRET: usize = 64;

/// A fabric handle or a session's token: at most [`MAX_SECRET`] bytes that are never displayed, and wiped when dropped.
/// Comparison takes constant time.
#[derive(Clone)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Returns the value with these bytes; `None` for more than [`MAX_SECRET`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= MAX_SECRET).then(|| Self(Zeroizing::new(bytes.to_vec())))
    }

    /// Returns the bytes.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// Exports the fabric handles of shared memory.
    pub(crate) fn of_fabric(shared: &Shared) -> Result<Vec<Self>> {
        let handles = shared.export(HandleType::Fabric)?;
        let secrets = handles.iter().filter_map(|handle| match handle {
            ShareableHandle::Fabric(handle) => Self::new(handle.expose_bytes()),
            ShareableHandle::PosixFd(_) => None,
        });
        Ok(secrets.collect())
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({} bytes, redacted)", self.0.len())
    }
}

/// As a byte string.
impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Secret;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_SECRET} bytes")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
                Secret::new(bytes).ok_or_else(|| E::invalid_length(bytes.len(), &self))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

/// The longest name in bytes; names consist of `A–Z a–z 0–9 . _ - / :` and have at least one byte.
pub const MAX_NAME: usize = 255;
/// The form of names, for errors.
const VALID: &str = "1 to 255 of A–Z a–z 0–9 . _ - / :";

/// Checks a name of memory: 1 to [`MAX_NAME`] bytes of `A–Z a–z 0–9 . _ - / :`.
///
/// ```
/// use egmem::exchange::protocol::check_name;
///
/// assert!(check_name("job-7/rank:0").is_ok());
/// assert!(check_name("").is_err());
/// assert!(check_name("a b").is_err());
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) with the fault, without the name.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::invalid_of("name", "it is empty", VALID));
    }
    check_prefix(name)
}

/// Checks a prefix of names: as [`check_name`], but it may be empty.
///
/// # Errors
/// As [`check_name`].
pub fn check_prefix(prefix: &str) -> Result<()> {
    if prefix.len() > MAX_NAME {
        let why = format!("it has {} bytes", prefix.len());
        return Err(Error::invalid_of("name", why, VALID));
    }
    let is_bad = |byte: u8| !byte.is_ascii_alphanumeric() && !b"._-/:".contains(&byte);
    if let Some(at) = prefix.bytes().position(is_bad) {
        let why = format!("byte {at} may not be in a name");
        return Err(Error::invalid_of("name", why, VALID));
    }
    Ok(())
}
