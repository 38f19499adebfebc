//! The connection of a session.

use std::sync::Arc;

use super::process::Known;
use super::session::ServerSession;
use crate::account::Account;
use crate::share::BootId;

/// A connection's properties, besides its two ends.
#[derive(Clone, Debug)]
pub(super) struct Link {
    /// Unique among a server's connections.
    pub id: u64,
    pub session: Arc<ServerSession>,
    /// A Unix socket: frames may carry fds.
    pub local: bool,
    /// Whether the client takes fds from queues.
    pub queues: bool,
    /// Counts the connection's fds at this end.
    pub fds: Arc<Account>,
    /// Over a Unix socket, the process that connected.
    pub process: Option<Known>,
    /// The client's machine, as the client claims.
    pub boot: BootId,
}

impl Link {
    /// Returns the process that connected over a Unix socket.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|known| known.shown.pid)
    }
}
