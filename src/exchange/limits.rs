//! Limits on a peer's requests and on their duration.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::account;
use crate::{Error, Result};

/// The limits of a server or a client. Beyond one, a request is refused with `limit`, or the connection is
/// dropped.
///
/// A server lowers some of them at its start if its process may have too few file descriptors (the soft
/// `RLIMIT_NOFILE`). Of N, N/8 are for connections that have not been greeted yet, at all addresses together;
/// N/4 for greeted ones, half of that for those of one peer; and N/2 for peers' fds. The rest is left to
/// everything else. The defaults need N = 32 768 with three addresses, including the fd socket; under the usual
/// 1024 they become 42, 256 and 128.
///
/// In a configuration file durations are whole milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes that a server keeps for one peer: frames in flight, requests, sessions, leases and queued
    /// events. Beyond the limit requests are refused and connections dropped. At least what a peer's
    /// connections, sessions and leases need: 32 KiB, 4 KiB and 768 bytes each.
    pub bytes_per_peer: usize,
    /// The same for all peers together. Connections that have not been greeted get at most a quarter of it.
    pub bytes: usize,
    /// Bytes of a frame.
    pub frame_bytes: u32,
    /// Bytes of the first frame, which may list the leases of a resumed session.
    pub hello_bytes: u32,
    /// File descriptors in a frame.
    pub frame_fds: u32,
    /// File descriptors that a server has open for one connection: those received and kept for a group, and
    /// those being sent to the client.
    pub fds_per_connection: usize,
    /// The same for all connections of one peer, also after they end. For all peers together it is half of
    /// `RLIMIT_NOFILE`.
    pub fds_per_peer: usize,
    /// Connections at one address that have not been greeted yet, at least 1; at all addresses together at
    /// most an eighth of `RLIMIT_NOFILE`. Beyond that, or if no fd is left for one, the oldest is dropped,
    /// once it has had a tenth of `handshake`, at most a second.
    pub handshakes: usize,
    /// Connections that have been greeted; at most a quarter of `RLIMIT_NOFILE`.
    pub connections: usize,
    /// Greeted connections of one peer; at most an eighth of `RLIMIT_NOFILE`.
    pub connections_per_peer: usize,
    /// Sessions, including those without a connection.
    pub sessions: usize,
    /// Sessions of one peer.
    pub sessions_per_peer: usize,
    /// Published names.
    pub names: usize,
    /// Leases of one peer.
    pub leases_per_peer: usize,
    /// Requests of one connection that are not answered yet.
    pub requests_in_flight: usize,
    /// Frames queued for a slow reader before it is dropped.
    pub queued_frames: usize,
    /// Tickets of one peer that are not redeemed yet.
    pub tickets_per_peer: usize,
    /// Names in one answer.
    pub list_page: usize,
    /// Groups.
    pub groups: usize,
    /// Groups in which one peer has ranks: half of all by default, so that no peer takes all of them.
    pub groups_per_peer: usize,
    /// Ranks of a group.
    pub group_size: u32,
    /// From connecting to the end of the greeting.
    #[serde(with = "ms")]
    pub handshake: Duration,
    /// From a request to its answer, for requests that do not wait.
    #[serde(with = "ms")]
    pub request: Duration,
    /// From a frame's first byte to its last.
    #[serde(with = "ms")]
    pub frame: Duration,
    /// To write a frame.
    #[serde(with = "ms")]
    pub write: Duration,
    /// The longest wait that a peer may ask for: for a name, a group, a withdrawal.
    #[serde(with = "ms")]
    pub wait: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes_per_peer: 256 << 20,
            bytes: 1 << 30,
            frame_bytes: 4 << 20,
            hello_bytes: 256 << 10,
            frame_fds: 1024,
            fds_per_connection: 4096,
            fds_per_peer: 16_384,
            handshakes: 1024,
            connections: 4096,
            connections_per_peer: 2048,
            sessions: 8192,
            sessions_per_peer: 4096,
            names: 65_536,
            leases_per_peer: 65_536,
            requests_in_flight: 64,
            queued_frames: 256,
            tickets_per_peer: 1024,
            list_page: 256,
            groups: 256,
            groups_per_peer: 128,
            group_size: 1024,
            handshake: Duration::from_secs(10),
            request: Duration::from_secs(30),
            frame: Duration::from_secs(10),
            write: Duration::from_secs(10),
            wait: Duration::from_secs(600),
        }
    }
}

/// The size of the smallest frame that fits any greeting, in bytes.
const LEAST_FRAME: u32 = 1024;

impl Limits {
    /// Checks that no limit excludes every peer.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) that names the first limit that is too small.
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |why: String| Err(Error::invalid("limits", why));
        for (key, bytes) in [
            ("frame_bytes", self.frame_bytes),
            ("hello_bytes", self.hello_bytes),
        ] {
            if bytes < LEAST_FRAME {
                return wrong(format!(
                    "`{key}` is {bytes}; set it to {LEAST_FRAME} or more"
                ));
            }
        }
        // A connection, its session and a request; before the greeting only a quarter is available.
        let least = account::CONNECTION + account::SESSION + 2 * account::REQUEST;
        for (key, bytes, least) in [
            ("bytes_per_peer", self.bytes_per_peer, least),
            ("bytes", self.bytes, 4 * least),
        ] {
            if bytes < least {
                return wrong(format!("`{key}` is {bytes}; set it to {least} or more"));
            }
        }
        for (key, zero) in [
            ("frame_fds", self.frame_fds == 0),
            ("fds_per_connection", self.fds_per_connection == 0),
            ("fds_per_peer", self.fds_per_peer == 0),
            ("handshakes", self.handshakes == 0),
            ("connections", self.connections == 0),
            ("connections_per_peer", self.connections_per_peer == 0),
            ("sessions", self.sessions == 0),
            ("sessions_per_peer", self.sessions_per_peer == 0),
            ("names", self.names == 0),
            ("leases_per_peer", self.leases_per_peer == 0),
            ("requests_in_flight", self.requests_in_flight == 0),
            ("queued_frames", self.queued_frames == 0),
            ("tickets_per_peer", self.tickets_per_peer == 0),
            ("list_page", self.list_page == 0),
            ("groups", self.groups == 0),
            ("groups_per_peer", self.groups_per_peer == 0),
            ("group_size", self.group_size == 0),
            ("handshake", self.handshake.is_zero()),
            ("request", self.request.is_zero()),
            ("frame", self.frame.is_zero()),
            ("write", self.write.is_zero()),
            ("wait", self.wait.is_zero()),
        ] {
            if zero {
                return wrong(format!("`{key}` is 0; set it to 1 or more"));
            }
        }
        Ok(())
    }
}

/// The longest wait: it keeps clocks from overflowing.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// Returns the time `within` from now.
pub(crate) fn deadline(within: Duration) -> tokio::time::Instant {
    tokio::time::Instant::now() + within.min(LONGEST)
}

/// Durations as whole milliseconds.
mod ms {
    use super::*;
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(value.as_millis().try_into().unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        u64::deserialize(d).map(Duration::from_millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_of_0_is_refused_by_name() {
        Limits::default().check().unwrap();
        let all = serde_json::to_value(Limits::default()).unwrap();
        for key in all.as_object().unwrap().keys() {
            let zero: Limits = serde_json::from_str(&format!("{{\"{key}\": 0}}")).unwrap();
            let error = zero.check().unwrap_err().to_string();
            assert!(error.contains(&format!("`{key}` is 0")), "{error}");
        }
    }

    #[test]
    fn limits_read_back_and_unknown_ones_are_refused() {
        let json = serde_json::to_string(&Limits::default()).unwrap();
        assert_eq!(
            serde_json::from_str::<Limits>(&json).unwrap(),
            Limits::default()
        );
        let some: Limits = serde_json::from_str(r#"{"wait": 1500, "names": 3}"#).unwrap();
        assert_eq!((some.wait.as_millis(), some.names), (1500, 3));
        assert!(serde_json::from_str::<Limits>(r#"{"name": 3}"#).is_err());
    }
}
