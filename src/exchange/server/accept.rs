//! Accepts connections: handshake, hello, and a session.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout_at;

use super::admission::{Newcomer, OfPeer, Open, Shaking, gave_way};
use super::handshakes::{GiveWay, Handshakes};
use super::link::Link;
use super::machines::Machine;
use super::outcome::{No, over};
use super::process::Known;
use super::session::ServerSession;
use super::state::{ServerState, millis};
use super::stats::count;
use super::{ServerCore, ServerEvent, connection, token};
use crate::account::{self, Account};
use crate::protocol::{
    Event, Greeting, Hello, MAGIC, OLDEST, Refused, Secret, VERSION, Welcome, Withdrawing, decode,
    encode,
};
use crate::transport::{Connection, Incoming, Listening};
use crate::{Error, Refusal, Result, ShareError};
use crate::{PeerName, limits};

/// Accepts connections at the address with this number until the server ends.
pub(super) async fn run(inner: Arc<ServerCore>, listening: Listening, number: usize) {
    while let Some((newcomer, give_way)) = next(&inner, &listening, number).await {
        let serve = serve(Arc::clone(&inner), newcomer, give_way);
        inner.tasks.spawn(serve);
    }
}

/// Returns the next connection; `None` when the server has ended, or the socket is unusable.
pub(super) async fn next(
    inner: &Arc<ServerCore>,
    listening: &Listening,
    number: usize,
) -> Option<(Newcomer, GiveWay)> {
    let accept = async {
        let incoming = incoming(inner, listening).await?;
        let open = Open::enter(inner);
        let handshakes = inner.handshakes.get(number);
        let room = match handshakes {
            Some(handshakes) => handshakes.enter().await,
            None => None,
        };
        Ok::<_, Error>((incoming, open, room))
    };
    let accepted = tokio::select! {
        () = inner.ending() => return None,
        accepted = accept => accepted,
    };
    match accepted {
        Ok((incoming, open, room)) => {
            let (handshake, give_way) = room?;
            count(&inner.counters.accepted);
            let shaking = Shaking::enter(inner, handshake);
            let newcomer = Newcomer {
                incoming,
                open,
                shaking,
            };
            Some((newcomer, give_way))
        }
        Err(error) => {
            tracing::error!(%error, address = %listening.address(), "no client can connect any more");
            None
        }
    }
}

/// Accepts a connection; if the process has no fd for it, another one gives way.
async fn incoming(inner: &ServerCore, listening: &Listening) -> Result<Incoming> {
    let mut told = false;
    loop {
        if let Some(incoming) = listening.accept().await? {
            return Ok(incoming);
        }
        if !told {
            let address = listening.address();
            tracing::warn!(%address, "a connection must wait: no file descriptor or memory for it");
            told = true;
        }
        Handshakes::make_way(&inner.handshakes).await;
    }
}

/// Serves one connection from its first byte to its last.
async fn serve(inner: Arc<ServerCore>, newcomer: Newcomer, give_way: GiveWay) {
    let Newcomer {
        incoming,
        open,
        shaking,
    } = newcomer;
    let greeted = tokio::select! {
        () = inner.ending() => return,
        Ok(()) = give_way => Err(gave_way(&inner)),
        greeted = greet(&inner, incoming, shaking) => greeted,
    };
    match greeted {
        Ok((connection, link, of_peer)) => {
            connection::serve(&inner, connection, &link).await;
            drop(of_peer);
        }
        Err(error) => {
            count(&inner.counters.failed_handshakes);
            if let Error::Share(ShareError::NotTrusted { .. }) = &error {
                inner
                    .audit
                    .refused_without_session("handshake", None, None, "not_trusted");
            }
            tracing::info!(%error, "no session");
        }
    }
    drop(open);
}

/// Handshake and hello, under one deadline.
async fn greet(
    inner: &Arc<ServerCore>,
    incoming: Incoming,
    shaking: Shaking,
) -> Result<(Connection, Link, OfPeer)> {
    let deadline = limits::deadline(inner.limits.handshake);
    let (mut connection, hello) = hello(inner, incoming, deadline).await?;
    let peer = connection.peer.clone();
    let begun = OfPeer::enter(inner, &peer).and_then(|of_peer| {
        of_peer.charge_frames(&mut connection);
        let (link, welcome) = inner.begin(&mut connection, &hello, of_peer.account())?;
        Ok((link, welcome, of_peer))
    });
    // The hello's list of leases is no longer charged.
    drop(hello);
    match begun {
        Ok((link, welcome, of_peer)) => {
            let greeted = match shaking.finish() {
                Ok(()) => send(inner, &mut connection, Greeting::Welcome(welcome), deadline).await,
                Err(error) => Err(error),
            };
            if let Err(error) = greeted {
                inner.detach(&link, Instant::now());
                return Err(error);
            }
            Ok((connection, link, of_peer))
        }
        Err((reason, detail)) => Err(refuse(inner, connection, reason, detail, deadline).await),
    }
}

/// Performs the transport's handshake, and reads a hello of a supported version.
pub(super) async fn hello(
    inner: &ServerCore,
    incoming: Incoming,
    deadline: tokio::time::Instant,
) -> Result<(Connection, Hello)> {
    let _shaking = inner.unknown.charge(account::CONNECTION).map_err(|over| {
        let (what, limit) = (over.what, over.limit as u64);
        Error::LimitReached { what, limit }
    })?;
    let left = deadline.saturating_duration_since(tokio::time::Instant::now());
    let mut connection = incoming.handshake(left).await?;
    connection.reader.forbid_fds();
    connection.reader.charge_to(&inner.unknown);
    let peer = connection.label.to_string();
    let limit = inner.limits.hello_bytes;
    let Ok(frame) = timeout_at(deadline, connection.reader.read(limit)).await else {
        return Err(late(&peer, inner.limits.handshake));
    };
    let Some(frame) = frame? else {
        return Err(Error::peer_lost(peer, "it closed the connection"));
    };
    let hello: Hello = decode(&frame.bytes)?;
    let wrong = |detail: &str| Error::protocol(peer.clone(), detail);
    if hello.magic != MAGIC {
        return Err(wrong("it begins with something else than a hello"));
    }
    if hello.agent.len() > 255 || hello.oldest > hello.newest {
        return Err(wrong("a hello that cannot be right"));
    }
    if hello.oldest > VERSION || hello.newest < OLDEST {
        let detail = format!("versions {OLDEST} to {VERSION} are spoken here");
        return Err(refuse(inner, connection, Refusal::Version, detail, deadline).await);
    }
    Ok((connection, hello))
}

fn late(peer: &str, after: Duration) -> Error {
    Error::timed_out(format!("the hello of {peer}"), after)
}

/// Sends a greeting.
pub(super) async fn send(
    inner: &ServerCore,
    connection: &mut Connection,
    greeting: Greeting,
    deadline: tokio::time::Instant,
) -> Result<()> {
    let limit = inner.limits.handshake;
    let bytes = encode(&greeting);
    drop(greeting);
    let Ok(sent) = timeout_at(deadline, connection.writer.write(&bytes, &[])).await else {
        return Err(late(&connection.label, limit));
    };
    sent
}

/// Refuses a connection, and returns the reason as an error.
pub(super) async fn refuse(
    inner: &ServerCore,
    mut connection: Connection,
    reason: Refusal,
    detail: String,
    deadline: tokio::time::Instant,
) -> Error {
    inner.counters.refused(&reason);
    let (peer, pid) = (&connection.peer, connection.pid);
    inner
        .audit
        .refused_without_session("session", Some(peer), pid, reason.word());
    let refused = Refused {
        reason: reason.word().into(),
        detail: detail.clone(),
    };
    // It no longer matters whether it arrives.
    let _ = send(inner, &mut connection, Greeting::Refused(refused), deadline).await;
    Error::refused(
        "the server",
        format!("a session with {}", connection.peer),
        reason,
        detail,
    )
}

impl ServerCore {
    /// Returns the welcome to a session, without the fields that only sessions have.
    pub(super) fn welcome(&self, hello: &Hello, peer: &PeerName) -> Result<Welcome, No> {
        let internal = || (Refusal::Internal, String::new());
        Ok(Welcome {
            version: hello.newest.min(VERSION),
            instance: self.instance,
            boot: self.boot,
            session: Secret::new(&[]).ok_or_else(internal)?,
            resumed: false,
            ended: Vec::new(),
            peer: peer.to_string(),
            heartbeat_ms: millis(self.heartbeat),
            lease_ms: millis(self.lease),
            frame_bytes: self.limits.frame_bytes,
            door: self.fd_socket.clone(),
            local: self.local.clone(),
        })
    }

    /// Returns a session for a connection: the one that the client names, if it belongs to that peer, or a
    /// new one.
    fn begin(
        &self,
        connection: &mut Connection,
        hello: &Hello,
        account: &Arc<Account>,
    ) -> Result<(Link, Welcome), No> {
        let peer = &connection.peer.clone();
        let mut welcome = self.welcome(hello, peer)?;
        let mut state = self.state();
        let id = state.next_number();
        let named = hello.resume.as_ref().and_then(|token| {
            let session = state.sessions.get(token::key(token)?)?;
            (session.token == *token && session.peer == *peer).then(|| Arc::clone(session))
        });
        let session = match named {
            Some(session) if state.leases.attach(session.id) => {
                session.take_over(id, hello.held.is_some());
                state.unwatch(session.id);
                let most = self.limits.leases_per_peer.saturating_mul(2);
                let held = hello.held.as_deref().filter(|held| held.len() <= most);
                welcome.ended = self.reconcile(&mut state, &session, held);
                welcome.resumed = true;
                session
            }
            _ => {
                let session = self.new_session(&mut state, id, peer, account)?;
                let (ip, boot) = (connection.ip, hello.boot);
                state.leases.set_machine(session.id, Machine { ip, boot });
                session
            }
        };
        if let Some(credential) = &connection.credential {
            state.credentials.set(session.id, Arc::clone(credential));
            self.janitor.notify_one();
        }
        drop(state);
        welcome.session = session.token.clone();
        let number = session.id;
        if welcome.resumed {
            count(&self.counters.resumed);
            tracing::info!(%peer, session = number, "session resumed");
        } else {
            tracing::info!(%peer, session = number, agent = ?hello.agent, "session begun");
            self.emit(ServerEvent::PeerCame {
                peer: peer.clone(),
                session: number,
            });
        }
        let link = Link {
            id,
            session,
            local: connection.local,
            fds: self.fds.share(&connection.peer),
            process: Known::of(connection),
            boot: hello.boot,
        };
        self.audit.session_begun(&link, welcome.resumed);
        self.verify_begun(&link, connection.credential.as_ref());
        Ok((link, welcome))
    }

    /// Creates a session of a peer, for the connection `id`.
    fn new_session(
        &self,
        state: &mut ServerState,
        id: u64,
        peer: &PeerName,
        account: &Arc<Account>,
    ) -> Result<Arc<ServerSession>, No> {
        if state.closing {
            return Err((Refusal::Closing, "the server is ending".into()));
        }
        if state.sessions.len() >= self.limits.sessions {
            return Err((Refusal::Limit, format!("{} sessions", self.limits.sessions)));
        }
        if state.sessions.of(peer) >= self.limits.sessions_per_peer {
            let limit = self.limits.sessions_per_peer;
            return Err((Refusal::Limit, format!("{limit} sessions of this peer")));
        }
        let number = state.next_session();
        let token = token::mint(number).map_err(|e| (Refusal::Internal, e.to_string()))?;
        // Every lease may be recalled, and then end.
        let leases = self.limits.leases_per_peer.saturating_mul(2);
        let notices = self.limits.queued_frames.saturating_add(leases);
        let charge = account.charge(account::SESSION).map_err(over)?;
        let account = (Arc::clone(account), charge);
        let session = ServerSession::new(number, peer.clone(), token, id, notices, account);
        let session = Arc::new(session);
        state.leases.open(number, peer.clone());
        state.sessions.insert(Arc::clone(&session));
        Ok(session)
    }

    /// Makes client and server agree on the leases of a resumed session. Returns those of `held` that have
    /// ended.
    fn reconcile(
        &self,
        state: &mut ServerState,
        session: &ServerSession,
        held: Option<&[u64]>,
    ) -> Vec<u64> {
        let (dropped, unknown) = match held {
            Some(held) => state.leases.keep_only(session.id, held),
            None => Default::default(),
        };
        for lease in &dropped {
            state.returned(lease);
            self.audit_lease(state, "released", lease);
        }
        // Earlier notices about these leases may have been lost.
        for lease in state.leases.of_session(session.id) {
            let publication = state.publications.get(&lease.publication);
            let closing = publication.filter(|registered| registered.closing);
            let lease = lease.holder.lease;
            let until = match (closing, state.recalls.until(lease)) {
                (Some(registered), _) => registered.until,
                (None, Some(until)) => Some(until),
                (None, None) => continue,
            };
            let left = |until: Instant| until.saturating_duration_since(Instant::now());
            let ms = millis(until.map_or(Duration::ZERO, left));
            session.tell(Event::Withdrawing(Withdrawing { lease, ms }));
        }
        self.released.notify_waiters();
        unknown
    }

    /// Handles the end of a connection: its session survives for the time of a lease, or ends.
    pub(super) fn detach(&self, link: &Link, last_word: Instant) {
        let session = &link.session;
        let mut state = self.state();
        if !session.is_of(link.id) {
            return;
        }
        state.unwatch(session.id);
        let until = last_word + self.lease;
        let ended = state.leases.detach(session.id, until, session.is_kept());
        if ended {
            state.forget_session(session.id);
        } else {
            state.leases.follow(session.id);
        }
        drop(state);
        if ended {
            self.session_ended(session.id, &session.peer);
        } else {
            self.janitor.notify_one();
        }
    }
}
