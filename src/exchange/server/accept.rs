//! Accepts connections: handshake and hello.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::audit::audit;
use super::newcomers::{Closing, Newcomer};
use super::sessions::Attached;
use super::{ServerCore, connection};
use crate::protocol::{
    Greeting, Hello, MAGIC, MAX_HELLO, OLDEST, Refused, VERSION, decode, encode,
};
use crate::transport::{Connection, Incoming, Listening};
use crate::{Error, Refusal, Result, ShareError};

/// How long to wait before checking again whether the process has an fd for a connection.
const BACK_OFF: Duration = Duration::from_millis(100);
/// The most bytes of a hello of version 1, in which a client with leases lists them; and how long the rest of it is read after the
/// refusal. Closing a connection with unread bytes resets it, and a reset overtakes the bytes before it.
const FIRST_VERSION: (u32, Duration) = (256 << 10, Duration::from_millis(500));

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
    let result: Result<Infallible> = tokio::select! {
        () = core.ended.cancelled() => return,
        result = accepting => result,
    };
    let Err(error) = result;
    tracing::error!(%error, %address, "no client can connect any more");
}

/// Serves one connection from its first byte to its last.
async fn serve(
    core: Arc<ServerCore>,
    _open: Arc<()>,
    incoming: Incoming,
    (newcomer, closing): (Newcomer, Closing),
    own: bool,
) {
    let limit = core.options.limits.handshake;
    let what = format!("the handshake or the hello of {}", incoming.remote);
    let late = Error::timed_out(what, limit);
    let greeted = tokio::select! {
        () = core.ended.cancelled() => return,
        Ok(()) = closing => Err(made_room(&core)),
        greeted = timeout(limit, greet(&core, incoming, newcomer, own)) => {
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
    incoming: Incoming,
    newcomer: Newcomer,
    own: bool,
) -> Result<(Connection, Attached)> {
    let mut connection = incoming.handshake().await?;
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
    let refused = encode(&Greeting::Refused(Refused::new(&reason, &detail)));
    // Best effort: the connection is being closed.
    let _ = connection.writer.write(&refused, &[]).await;
    let what = format!("a session with {}", connection.peer);
    Error::refused("the server", what, reason, detail)
}
