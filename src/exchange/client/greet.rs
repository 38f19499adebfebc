//! Connects to a server, and exchanges the two messages that begin a session.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use zeroize::Zeroizing;

use super::options::ClientOptions;
use super::text;
use crate::protocol::{
    Greeting, Hello, MAGIC, MAX_LISTED, OLDEST, Secret, VERSION, Welcome, decode, encode,
};
use crate::share::BootId;
use crate::tls::Credential;
use crate::transport::{self, Connection, FrameReader, FrameWriter, Unconnected};
use crate::{Error, MemoryError, PeerName, Result, ShareError};

/// The shortest heartbeat and lease that a server may set.
const LEAST: Duration = Duration::from_millis(10);
/// The longest heartbeat and lease.
const MOST: Duration = Duration::from_secs(86_400);

/// How a client connects and describes itself.
#[derive(Clone, Debug)]
pub(crate) struct Dial {
    pub(super) options: ClientOptions,
    pub(super) boot: BootId,
    /// Why fabric handles cannot be imported; `None` if they can.
    pub(super) no_fabric: Option<MemoryError>,
}

/// A session to resume.
pub(super) struct Resume {
    pub(super) session: Secret,
    /// The server that created it: no other server gets the secret.
    pub(super) server: PeerName,
    /// In ascending order.
    pub(super) held: Vec<u64>,
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
    /// The server's answer. Its peer name is escaped; its times and paths are unchecked, and `ended` is empty.
    pub(super) welcome: Welcome,
}

/// A connection, greeted.
pub(super) struct Established {
    pub(super) reader: FrameReader,
    pub(super) writer: FrameWriter,
    pub(super) terms: Terms,
    /// The leases that ended while there was no connection.
    pub(super) ended: Vec<u64>,
    /// Over TLS, the certificates that the server was verified with.
    pub(super) credential: Option<Arc<Credential>>,
}

/// Returns whether a retry may succeed: no process listens yet, or the server is too busy.
pub(crate) const fn may_pass(error: &Error) -> bool {
    use crate::Refusal::{Closing, Limit};
    error.is_unreachable() || matches!(error.refusal(), Some(Closing | Limit))
}

/// Returns whether a client is not let in until a list, a certificate or a program changes.
pub(super) const fn is_final(error: &Error) -> bool {
    use crate::Refusal::{Forbidden, NotTrusted, Version};
    matches!(error, Error::Share(ShareError::NotTrusted { .. }))
        || matches!(error.refusal(), Some(Forbidden | NotTrusted | Version))
}

/// Connects, and begins or resumes a session.
pub(super) async fn establish(
    dial: &Dial,
    resume: Option<Resume>,
    deadline: Instant,
) -> Result<Established, Unconnected> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timed_out = |_| {
        let what = format!("connecting to {}", dial.options.address);
        Err(Error::timed_out(what, left).into())
    };
    timeout_at(deadline, greet(dial, resume, left))
        .await
        .unwrap_or_else(timed_out)
}

/// Connects, says hello and reads the greeting; the handshake may take `left`.
async fn greet(
    dial: &Dial,
    resume: Option<Resume>,
    left: Duration,
) -> Result<Established, Unconnected> {
    let options = &dial.options;
    let mut limits = options.limits.clone();
    limits.handshake = left;
    let (address, peers) = (&options.address, &options.peers);
    let mut connection = transport::connect(address, &options.security, peers, &limits).await?;
    let peer = connection.label.to_string();
    // A server other than the session's must not learn its secret.
    let resume = resume.filter(|resume| resume.server == connection.peer);
    let resuming = resume.is_some();
    let (resume, held) = resume.map(|resume| (resume.session, resume.held)).unzip();
    let hello = Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: dial.boot,
        fabric: dial.no_fabric.is_none(),
        resume,
        held,
        agent: options.agent.clone(),
        queues: true,
    };
    let hello = fitting(hello, options.limits.hello_bytes);
    connection.writer.write(&hello, &[]).await?;
    let Some(frame) = connection.reader.read(options.limits.frame_bytes).await? else {
        let why = "it closed the connection instead of a greeting";
        return Err(Error::peer_lost(peer, why).into());
    };
    let welcome = match decode(&frame.bytes).map_err(|error| text::of(&peer, error))? {
        Greeting::Welcome(welcome) => welcome,
        Greeting::Refused(why) => return Err(text::refused(&peer, "a session", &why).into()),
    };
    let broken = |detail: String| Error::protocol(peer.clone(), detail);
    if !(OLDEST..=VERSION).contains(&welcome.version) {
        return Err(broken(format!("version {} was not offered", welcome.version)).into());
    }
    if welcome.resumed && !resuming {
        return Err(broken("a session was resumed that was not named".into()).into());
    }
    Ok(established(connection, welcome, peer))
}

fn established(connection: Connection, mut welcome: Welcome, peer: String) -> Established {
    let heartbeat = Duration::from_millis(welcome.heartbeat_ms).clamp(LEAST, MOST);
    welcome.peer = text::tidy(&welcome.peer);
    Established {
        ended: std::mem::take(&mut welcome.ended),
        terms: Terms {
            heartbeat,
            lease: Duration::from_millis(welcome.lease_ms).clamp(heartbeat, MOST),
            unix: connection.local,
            pid: connection.pid,
            server: connection.peer,
            peer,
            welcome,
        },
        credential: connection.credential,
        reader: connection.reader,
        writer: connection.writer,
    }
}

/// Encodes a hello that the server accepts: without the list of leases if that is too long, in which case all
/// of them continue.
fn fitting(mut hello: Hello, most: u32) -> Zeroizing<Vec<u8>> {
    hello.held = hello.held.filter(|held| held.len() <= MAX_LISTED);
    let bytes = encode(&hello);
    if bytes.len() <= most as usize || hello.held.take().is_none() {
        return bytes;
    }
    encode(&hello)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_that_do_not_fit_into_a_hello_are_left_out() {
        let hello = |held: u64| Hello {
            magic: MAGIC.into(),
            oldest: OLDEST,
            newest: VERSION,
            boot: BootId::from_bytes([1; 16]),
            fabric: false,
            resume: Secret::new(b"token"),
            held: Some((1 << 40..(1 << 40) + held).collect()),
            agent: String::new(),
            queues: true,
        };
        for (held, most, listed) in [
            (3, 256 << 10, true),
            (65_536, 256 << 10, false),
            (65_536, 1 << 20, true),
            (65_537, 1 << 20, false),
        ] {
            let bytes = fitting(hello(held), most);
            assert!(bytes.len() <= most as usize);
            let said: Hello = decode(&bytes).unwrap();
            assert_eq!(said.held.is_some(), listed);
            assert!(said.resume.is_some());
        }
    }
}
