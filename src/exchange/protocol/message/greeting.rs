//! Hello and welcome.

use serde::{Deserialize, Serialize};

use super::is_false;
use crate::protocol::Secret;
use crate::protocol::sanitize;
use crate::share::{BootId, InstanceId};

/// The newest version of the protocol that this crate supports.
pub const VERSION: u16 = 2;
/// The oldest version.
pub const OLDEST: u16 = 2;
/// The first word of every hello.
pub const MAGIC: &str = "egmem";
/// The longest name in bytes; names consist of `A–Z a–z 0–9 . _ - / :` and have at least one byte.
pub const MAX_NAME: usize = 255;
/// The most bytes of a hello's frame.
pub const MAX_HELLO: u32 = 4 << 10;
/// The most leases in [`Leases`](crate::protocol::Leases).
pub const MAX_LISTED: usize = 65_536;

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
    /// Whether the client's driver can import fabric handles.
    pub fabric: bool,
    /// The session to resume after a broken connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume: Option<Secret>,
    /// The client's name for itself, for display: at most 255 bytes.
    #[serde(default)]
    pub agent: String,
    /// Whether the client can receive the fds of a memory's parts through a queue: see
    /// [`Fds::queue`](super::Fds::queue).
    #[serde(default, skip_serializing_if = "is_false")]
    pub queues: bool,
    /// Over a Unix socket: `resume` names a session that has a connection over TCP now, and moves here with the
    /// name and the rights of that connection.
    #[serde(default, skip_serializing_if = "is_false")]
    pub moves: bool,
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
    #[serde(deserialize_with = "sanitize::words")]
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
        deserialize_with = "sanitize::path",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub local: Option<String>,
}

/// A refusal: see [`crate::Refusal`] for the words of `reason`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    /// The reason, for programs.
    #[serde(deserialize_with = "sanitize::words")]
    pub reason: String,
    /// The reason, for people.
    #[serde(deserialize_with = "sanitize::words", default)]
    pub detail: String,
}
