//! Hello and welcome.

use serde::{Deserialize, Serialize};

use crate::exchange::protocol::Secret;
use crate::exchange::protocol::at_most::{leases, some_leases};
use crate::exchange::protocol::inert;
use crate::share::{BootId, InstanceId};

/// The newest version of the protocol that this crate speaks.
pub const VERSION: u16 = 1;
/// The oldest.
pub const OLDEST: u16 = 1;
/// The first word of every hello.
pub const MAGIC: &str = "egmem";
/// The longest name in bytes; names are of `A–Z a–z 0–9 . _ - / :` and at least one byte.
pub const MAX_NAME: usize = 255;
/// The most leases that a hello or a welcome lists.
pub const MAX_LISTED: usize = 65_536;

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
    /// With `resume`: the leases that the client still has, in ascending order, at most
    /// [`MAX_LISTED`]. The session's other leases end, because their grants never arrived. Leases that
    /// the server does not know are listed in [`Welcome::ended`]. Without this list all leases go on;
    /// a client leaves it out where it does not fit into a hello, and a server ignores a list of more
    /// than twice the leases that a peer may have.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_leases"
    )]
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
    /// Of a resumed session: the leases of [`Hello::held`] that have ended, in ascending order.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "leases"
    )]
    pub ended: Vec<u64>,
    /// By what name the server knows the client.
    #[serde(deserialize_with = "inert::words")]
    pub peer: String,
    /// The client pings at least this often, in milliseconds.
    pub heartbeat_ms: u64,
    /// After this long without a word from the client its leases end, in milliseconds.
    pub lease_ms: u64,
    /// The largest frame the server reads, in bytes.
    pub frame_bytes: u32,
    /// The Unix socket at which tickets are redeemed, for clients on the same machine.
    #[serde(
        deserialize_with = "inert::path",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub door: Option<String>,
    /// A Unix socket at which the server speaks this protocol in full, for clients on the same
    /// machine: ranks of a group that share fds join there.
    #[serde(
        deserialize_with = "inert::path",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub local: Option<String>,
}

/// A refusal: see [`crate::Refusal`] for the words of `reason`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    /// Why, for programs.
    #[serde(deserialize_with = "inert::words")]
    pub reason: String,
    /// Why, for people.
    #[serde(deserialize_with = "inert::words", default)]
    pub detail: String,
}
