//! Accepts connections: handshake and hello.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout_at;

use super::admission::{OfPeer, Raised, Shaking, made_room};
use super::audit::audit;
use super::link::Link;
use super::newcomers::Closing;
use super::{ServerCore, connection};
use crate::limits;
use crate::protocol::{
    Greeting, Hello, MAGIC, MAX_HELLO, OLDEST, Refused, VERSION, decode, encode,
};
use crate::transport::{Connection, Incoming, Listening};
use crate::{Error, Refusal, Result, ShareError};

/// How long to wait before checking again whether the process has an fd for a connection.
const BACK_OFF: Duration = Duration::from_millis(100);

/// A connection that has not been greeted yet.
struct Accepted {
    incoming: Incoming,
    open: Raised,
    shaking: Shaking,
    closing: Closing,
}

/// Accepts connections until the server ends. At its `own` socket sessions move, and none begins.
pub(super) async fn run(inner: Arc<ServerCore>, listening: Listening, own: bool) {
    loop {
        let accepted = tokio::select! {
            () = inner.ended.cancelled() => break,
            accepted = next(&inner, &listening) => accepted,
        };
        match accepted {
            Ok(Some(accepted)) => {
                let serve = serve(Arc::clone(&inner), accepted, own);
                inner.tasks.spawn(serve);
            }
            Ok(None) => break,
            Err(error) => {
                let address = listening.address();
                tracing::error!(%error, %address, "no client can connect any more");
                break;
            }
        }
    }
}

/// Returns the next connection.
///
/// # Errors
/// Those of a socket that is unusable.
async fn next(inner: &Arc<ServerCore>, listening: &Listening) -> Result<Option<Accepted>> {
    let incoming = incoming(inner, listening).await?;
    let open = Raised::new(inner, |counters| &counters.connections);
    let Some((newcomer, closing)) = inner.newcomers.enter().await else {
        return Ok(None);
    };
    inner.counters.count(|counters| &counters.accepted);
    let raised = Raised::new(inner, |counters| &counters.handshakes);
    Ok(Some(Accepted {
        incoming,
        open,
        shaking: Shaking { raised, newcomer },
        closing,
    }))
}

/// Accepts a connection; if the process has no fd for it, the oldest one without a greeting is closed.
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
        let _ = inner.newcomers.close_oldest();
        tokio::time::sleep(BACK_OFF).await;
    }
}

/// Serves one connection from its first byte to its last.
async fn serve(inner: Arc<ServerCore>, accepted: Accepted, own: bool) {
    let Accepted {
        incoming,
        open,
        shaking,
        closing,
    } = accepted;
    let greeted = tokio::select! {
        () = inner.ended.cancelled() => return,
        Ok(()) = closing => Err(made_room(&inner)),
        greeted = greet(&inner, incoming, shaking, own) => greeted,
    };
    match greeted {
        Ok((connection, link, of_peer)) => {
            connection::serve(&inner, connection, &link).await;
            drop(of_peer);
        }
        Err(error) => {
            inner.counters.count(|counters| &counters.failed_handshakes);
            if matches!(error, Error::Share(ShareError::NotTrusted { .. })) {
                let (request, reason) = ("handshake", "not_trusted");
                audit!(inner.audit, Refusal, None, "refused", request, reason);
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
    own: bool,
) -> Result<(Connection, Link, OfPeer)> {
    let deadline = limits::deadline(inner.limits.handshake);
    let (mut connection, hello) = hello(inner, incoming, deadline).await?;
    let begun = inner.move_to(&mut connection, &hello, own).and_then(|()| {
        let of_peer = OfPeer::enter(inner, &connection.peer)?;
        of_peer.charge_frames(&mut connection);
        let (link, welcome) = inner.begin(&mut connection, &hello, &of_peer.account)?;
        Ok((link, welcome, of_peer))
    });
    match begun {
        Ok((link, welcome, of_peer)) => {
            let greeted = match shaking.finish() {
                Ok(()) => send(inner, &mut connection, Greeting::Welcome(welcome), deadline).await,
                Err(error) => Err(error),
            };
            if greeted.is_err() {
                inner.detach(&link, Instant::now());
            }
            greeted.map(|()| (connection, link, of_peer))
        }
        Err((reason, detail)) => Err(refuse(inner, connection, reason, detail, deadline).await),
    }
}

/// Performs the transport's handshake, and reads a hello of a supported version.
async fn hello(
    inner: &ServerCore,
    incoming: Incoming,
    deadline: tokio::time::Instant,
) -> Result<(Connection, Hello)> {
    let left = deadline.saturating_duration_since(tokio::time::Instant::now());
    let mut connection = incoming.handshake(left).await?;
    connection.reader.forbid_fds();
    let peer = connection.label.to_string();
    let Ok(frame) = timeout_at(deadline, connection.reader.read(MAX_HELLO)).await else {
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
        return Err(wrong(
            "malformed hello: `agent` is longer than 255 bytes, or `oldest` is above `newest`",
        ));
    }
    if hello.oldest > VERSION || hello.newest < OLDEST {
        let detail = format!("versions {OLDEST} to {VERSION} are spoken here");
        return Err(refuse(inner, connection, Refusal::Version, detail, deadline).await);
    }
    connection.queues = hello.queues;
    Ok((connection, hello))
}

fn late(peer: &str, after: Duration) -> Error {
    Error::timed_out(format!("the hello of {peer}"), after)
}

/// Sends a greeting.
async fn send(
    inner: &ServerCore,
    connection: &mut Connection,
    greeting: Greeting,
    deadline: tokio::time::Instant,
) -> Result<()> {
    let limit = inner.limits.handshake;
    let bytes = encode(&greeting);
    drop(greeting);
    let sent = timeout_at(deadline, connection.writer.write(&bytes, &[])).await;
    sent.unwrap_or_else(|_| Err(late(&connection.label, limit)))
}

/// Refuses a connection, and returns the reason as an error.
async fn refuse(
    inner: &ServerCore,
    mut connection: Connection,
    reason: Refusal,
    detail: String,
    deadline: tokio::time::Instant,
) -> Error {
    inner.counters.refused(&reason);
    let (peer, pid) = (&connection.peer, connection.pid);
    let (request, word) = ("session", reason.word());
    audit!(
        inner.audit,
        Refusal,
        Some(peer),
        "refused",
        request,
        pid,
        reason = word
    );
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
