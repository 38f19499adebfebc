//! Connects to a server, and exchanges the two messages that begin a session.

use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use super::options::ClientOptions;
use super::text;
use crate::protocol::{Greeting, Hello, MAGIC, OLDEST, Secret, VERSION, Welcome, decode, encode};
use crate::share::BootId;
use crate::tls::Credential;
use crate::transport::{self, Connection, FrameReader, FrameWriter, Unconnected};
use crate::{Address, Error, MemoryError, PeerName, Result, Security, ShareError};

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
    /// The server's answer. Its peer name is escaped; its times and paths are unchecked.
    pub(super) welcome: Welcome,
}

/// A connection, greeted.
pub(super) struct Established {
    pub(super) reader: FrameReader,
    pub(super) writer: FrameWriter,
    pub(super) terms: Terms,
    /// Over TLS, the certificates that the server was verified with.
    pub(super) credential: Option<Credential>,
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
    let work = async {
        let options = &dial.options;
        let (address, security) = (&options.address, &options.security);
        let mut established = greet(dial, (address, security), resume, (left, false)).await?;
        move_to_unix(dial, &mut established, left).await;
        Ok(established)
    };
    timeout_at(deadline, work).await.unwrap_or_else(timed_out)
}

/// Moves a session over TCP to the Unix socket of a server on this machine, because only that passes fds. Where the
/// socket cannot be reached, the session stays, and `no_unix` says why. Nobody reads the first connection any more: the
/// client asks on the last one which of its leases have ended.
async fn move_to_unix(dial: &Dial, established: &mut Established, left: Duration) {
    let terms = &mut established.terms;
    let Some(local) = &terms.welcome.local else {
        return;
    };
    if terms.unix || terms.welcome.boot != dial.boot {
        return;
    }
    // tokio takes a path with a leading NUL for an abstract name.
    let path = local.strip_prefix('@').map(|name| format!("\0{name}"));
    let address = Address::Unix(path.unwrap_or_else(|| local.clone()).into());
    let resume = Resume {
        session: terms.welcome.session.clone(),
        server: terms.server.clone(),
    };
    let left = (left / 4).min(dial.options.limits.handshake);
    let moving = greet(
        dial,
        (&address, &Security::Plain),
        Some(resume),
        (left, true),
    );
    let moved = timeout(left, moving).await;
    let moved = moved.unwrap_or_else(|_| Err(Error::timed_out("its greeting", left).into()));
    let why = match moved {
        Ok(moved) if moved.terms.welcome.instance == terms.welcome.instance => {
            (terms.unix, terms.pid) = (true, moved.terms.pid);
            (established.reader, established.writer) = (moved.reader, moved.writer);
            return;
        }
        Ok(_) => "another server listens there".into(),
        Err(error) => Error::from(error).to_string(),
    };
    tracing::debug!(socket = local, why, "the session stays on TCP");
    let hint = match local.starts_with('@') {
        true => {
            "give this container the server's network namespace, or have the server listen at a Unix socket too"
        }
        false => "mount the socket's folder into this container at the same path",
    };
    terms.no_unix = Some(format!(
        "its Unix socket {local} cannot be used: {why}; {hint}"
    ));
}

/// Connects, says hello and reads the greeting; the handshake may take `left`. A session that `moves` has been begun over
/// TCP.
async fn greet(
    dial: &Dial,
    (address, security): (&Address, &Security),
    resume: Option<Resume>,
    (left, moves): (Duration, bool),
) -> Result<Established, Unconnected> {
    let options = &dial.options;
    let mut limits = options.limits.clone();
    limits.handshake = left;
    let mut connection = transport::connect(address, security, &options.peers, &limits).await?;
    let peer = connection.label.to_string();
    // A server other than the session's must not learn its secret. It has named the socket to which it moves.
    let resume = resume.filter(|resume| moves || resume.server == connection.peer);
    let resuming = resume.is_some();
    let hello = encode(&Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: dial.boot,
        fabric: dial.no_fabric.is_none(),
        resume: resume.map(|resume| resume.session),
        agent: options.agent.clone(),
        queues: true,
        moves,
    });
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
    if welcome.resumed && !resuming || moves && !welcome.resumed {
        return Err(broken("another session than the one that was named".into()).into());
    }
    Ok(established(connection, welcome, peer))
}

fn established(connection: Connection, mut welcome: Welcome, peer: String) -> Established {
    let heartbeat = Duration::from_millis(welcome.heartbeat_ms).clamp(LEAST, MOST);
    welcome.peer = text::tidy(&welcome.peer);
    Established {
        terms: Terms {
            heartbeat,
            lease: Duration::from_millis(welcome.lease_ms).clamp(heartbeat, MOST),
            unix: connection.local,
            no_unix: None,
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
