//! Accepts connections, and begins, resumes, moves, detaches and dismisses their sessions.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::audit::audit;
use super::connection;
use super::leases::AT_ONCE;
use super::newcomers::{Closing, Newcomer};
use super::publication::HolderProcess;
use super::quota::{Refused, What};
use super::requests::elsewhere;
use super::session::{Link, ServerSession};
use super::state::{ServerCore, ServerState};
use crate::limits::millis;
use crate::per_driver::lock;
use crate::protocol::{
    self, Event, Greeting, Held, Hello, MAGIC, MAX_HELLO, OLDEST, VERSION, Welcome, decode, encode,
};
use crate::transport::{Connection, Incoming, Listening};
use crate::{Error, PeerName, Refusal, Result, ShareError};

/// How long to wait before checking again whether the process has an fd for a connection.
const BACK_OFF: Duration = Duration::from_millis(100);
/// The most bytes of a hello of version 1, in which a client with leases lists them; and how long the rest of it is read after the
/// refusal. Closing a connection with unread bytes resets it, and a reset overtakes the bytes before it.
const FIRST_VERSION: (u32, Duration) = (256 << 10, Duration::from_millis(500));

/// Why a user's sessions end.
pub(super) const NO_USER: &str = "this user may no longer connect";

/// Accepts connections until the server ends. At its `own` socket sessions move, and none begins. If the process has no fd
/// for a connection, the oldest one without a greeting is closed.
pub(super) async fn run(core: Arc<ServerCore>, listening: Listening, own: bool) {
    let address = &listening.address;
    let accepting = async {
        let mut told = false;
        loop {
            if let Some(incoming) = listening.accept().await? {
                told = false;
                let open = Arc::clone(&core.open);
                let newcomer = core.newcomers.enter().await;
                core.count(|stats| &mut stats.accepted);
                let serving = serve(Arc::clone(&core), open, incoming, newcomer, own);
                core.tasks.spawn(serving);
                continue;
            }
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(%address, "a connection must wait: no file descriptor or memory for it");
            }
            let _ = core.newcomers.close_oldest();
            tokio::time::sleep(BACK_OFF).await;
        }
    };
    let accepted: Option<Result<Infallible>> = core.ended.run_until_cancelled(accepting).await;
    if let Some(Err(error)) = accepted {
        tracing::error!(%error, %address, "no client can connect any more");
    }
}

/// Serves one connection from its first byte to its last.
async fn serve(
    core: Arc<ServerCore>,
    _open: Arc<()>,
    (remote, handshake): Incoming,
    (newcomer, closing): (Newcomer, Closing),
    own: bool,
) {
    let limit = core.options.limits.handshake;
    let what = format!("the handshake or the hello of {remote}");
    let late = Error::timed_out(what, limit);
    let greeted = tokio::select! {
        () = core.ended.cancelled() => return,
        Ok(()) = closing => Err(made_room(&core)),
        greeted = timeout(limit, greet(&core, handshake, newcomer, own)) => {
            greeted.unwrap_or(Err(late))
        }
    };
    match greeted {
        Ok((connection, attached)) => connection::serve(connection, attached).await,
        Err(error) => {
            core.count(|stats| &mut stats.failed_handshakes);
            if matches!(error, Error::Share(ShareError::NotTrusted { .. })) {
                let (request, reason) = ("handshake", "not_trusted");
                audit!(core.audit, Refusal, None, "refused", request, reason);
            }
            tracing::info!(%error, "no session");
        }
    }
}

/// Handshake and hello. The caller has a time limit.
async fn greet(
    core: &Arc<ServerCore>,
    handshake: impl Future<Output = Result<Connection>>,
    newcomer: Newcomer,
    own: bool,
) -> Result<(Connection, Attached)> {
    let mut connection = handshake.await?;
    let hello = hello(core, &mut connection).await?;
    let (attached, welcome) = match core.begin(&mut connection, &hello, own) {
        Ok(begun) => begun,
        Err((reason, detail)) => return Err(refuse(core, &mut connection, reason, detail).await),
    };
    drop(newcomer);
    let welcome = encode(&Greeting::Welcome(welcome));
    connection.writer.write(&welcome, &[]).await?;
    Ok((connection, attached))
}

/// Returns the error of a connection that was closed for a newer one.
fn made_room(core: &ServerCore) -> Error {
    core.count(|stats| &mut stats.dropped_handshakes);
    let limit = core.options.limits.handshakes;
    let why = format!(
        "closed to make room for newer connections (limit `handshakes` {limit}, or no file descriptor left)"
    );
    Error::peer_lost("a connection without a hello", why)
}

/// Reads a hello of a supported version.
async fn hello(core: &ServerCore, connection: &mut Connection) -> Result<Hello> {
    connection.reader.forbid_fds();
    let peer = connection.label.to_string();
    let frame = connection.reader.read(MAX_HELLO).await;
    let (most, time) = FIRST_VERSION;
    if frame.is_err() && (MAX_HELLO + 1..=most).contains(&connection.reader.announced()) {
        let error = refuse_version(core, connection).await;
        let _ = timeout(time, connection.reader.discard(most as usize)).await;
        return Err(error);
    }
    let Some(frame) = frame? else {
        return Err(Error::peer_lost(peer, "it closed the connection"));
    };
    let hello: Hello = decode(&frame.bytes)?;
    if hello.magic != MAGIC {
        let why = "it begins with something else than a hello";
        return Err(Error::protocol(peer, why));
    }
    if hello.agent.len() > 255 || hello.oldest > hello.newest {
        let why =
            "malformed hello: `agent` is longer than 255 bytes, or `oldest` is above `newest`";
        return Err(Error::protocol(peer, why));
    }
    if hello.oldest > VERSION || hello.newest < OLDEST {
        return Err(refuse_version(core, connection).await);
    }
    Ok(hello)
}

async fn refuse_version(core: &ServerCore, connection: &mut Connection) -> Error {
    let detail = format!("versions {OLDEST} to {VERSION} are spoken here");
    refuse(core, connection, Refusal::Version, detail).await
}

/// Refuses a connection, and returns the reason as an error.
async fn refuse(
    core: &ServerCore,
    connection: &mut Connection,
    reason: Refusal,
    detail: String,
) -> Error {
    core.count_refusal(&reason);
    let (peer, pid) = (&connection.peer, connection.pid);
    let (request, word) = ("session", reason.word());
    audit! { core.audit, Refusal, Some(peer), "refused", request, pid, reason = word }
    let refused = encode(&Greeting::Refused(protocol::Refused::new(&reason, &detail)));
    // Best effort: the connection is being closed.
    let _ = connection.writer.write(&refused, &[]).await;
    let what = format!("a session with {}", connection.peer);
    Error::refused("the server", what, reason, detail)
}

/// A connection that has a session. Its end, also by a panic of an allocator's, detaches the session, which survives for the time
/// of a lease, or ends.
pub(super) struct Attached {
    pub core: Arc<ServerCore>,
    pub link: Arc<Link>,
    pub last_message: Instant,
}

impl Drop for Attached {
    fn drop(&mut self) {
        let session = &self.link.session;
        let mut state = self.core.state();
        if session.is_of(&self.link) {
            let until = self.last_message + self.core.options.lease;
            let ended = state.detach(session.id, until);
            drop(state);
            self.core.report_ended(ended);
        }
    }
}

impl ServerCore {
    /// Returns a session for a connection: the one that the client names, if it belongs to that peer, or a new one. A connection to
    /// which a session moves gets the name of that session's peer: it keeps its rights, and gains none of the user at the Unix
    /// socket. It counts as the connection that it takes the session from, which ends.
    pub(super) fn begin(
        self: &Arc<Self>,
        connection: &mut Connection,
        hello: &Hello,
        own: bool,
    ) -> Result<(Attached, Welcome), Refused> {
        let process = HolderProcess::of_peer(connection);
        let mut state = self.state();
        // The user may have been taken off the list since the handshake. From here on the lock of the state keeps
        // `Server::set_peers` from missing the session.
        let is_admitted = |uid| lock(&self.peers).admits_user(uid);
        if !connection.user.is_none_or(is_admitted) {
            return Err((Refusal::Forbidden, NO_USER.into()));
        }
        let mut named = state.session_of(hello).cloned();
        let mut counted = None;
        if hello.moves {
            named = named.filter(|session| can_move(&state, connection, session));
            let session = named.as_ref().ok_or_else(cannot_move)?;
            // Only then: a refusal is put down to the peer that the connection has.
            connection.peer = session.peer.clone();
            counted = session.link().map(|link| Arc::clone(&link.counted));
        } else if own {
            let why = "sessions move to this socket, and none begins here";
            return Err((Refusal::Unsupported, why.into()));
        }
        let peer = &connection.peer.clone();
        let counted = match counted {
            Some(counted) => counted,
            None => Arc::new(self.quota.count(peer, What::Connection, 1)?),
        };
        let named = named.filter(|session| session.peer == *peer && state.attach(session.id));
        let resumed = named.is_some();
        let session = match named {
            Some(session) => session,
            None => self.new_session(&mut state, peer)?,
        };
        if let Some(credential) = connection.credential.take() {
            // It stays with a session that moves to the Unix socket. Under the state's lock: of two connections the one that
            // has the session sets it last.
            *lock(&session.credential) = Some(credential);
        }
        let link = Arc::new(Link {
            session,
            user: connection.user,
            large: self.quota.large(peer),
            process,
            boot: hello.boot,
            lost: CancellationToken::new(),
            counted,
        });
        link.session.take_over(&link);
        drop(state);
        let welcome = self.welcome(&link.session, hello, resumed);
        self.report_begun(&link, hello, resumed);
        let attached = Attached {
            core: Arc::clone(self),
            link,
            last_message: Instant::now(),
        };
        Ok((attached, welcome))
    }

    fn welcome(&self, session: &ServerSession, hello: &Hello, resumed: bool) -> Welcome {
        Welcome {
            version: hello.newest.min(VERSION),
            instance: self.instance,
            boot: self.boot,
            session: session.token.clone(),
            resumed,
            peer: session.peer.to_string(),
            heartbeat_ms: millis(self.options.heartbeat),
            lease_ms: millis(self.options.lease),
            frame_bytes: self.frame_bytes(),
            local: self.local.clone(),
        }
    }

    fn report_begun(&self, link: &Link, hello: &Hello, resumed: bool) {
        let (peer, session) = (&link.session.peer, link.session.id);
        let event = if hello.moves {
            self.count(|stats| &mut stats.moved);
            "session_moved"
        } else if resumed {
            self.count(|stats| &mut stats.resumed);
            "session_resumed"
        } else {
            "session_begun"
        };
        tracing::info!(%peer, session, agent = ?hello.agent, "{event}");
        let pid = link.pid();
        audit!(self.audit, Session, Some(peer), event, session, pid);
    }

    /// Creates a session of a peer, for a connection that takes it over.
    fn new_session(
        &self,
        state: &mut ServerState,
        peer: &PeerName,
    ) -> Result<Arc<ServerSession>, Refused> {
        if state.closing {
            return Err((Refusal::Closing, "the server is ending".into()));
        }
        let counted = self.quota.count(peer, What::Session, 1)?;
        let number = state.numbers.next();
        let session = Arc::new(ServerSession::new(number, peer.clone(), counted)?);
        state.open(Arc::clone(&session));
        Ok(session)
    }

    /// Ends the session's leases that the client does not have, and asks again for those that were recalled: the notices may
    /// have been lost with the connection before. Returns those of `held` that have ended.
    pub(super) fn held(&self, link: &Link, held: &Held) -> Result<Vec<u64>, Refused> {
        let (session, mut after) = (&link.session, held.after);
        let last = if held.more {
            held.leases.last().copied()
        } else {
            None
        };
        loop {
            let mut state = self.state();
            if !session.is_of(link) {
                return Err(elsewhere());
            }
            let leases = state.of_session(session.id, after);
            let leases = leases.take_while(|lease| !held.more || Some(*lease) <= last);
            let leases: Vec<u64> = leases.take(AT_ONCE).collect();
            if leases.is_empty() {
                let is_over = |lease: &u64| state.lease(session.id, *lease).is_none();
                return Ok(held.leases.iter().copied().filter(is_over).collect());
            }
            after = leases.last().copied();
            for lease in leases {
                if held.leases.binary_search(&lease).is_err() {
                    state.release(session, lease);
                } else if let Some(left) = state.recalled(lease) {
                    let ms = millis(left);
                    session.notify(lease, Event::Withdrawing { lease, ms }, None);
                }
            }
            drop(state);
            self.released.notify_waiters();
        }
    }

    /// Ends sessions at once. Their connections send the reason and end; their leases expire, because the
    /// peers may still have the memory mapped. Returns how many there were.
    pub(super) fn dismiss(
        &self,
        which: impl Fn(&ServerSession) -> bool,
        reason: &Refusal,
        detail: &str,
    ) -> usize {
        let mut state = self.state();
        let mut ended = Vec::new();
        for session in state.sessions_if(which) {
            session.dismiss(protocol::Refused::new(reason, detail));
            let (peer, session) = (&session.peer, session.id);
            tracing::warn!(%peer, session, %reason, detail, "session dismissed");
            let word = reason.word();
            audit! {
                self.audit, Memory, Some(peer), "session_dismissed", session, reason = word
            }
            ended.extend(state.end_session(session));
        }
        let count = ended.len();
        // The first of their leases; `expire_on_time` ends the others.
        ended.extend(state.expire(Instant::now()));
        drop(state);
        self.report_ended(ended);
        count
    }
}

/// Returns whether a session may move to this connection. A thief of its token cannot move it while its peer is not connected, or is
/// connected over a Unix socket.
fn can_move(state: &ServerState, connection: &Connection, session: &ServerSession) -> bool {
    let is_tcp = session.link().is_some_and(|link| link.user.is_none());
    connection.user.is_some() && is_tcp && state.is_attached(session.id)
}

fn cannot_move() -> Refused {
    let why = "no session with this token has a connection over TCP now";
    (Refusal::Expired, why.into())
}
