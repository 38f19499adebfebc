//! Accepts connections: handshake and hello.
//!
//! Connections that have not been greeted yet are a limited number, and the oldest is closed for a newer one. Their peers are
//! unknown, so no limit of a peer applies to them. If the server refused newer ones instead, a few silent connections would keep
//! all clients out for the time of a handshake. Each has a grace period, in which newer ones wait to be accepted, so that a burst
//! of correct clients does not close its own connections.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::audit::audit;
use super::metrics::Gauge;
use super::sessions::Link;
use super::{ServerCore, connection};
use crate::limits::deadline;
use crate::per_driver::lock;
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
/// How long each connection stays, even if newer ones wait.
const GRACE: Duration = Duration::from_millis(250);

/// The connections at all addresses that have not been greeted yet.
#[derive(Debug)]
pub(super) struct Newcomers {
    slots: Arc<Semaphore>,
    queue: Arc<Mutex<Queue>>,
}

#[derive(Debug, Default)]
struct Queue {
    last: u64,
    /// Oldest first.
    waiting: BTreeMap<u64, (Instant, oneshot::Sender<()>)>,
}

/// A connection that has not been greeted yet, until dropped.
#[derive(Debug)]
struct Newcomer {
    id: u64,
    queue: Arc<Mutex<Queue>>,
    _slot: OwnedSemaphorePermit,
}

/// `Ok` when the connection is to be closed; an error once it has been greeted.
type Closing = oneshot::Receiver<()>;

impl Newcomers {
    /// Returns room for so many.
    pub fn new(most: usize) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS))),
            queue: Arc::default(),
        }
    }

    /// Closes the oldest connection to make room, or returns when that is possible.
    fn close_oldest(&self) -> Result<(), Instant> {
        let mut queue = lock(&self.queue);
        let Some(oldest) = queue.waiting.first_entry() else {
            return Ok(());
        };
        let until = oldest.get().0 + GRACE;
        if until > Instant::now() {
            return Err(until);
        }
        let (_, close) = oldest.remove();
        drop(queue);
        // It may be ending by itself.
        let _ = close.send(());
        Ok(())
    }

    /// Enters a connection, after the oldest of too many was closed.
    async fn enter(&self) -> Option<(Newcomer, Closing)> {
        let slot = loop {
            let slot = Arc::clone(&self.slots).acquire_owned();
            if self.slots.available_permits() > 0 {
                break slot.await;
            }
            match self.close_oldest() {
                // Its task has yet to end.
                Ok(()) => break slot.await,
                Err(later) => match timeout_at(later, slot).await {
                    Ok(slot) => break slot,
                    Err(_) => continue,
                },
            }
        };
        let slot = slot.ok()?;
        let (close, closing) = oneshot::channel();
        let mut queue = lock(&self.queue);
        queue.last += 1;
        let id = queue.last;
        queue.waiting.insert(id, (Instant::now(), close));
        drop(queue);
        let newcomer = Newcomer {
            id,
            queue: Arc::clone(&self.queue),
            _slot: slot,
        };
        Some((newcomer, closing))
    }
}

impl Newcomer {
    /// Ends the wait for the greeting; returns whether it came before the connection was to be closed.
    fn greeted(self) -> bool {
        lock(&self.queue).waiting.remove(&self.id).is_some()
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        lock(&self.queue).waiting.remove(&self.id);
    }
}

/// Raises a gauge of the server until dropped.
struct Raised(Arc<ServerCore>, Gauge);

impl Raised {
    fn new(core: &Arc<ServerCore>, gauge: Gauge) -> Self {
        core.counters.count(gauge);
        Self(Arc::clone(core), gauge)
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        self.0.counters.lower(self.1);
    }
}

/// A connection that has not been greeted yet.
struct Accepted {
    incoming: Incoming,
    open: Raised,
    raised: Raised,
    newcomer: Newcomer,
    closing: Closing,
}

/// Accepts connections until the server ends. At its `own` socket sessions move, and none begins.
pub(super) async fn run(
    core: Arc<ServerCore>,
    newcomers: Arc<Newcomers>,
    listening: Listening,
    own: bool,
) {
    loop {
        let accepted = tokio::select! {
            () = core.ended.cancelled() => break,
            accepted = next(&core, &newcomers, &listening) => accepted,
        };
        match accepted {
            Ok(Some(accepted)) => {
                let serve = serve(Arc::clone(&core), accepted, own);
                core.tasks.spawn(serve);
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
async fn next(
    core: &Arc<ServerCore>,
    newcomers: &Newcomers,
    listening: &Listening,
) -> Result<Option<Accepted>> {
    let incoming = incoming(newcomers, listening).await?;
    let open = Raised::new(core, |stats| &mut stats.connections);
    let Some((newcomer, closing)) = newcomers.enter().await else {
        return Ok(None);
    };
    core.counters.count(|stats| &mut stats.accepted);
    let raised = Raised::new(core, |stats| &mut stats.handshakes);
    Ok(Some(Accepted {
        incoming,
        open,
        raised,
        newcomer,
        closing,
    }))
}

/// Accepts a connection; if the process has no fd for it, the oldest one without a greeting is closed.
async fn incoming(newcomers: &Newcomers, listening: &Listening) -> Result<Incoming> {
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
        let _ = newcomers.close_oldest();
        tokio::time::sleep(BACK_OFF).await;
    }
}

/// Serves one connection from its first byte to its last.
async fn serve(core: Arc<ServerCore>, accepted: Accepted, own: bool) {
    let Accepted {
        incoming,
        open,
        raised,
        newcomer,
        closing,
    } = accepted;
    let greeted = tokio::select! {
        () = core.ended.cancelled() => return,
        Ok(()) = closing => Err(made_room(&core)),
        greeted = greet(&core, incoming, (newcomer, raised), own) => greeted,
    };
    match greeted {
        Ok((connection, link)) => connection::serve(&core, connection, link).await,
        Err(error) => {
            core.counters.count(|stats| &mut stats.failed_handshakes);
            if matches!(error, Error::Share(ShareError::NotTrusted { .. })) {
                let (request, reason) = ("handshake", "not_trusted");
                audit!(core.audit, Refusal, None, "refused", request, reason);
            }
            tracing::info!(%error, "no session");
        }
    }
    drop(open);
}

/// Handshake and hello, under one deadline.
async fn greet(
    core: &Arc<ServerCore>,
    incoming: Incoming,
    (newcomer, raised): (Newcomer, Raised),
    own: bool,
) -> Result<(Connection, Link)> {
    // `raised` is dropped before the place that it counts.
    let until = deadline(core.limits.handshake);
    let (mut connection, hello) = hello(core, incoming, until).await?;
    let counted = core.count_connection(&mut connection, &hello, own);
    let begun = counted.and_then(|counted| core.begin(&mut connection, &hello, counted));
    let (link, welcome) = match begun {
        Ok(begun) => begun,
        Err((reason, detail)) => {
            return Err(refuse(core, &mut connection, reason, detail, until).await);
        }
    };
    drop(raised);
    let greeted = if newcomer.greeted() {
        send(core, &mut connection, Greeting::Welcome(welcome), until).await
    } else {
        Err(made_room(core))
    };
    if let Err(error) = greeted {
        core.detach(&link, std::time::Instant::now());
        return Err(error);
    }
    Ok((connection, link))
}

/// Returns the error of a connection that was closed for a newer one.
fn made_room(core: &ServerCore) -> Error {
    core.counters.count(|stats| &mut stats.dropped_handshakes);
    let limit = core.limits.handshakes;
    Error::peer_lost(
        "a connection without a hello",
        format!(
            "closed to make room for newer connections (limit `handshakes` {limit}, fewer where file descriptors \
             run out)"
        ),
    )
}

/// Performs the transport's handshake, and reads a hello of a supported version.
async fn hello(
    core: &ServerCore,
    incoming: Incoming,
    until: Instant,
) -> Result<(Connection, Hello)> {
    let left = until.saturating_duration_since(Instant::now());
    let mut connection = incoming.handshake(left).await?;
    connection.reader.forbid_fds();
    let peer = connection.label.to_string();
    let Ok(frame) = timeout_at(until, connection.reader.read(MAX_HELLO)).await else {
        return Err(late(&peer, core.limits.handshake));
    };
    if frame.is_err() && (MAX_HELLO + 1..=FIRST_VERSION.0).contains(&connection.reader.announced())
    {
        let error = refuse_version(core, &mut connection, until).await;
        let (most, time) = FIRST_VERSION;
        let rest = connection.reader.discard(most as usize);
        let _ = timeout(time, rest).await;
        return Err(error);
    }
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
        return Err(refuse_version(core, &mut connection, until).await);
    }
    Ok((connection, hello))
}

async fn refuse_version(core: &ServerCore, connection: &mut Connection, until: Instant) -> Error {
    let detail = format!("versions {OLDEST} to {VERSION} are spoken here");
    refuse(core, connection, Refusal::Version, detail, until).await
}

fn late(peer: &str, after: Duration) -> Error {
    Error::timed_out(format!("the hello of {peer}"), after)
}

/// Sends a greeting.
async fn send(
    core: &ServerCore,
    connection: &mut Connection,
    greeting: Greeting,
    until: Instant,
) -> Result<()> {
    let limit = core.limits.handshake;
    let bytes = encode(&greeting);
    drop(greeting);
    let sent = timeout_at(until, connection.writer.write(&bytes, &[])).await;
    sent.unwrap_or_else(|_| Err(late(&connection.label, limit)))
}

/// Refuses a connection, and returns the reason as an error.
async fn refuse(
    core: &ServerCore,
    connection: &mut Connection,
    reason: Refusal,
    detail: String,
    until: Instant,
) -> Error {
    core.counters.refused(&reason);
    let (peer, pid) = (&connection.peer, connection.pid);
    let (request, word) = ("session", reason.word());
    audit!(
        core.audit,
        Refusal,
        Some(peer),
        "refused",
        request,
        pid,
        reason = word
    );
    let refused = Refused {
        reason: word.into(),
        detail: detail.clone(),
    };
    // Best effort: the connection is being closed.
    let _ = send(core, connection, Greeting::Refused(refused), until).await;
    Error::refused(
        "the server",
        format!("a session with {}", connection.peer),
        reason,
        detail,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn enter(all: &Newcomers) -> (Newcomer, Closing) {
        all.enter().await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_is_closed_after_its_grace_period() {
        let all = Newcomers::new(2);
        let begun = Instant::now();
        let (a, a_closes) = enter(&all).await;
        let (b, mut b_closes) = enter(&all).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let ends = tokio::spawn(async move {
            a_closes.await.unwrap();
            assert!(!a.greeted(), "it has been told");
        });
        let (c, mut c_closes) = enter(&all).await;
        assert!(begun.elapsed() >= GRACE);
        ends.await.unwrap();
        assert!(b_closes.try_recv().is_err() && c_closes.try_recv().is_err());
        assert!(b.greeted() && c.greeted());
        assert!(lock(&all.queue).waiting.is_empty());
        assert_eq!(all.slots.available_permits(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_greeted_connection_makes_room_at_once() {
        let all = Newcomers::new(2);
        let begun = Instant::now();
        let (a, a_closes) = enter(&all).await;
        let (_b, _b_closes) = enter(&all).await;
        let third = async { enter(&all).await };
        let (_c, greeted) = tokio::join!(third, async { a.greeted() });
        assert!(greeted);
        assert!(a_closes.await.is_err(), "it stays");
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    /// With the room that 1024 fds leave.
    #[tokio::test(start_paused = true)]
    async fn two_thousand_silent_connections_keep_nobody_out() {
        let all = Newcomers::new(128);
        let begun = Instant::now();
        for _ in 0..2000 {
            let (silent, closes) = enter(&all).await;
            tokio::spawn(async move {
                let _ = closes.await;
                drop(silent);
            });
        }
        let (newcomer, _) = enter(&all).await;
        let elapsed = begun.elapsed();
        assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
        assert!(newcomer.greeted());
    }

    #[tokio::test(start_paused = true)]
    async fn one_newcomer_closes_one() {
        let all = Newcomers::new(2);
        let (a, a_closes) = enter(&all).await;
        let (_b, mut b_closes) = enter(&all).await;
        tokio::time::advance(GRACE * 2).await;
        let slow = async {
            a_closes.await.unwrap();
            // However long its task takes to end.
            tokio::time::sleep(GRACE * 5).await;
            drop(a);
        };
        let (_c, ()) = tokio::join!(enter(&all), slow);
        assert!(b_closes.try_recv().is_err(), "only one was closed");
    }
}
