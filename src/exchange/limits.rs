//! Limits on a peer's requests and on their duration.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Defines limits, each with its default.
macro_rules! limits {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$about:meta])* pub $field:ident: $type:ty = $default:expr,)*
    }) => {
        $(#[$meta])*
        pub struct $name {
            $($(#[$about])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $name {
            /// Returns the first limit that is 0.
            fn zero(&self) -> Option<&'static str> {
                $(if self.$field == <$type>::default() {
                    return Some(stringify!($field));
                })*
                None
            }
        }
    };
}

limits! {
    /// The limits of a server or a client. Beyond one, a request is refused with `limit`, or the connection is
    /// dropped.
    ///
    /// A server lowers some of them at its start if its process may have too few file descriptors (the soft
    /// `RLIMIT_NOFILE`). Of N, N/8 are for connections that have not been greeted yet, at all addresses together;
    /// N/4 for greeted ones, half of that for those of one peer; and N/2 for peers' fds. The rest is left to
    /// everything else. The defaults need N = 32 768; under the usual 1024 they become 128, 256 and 128.
    ///
    /// In a configuration file durations are whole milliseconds.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    #[non_exhaustive]
    pub struct Limits {
        /// Bytes of a frame that is read. A server reads no frames of more than 68 KiB: no request is so long. Of answers
        /// with more than 64 KiB it writes at most 64 at once, and 4 to one peer; the others wait.
        pub frame_bytes: u32 = 4 << 20,
        /// File descriptors that a server has open for one peer: those being sent to it. For all peers together it is half of
        /// `RLIMIT_NOFILE`.
        pub fds_per_peer: usize = 16_384,
        /// Connections that have not been greeted yet, at least 1; at most an eighth of `RLIMIT_NOFILE`. Beyond that,
        /// or if no fd is left for one, the oldest is closed, once it has had 250 ms.
        pub handshakes: usize = 1024,
        /// Connections that have been greeted; at most a quarter of `RLIMIT_NOFILE`.
        pub connections: usize = 4096,
        /// Greeted connections of one peer; at most an eighth of `RLIMIT_NOFILE`.
        pub connections_per_peer: usize = 2048,
        /// Sessions, including those without a connection.
        pub sessions: usize = 8192,
        /// Sessions of one peer.
        pub sessions_per_peer: usize = 4096,
        /// Published names.
        pub names: usize = 65_536,
        /// Published names that one peer owns.
        pub names_per_peer: usize = 4096,
        /// Leases of one peer.
        pub leases_per_peer: usize = 65_536,
        /// Requests of one connection that are not answered yet.
        pub requests_in_flight: usize = 64,
        /// The same for all connections of one peer, of requests that may wait. A `create` counts once more for each 2 KiB of its
        /// list of peers.
        pub requests_per_peer: usize = 65_536,
        /// The same for all peers together.
        pub requests: usize = 262_144,
        /// Names in one answer.
        pub list_page: usize = 256,
        /// From connecting to the end of the greeting.
        #[serde(with = "ms")]
        pub handshake: Duration = Duration::from_secs(5),
        /// A server's: from a request to its answer, for requests that do not wait. A client has
        /// [`timeout`](crate::ClientOptions::timeout).
        #[serde(with = "ms")]
        pub request: Duration = Duration::from_secs(30),
        /// From a frame's first byte to its last.
        #[serde(with = "ms")]
        pub frame: Duration = Duration::from_secs(10),
        /// To write a frame.
        #[serde(with = "ms")]
        pub write: Duration = Duration::from_secs(10),
        /// The longest wait that a peer may ask for: for a name, a withdrawal.
        #[serde(with = "ms")]
        pub wait: Duration = Duration::from_secs(600),
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
        let bytes = self.frame_bytes;
        if bytes < LEAST_FRAME {
            let key = "frame_bytes";
            return wrong(format!(
                "`{key}` is {bytes}; set it to {LEAST_FRAME} or more"
            ));
        }
        match self.zero() {
            Some(key) => wrong(format!("`{key}` is 0; set it to 1 or more")),
            None => Ok(()),
        }
    }
}

/// The longest wait: it keeps clocks from overflowing.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// Returns the time `within` from now.
pub(crate) fn deadline(within: Duration) -> tokio::time::Instant {
    tokio::time::Instant::now() + within.min(LONGEST)
}

/// Returns whole milliseconds.
pub(crate) fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

/// Durations as whole milliseconds.
mod ms {
    use super::*;
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(millis(*value))
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
