//! Options of a client; connects it, and exchanges the two messages that begin a session.

use std::pin::pin;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::capability::{Capabilities, ImexChannel, Path, Trial};
use crate::driver::{Call, Code, DeviceAttribute, HandleTypes, Location, random};
use crate::protocol::{
    Ask, Greeting, Hello, MAGIC, OLDEST, Refused, VERSION, Welcome, decode, encode,
};
use crate::share::{BootId, Peers};
use crate::text::bounded;
use crate::transport::{self, Connection, Frame};
use crate::{
    Address, Driver, DriverError, Error, Limits, MemoryError, Owner, PeerName, Refusal, Result,
    Security, ShareError,
};

/// The most bytes of a client's name for itself.
const MAX_AGENT: usize = 255;
/// The id of pings before the session has its task.
pub(super) const UNASKED: u64 = 0;
/// The shortest heartbeat and lease that a server may set.
const LEAST: Duration = Duration::from_millis(10);
/// The longest heartbeat and lease.
const MOST: Duration = Duration::from_secs(86_400);

/// When a client reconnects after its connection broke: after a random part of `first`, then of twice that,
/// up to `most`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reconnect {
    /// The longest first pause.
    pub first: Duration,
    /// The longest pause; zero means never to reconnect.
    pub most: Duration,
}

impl Default for Reconnect {
    /// From 50 ms to 5 s.
    fn default() -> Self {
        Self::backoff(Duration::from_millis(50), Duration::from_secs(5))
    }
}

impl Reconnect {
    /// Returns pauses from `first` to `most`, each at least a millisecond.
    pub fn backoff(first: Duration, most: Duration) -> Self {
        let first = first.max(Duration::from_millis(1));
        Self {
            first,
            most: most.max(first),
        }
    }

    /// Never reconnects: a broken connection ends the client and its leases.
    pub const fn never() -> Self {
        Self {
            first: Duration::ZERO,
            most: Duration::ZERO,
        }
    }

    pub(crate) const fn is_never(&self) -> bool {
        self.most.is_zero()
    }

    /// Returns the pause before attempt number `attempt`, counted from 0: half to all of it, at random, so
    /// that many clients do not reconnect at once.
    pub(crate) fn pause(&self, attempt: u32) -> Duration {
        let whole = self
            .first
            .saturating_mul(1_u32.checked_shl(attempt.min(20)).unwrap_or(u32::MAX))
            .min(self.most);
        let part = random::<2>().map_or(u16::MAX, u16::from_le_bytes);
        let half = whole / 2;
        half + half.mul_f64(f64::from(part) / f64::from(u16::MAX))
    }
}

/// Options of a client; [`connect`](Self::connect) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `connect`"]
pub struct ClientOptions {
    pub(super) address: Address,
    pub(super) security: Security,
    pub(super) peers: Peers,
    pub(super) limits: Limits,
    pub(super) reconnect: Reconnect,
    pub(super) agent: String,
    pub(super) timeout: Duration,
    pub(super) patient: bool,
    /// The owner that fetches expect, unless they name another.
    pub(super) owner: Option<Owner>,
}

impl ClientOptions {
    pub(super) fn new(address: Address) -> Self {
        Self {
            address,
            security: Security::Plain,
            peers: Peers::same_user(),
            limits: Limits::default(),
            reconnect: Reconnect::default(),
            agent: concat!("egmem ", env!("CARGO_PKG_VERSION")).into(),
            timeout: Duration::from_secs(10),
            patient: false,
            owner: None,
        }
    }

    setters! {
        /// Sets how the connection is protected. By default not at all, which only loopback addresses and Unix
        /// sockets allow.
        security: Security;

        /// Sets which users' servers may be used over Unix sockets, also of a server that is dialed over TCP: by default
        /// the same user's.
        peers: Peers;

        /// Sets the sizes, counts and times that the client allows.
        limits: Limits;

        /// Sets when to reconnect after the connection broke.
        reconnect: Reconnect;

        /// Sets how long [`connect`](Self::connect) may take in all, and then each request until its answer; 10 s by
        /// default. A creation has a [time of its own](crate::CreateOptions::timeout); waits and deletions add the
        /// time that the caller gives them.
        timeout: Duration;

        /// Sets whether [`connect`](Self::connect) retries, until its time is over, if no process listens yet.
        patient: bool;
    }

    /// Sets the client's name for the server's log: at most 255 bytes, the rest is cut off.
    pub fn agent(mut self, agent: impl Into<String>) -> Self {
        self.agent = bounded(&agent.into(), MAX_AGENT);
        self
    }

    /// Refuses memory of another owner in every fetch of the client, as
    /// [`FetchOptions::expect_owner`](super::FetchOptions::expect_owner) does for one fetch, which overrides
    /// this.
    pub fn expect_owner(mut self, owner: impl Into<Owner>) -> Self {
        self.owner = Some(owner.into());
        self
    }
}

/// How a client connects and describes itself.
#[derive(Clone, Debug)]
pub(crate) struct Dial {
    pub(super) options: ClientOptions,
    pub(super) boot: BootId,
    /// Why fabric handles cannot be imported; `None` if they can.
    pub(super) no_fabric: Option<MemoryError>,
    /// Whether it imports memory, and only fds: then a session over TCP alone fetches nothing.
    pub(super) needs_fds: bool,
}

/// A session's terms, checked.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    /// The server, for messages.
    pub(super) peer: String,
    pub(super) server: PeerName,
    /// The server's process, over a Unix socket.
    pub(super) pid: Option<u32>,
    pub(super) heartbeat: Duration,
    pub(super) lease: Duration,
    /// Whether the connection is a Unix socket, which passes fds.
    pub(super) unix: bool,
    /// Why the session has not moved to the server's Unix socket.
    pub(super) no_unix: Option<String>,
    /// The server's answer. Its times are unchecked.
    pub(super) welcome: Welcome,
}

/// Returns whether a client is not let in until a list, a certificate or a program changes.
pub(super) fn is_final(error: &Error) -> bool {
    use crate::Refusal::{Forbidden, NotTrusted, Version};
    matches!(error, Error::Share(ShareError::NotTrusted { .. }))
        || matches!(error.refusal(), Some(Forbidden | NotTrusted | Version))
}

/// Connects, and begins a session or resumes the one with these terms; calls the function once the server has resumed it.
pub(super) async fn establish(
    dial: &Dial,
    before: Option<&Terms>,
    resumed: impl Fn(),
    deadline: Instant,
) -> Result<(Connection, Terms)> {
    let left = deadline.saturating_duration_since(Instant::now());
    let greeted = timeout_at(deadline, greet(dial, before, None, left)).await;
    let (mut connection, mut terms) = greeted.unwrap_or_else(|_| {
        let what = format!("connecting to {}", dial.options.address);
        Err(Error::timed_out(what, left))
    })?;
    if terms.welcome.resumed {
        // The leases live on, however long the move takes.
        resumed();
    }
    move_to_unix(dial, &mut connection, &mut terms, deadline).await;
    Ok((connection, terms))
}

/// Moves a session over TCP to the Unix socket of a server on this machine, because only that passes fds. Where the
/// socket cannot be reached, the session stays, and `no_unix` says why. Nobody reads the first connection any more: the
/// client asks on the last one which of its leases have ended.
///
/// A greeting there may take all of the time for a client that needs fds. For another one a socket at which nobody answers
/// takes a quarter of it.
async fn move_to_unix(
    dial: &Dial,
    connection: &mut Connection,
    terms: &mut Terms,
    deadline: Instant,
) {
    let Some(local) = &terms.welcome.local else {
        return;
    };
    if terms.unix || terms.welcome.boot != dial.boot {
        return;
    }
    // tokio takes a path with a leading NUL for an abstract name.
    let path = local.strip_prefix('@').map(|name| format!("\0{name}"));
    let address = Address::Unix(path.unwrap_or_else(|| local.clone()).into());
    let mut left = deadline.saturating_duration_since(Instant::now());
    if !dial.needs_fds {
        left = (left / 4).min(dial.options.limits.handshake);
    }
    if terms.welcome.resumed {
        // This end does not hear the server meanwhile, and would give its leases up.
        left = left.min(terms.lease / 2);
    }
    let moved = {
        let mut moving = pin!(timeout(
            left,
            greet(dial, Some(terms), Some(&address), left)
        ));
        loop {
            tokio::select! {
                moved = &mut moving => {
                    break moved.unwrap_or_else(|_| Err(Error::timed_out("its greeting", left)));
                }
                // The server closes a silent connection, and the session may stay on this one.
                () = sleep(terms.heartbeat / 2) => {
                    let ping = encode(&(UNASKED, Ask::Ping));
                    let _ = connection.writer.write(&ping, &[]).await;
                }
            }
        }
    };
    let why = match moved {
        Ok((moved, to)) if to.welcome.instance == terms.welcome.instance => {
            (terms.unix, terms.pid) = (true, to.pid);
            (connection.reader, connection.writer) = (moved.reader, moved.writer);
            return;
        }
        Ok(_) => "another server listens there".into(),
        Err(error) => error.to_string(),
    };
    tracing::debug!(socket = local, why, "the session stays on TCP");
    let hint = if local.starts_with('@') {
        "give this container the server's network namespace, or have the server listen at a Unix socket too"
    } else {
        "mount the socket's folder into this container at the same path"
    };
    terms.no_unix = Some(format!(
        "its Unix socket {local} cannot be used: {why}; {hint}"
    ));
}

/// Connects, says hello and reads the greeting; the handshake may take `left`. A session that moves to the Unix socket
/// `to` has been begun over TCP.
async fn greet(
    dial: &Dial,
    before: Option<&Terms>,
    to: Option<&Address>,
    left: Duration,
) -> Result<(Connection, Terms)> {
    let options = &dial.options;
    let mut limits = options.limits.clone();
    limits.handshake = left;
    let address = to.unwrap_or(&options.address);
    let security = to.map_or(&options.security, |_| &Security::Plain);
    let mut connection = transport::connect(address, security, &options.peers, &limits).await?;
    let peer = connection.label.to_string();
    // A server other than the session's must not learn its secret. It has named the socket to which it moves.
    let resume = before.filter(|before| to.is_some() || before.server == connection.peer);
    let hello = encode(&Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: dial.boot,
        resume: resume.map(|before| before.welcome.session.clone()),
        agent: options.agent.clone(),
        moves: to.is_some(),
        fabric: false,
    });
    connection.writer.write(&hello, &[]).await?;
    let Some(frame) = connection.reader.read(options.limits.frame_bytes).await? else {
        let why = "it closed the connection instead of a greeting";
        return Err(Error::peer_lost(peer, why));
    };
    let welcome = match decode_from(&peer, &frame)? {
        Greeting::Welcome(welcome) => welcome,
        Greeting::Refused(why) => return Err(refused(&peer, "a session", &why)),
    };
    if !(OLDEST..=VERSION).contains(&welcome.version) {
        let why = format!("version {} was not offered", welcome.version);
        return Err(Error::protocol(peer, why));
    }
    if welcome.resumed && resume.is_none() || to.is_some() && !welcome.resumed {
        let why = "another session than the one that was named";
        return Err(Error::protocol(peer, why));
    }
    let heartbeat = Duration::from_millis(welcome.heartbeat_ms).clamp(LEAST, MOST);
    let terms = Terms {
        heartbeat,
        lease: Duration::from_millis(welcome.lease_ms).clamp(heartbeat, MOST),
        unix: connection.user.is_some(),
        no_unix: None,
        pid: connection.pid,
        server: connection.peer.clone(),
        peer,
        welcome,
    };
    Ok((connection, terms))
}

/// Converts a peer's refusal to an error.
pub(super) fn refused(peer: &str, what: impl Into<String>, why: &Refused) -> Error {
    let reason = Refusal::from_word(&why.reason);
    Error::refused(peer, what, reason, &*why.detail)
}

/// Decodes a message of `peer`.
pub(super) fn decode_from<T: DeserializeOwned>(peer: &str, frame: &Frame) -> Result<T> {
    decode(&frame.bytes).map_err(|error| match error {
        Error::Share(ShareError::Protocol { detail, .. }) => Error::protocol(peer, detail),
        other => other,
    })
}

/// Returns why fabric handles cannot be imported; `None` if they can.
///
/// Creates, exports, imports and maps memory with fabric handles, which needs the same rights as importing
/// another process's; without an IMEX channel it skips the trial.
pub(crate) fn importable(driver: &Driver) -> Option<MemoryError> {
    let channel = ImexChannel::of(driver);
    if !channel.usable() {
        return Some(MemoryError::NoImexChannel {
            path: channel.path(),
            source: DriverError {
                call: Call::MemCreate,
                code: Code::NOT_PERMITTED,
            },
        });
    }
    let capabilities = Capabilities::of(driver);
    let mut why = None;
    for gpu in 0..driver.device_count().unwrap_or(0) {
        let location = match driver.device_attribute(gpu, DeviceAttribute::HOST_NUMA_ID) {
            Ok(node) if node >= 0 => Location::HostNuma(node),
            _ => Location::Device(gpu),
        };
        let support = capabilities.trial(Trial {
            location,
            gpu,
            path: Path::Vmm,
            handle_types: HandleTypes::FABRIC,
        });
        match support.error() {
            None => return None,
            Some(error) => why = why.or_else(|| Some(error.clone())),
        }
    }
    why.or(Some(MemoryError::NoSuchGpu { gpu: 0, count: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;

    #[test]
    fn fabric_needs_a_channel() {
        let with = Driver::simulated(Machine::gh200()).unwrap();
        assert_eq!(importable(&with), None);
        let without = Driver::simulated(Machine::gh200x4()).unwrap();
        assert!(matches!(
            importable(&without),
            Some(MemoryError::NoImexChannel { .. })
        ));
    }

    #[test]
    fn pauses_grow_up_to_the_longest_and_vary() {
        let reconnect = Reconnect::backoff(Duration::from_millis(8), Duration::from_millis(100));
        for (attempt, whole) in [
            (0, 8),
            (1, 16),
            (3, 64),
            (4, 100),
            (40, 100),
            (u32::MAX, 100),
        ] {
            let whole = Duration::from_millis(whole);
            let pauses: Vec<_> = (0..32).map(|_| reconnect.pause(attempt)).collect();
            assert!(
                pauses
                    .iter()
                    .all(|&pause| pause >= whole / 2 && pause <= whole)
            );
            assert!(pauses.iter().any(|&pause| pause != pauses[0]));
        }
        assert!(Reconnect::never().is_never());
        assert!(!Reconnect::default().is_never());
        let least = Reconnect::backoff(Duration::ZERO, Duration::ZERO);
        assert!(!least.is_never() && least.pause(0) > Duration::ZERO);
    }
}
