//! The task that owns a client's connection.
//!
//! One task reads, writes and keeps the time concurrently, so that a slow reader at the other end does not
//! stop this one from reading. When the connection breaks it reconnects, and resumes the session if the
//! server still has it.

use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use zeroize::Zeroizing;

use super::buffer::{ClientLease, HeldLease, LeaseState};
use super::connect::{Terms, UNASKED, decode_from, establish, refused};
use super::session::{ClientSession, Link, Reply, Request, SessionUser};
use crate::limits::deadline;
use crate::protocol::{Answer, Ask, Event, FromServer, encode};
use crate::tls::{Credential, WALL_CLOCK, reloaded};
use crate::transport::{Connection, FrameReader, FrameWriter, together};
use crate::{Distrust, Error, Refusal, Result, Security};

/// The most requests that are written at once.
const BATCH: usize = 64;

/// Ends a session with the task that runs it, also if the runtime drops the task.
struct Running(Arc<ClientSession>);

impl Drop for Running {
    fn drop(&mut self) {
        let why = "the client's runtime has ended";
        self.0.over(&Error::peer_lost(self.0.peer(), why));
    }
}

/// Runs a session until its last user is gone.
pub(super) async fn run(session: Arc<ClientSession>, first: (Connection, Terms)) {
    let running = Running(session);
    let session = &running.0;
    let mut next = Some(first);
    let why = loop {
        let served = match next.take() {
            Some((connection, terms)) => serve(session, connection, &terms).await,
            None => Ok(()),
        };
        let Err(why) = served else {
            break Error::peer_lost(session.peer(), "this client was closed");
        };
        tracing::debug!(address = %session.dial.options.address, error = %why, "connection broken");
        session.broken(&why);
        if session.dial.options.reconnect.is_never() {
            break why;
        }
        // Otherwise the task would keep it while it reconnects, which may take hours.
        drop(why);
        next = reconnect(session).await;
    };
    session.over(&why);
}

/// Serves one connection until it breaks; `Ok` when it is no longer needed.
async fn serve(session: &Arc<ClientSession>, connection: Connection, terms: &Terms) -> Result<()> {
    let (mut reader, mut writer) = (connection.reader, connection.writer);
    let mut reading = pin!(read(session, &mut reader));
    let done = tokio::select! {
        // Biased: received data is read before the server counts as silent.
        biased;
        broken = &mut reading => broken,
        done = write(session, &mut writer, terms.welcome.frame_bytes as usize) => match done {
            Err(error) if error.is_peer_lost() => {
                read_on(session, reading, terms.heartbeat, error).await
            }
            done => done,
        },
        silent = keep_time(session, terms.heartbeat, terms.lease) => silent,
        changed = watch_trust(session, connection.credential) => Err(changed),
    };
    if done.is_ok() {
        say_what_is_held(session, &mut writer).await;
        writer.finish().await;
    }
    done
}

/// Lists the leases of this end if a grant may be on its way: nobody would release it. Best effort: the connection is being
/// closed.
async fn say_what_is_held(session: &ClientSession, writer: &mut FrameWriter) {
    let is_fetch = |request: &Request| matches!(request.ask, Ask::Fetch(_));
    let held = {
        let state = session.lock();
        let fetches = state.pending.values().any(is_fetch);
        if fetches { state.held() } else { Vec::new() }
    };
    for part in held {
        let _ = writer
            .write(&encode(&(UNASKED, Ask::Held(part))), &[])
            .await;
    }
}

/// Reads what the server sent before it closed the connection, because that may say why. `lost` is the error of the write that
/// failed.
///
/// The session's timers do not run meanwhile, hence at most for a heartbeat. `Ok` when the session is no longer needed.
async fn read_on(
    session: &ClientSession,
    reading: impl Future<Output = Result<()>>,
    heartbeat: Duration,
    lost: Error,
) -> Result<()> {
    let limit = session.dial.options.limits.write.min(heartbeat);
    let ends = async {
        while !session.may_end(session.timeout()) {
            session.wake.notified().await;
        }
    };
    tokio::select! {
        biased;
        broken = timeout(limit, reading) => broken.unwrap_or(Err(lost)),
        () = ends => Ok(()),
    }
}

async fn read(session: &Arc<ClientSession>, reader: &mut FrameReader) -> Result<()> {
    let limit = session.dial.options.limits.frame_bytes;
    loop {
        let Some(frame) = reader.read(limit).await? else {
            return Err(Error::peer_lost(session.peer(), "it closed the connection"));
        };
        session.heard();
        match decode_from(&session.peer(), &frame)? {
            FromServer::Reply(id, answer) => {
                session.handle_reply(id, answer, frame.fds)?;
            }
            FromServer::Event(event) => session.handle_event(event)?,
        }
    }
}

async fn write(session: &ClientSession, writer: &mut FrameWriter, limit: usize) -> Result<()> {
    loop {
        let next = || session.next_frame(limit);
        let frames: Vec<_> = std::iter::from_fn(next).take(BATCH).collect();
        if !frames.is_empty() {
            writer.send(&together(&frames)?, &[]).await?;
        } else if session.may_end(session.timeout()) {
            return Ok(());
        } else {
            session.wake.notified().await;
        }
    }
}

/// Pings twice as often as the server requires, and ends when the server is silent.
async fn keep_time(session: &ClientSession, heartbeat: Duration, lease: Duration) -> Result<()> {
    let tick = heartbeat / 2;
    let mut ticks = interval(tick);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Leaves time to reconnect before the leases end.
    let longest = (lease / 2).max(heartbeat);
    loop {
        ticks.tick().await;
        let silent = session.tick(tick);
        if silent > longest {
            let why = format!("not a word for {silent:?}");
            return Err(Error::peer_lost(session.peer(), why));
        }
        let mut state = session.lock();
        let mut requests = state.internal.iter().chain(state.pending.values());
        if !requests.any(|request| matches!(request.ask, Ask::Ping)) {
            state.internal.push_back(Request::own(Ask::Ping));
        }
        drop(state);
        // The writer also checks whether closing has taken too long.
        session.wake.notify_one();
    }
}

/// Waits until the server's certificate is no longer valid, or this process has a new one and no user waits for an
/// answer that a new connection would not give. Returns why the connection is to end.
async fn watch_trust(session: &ClientSession, server: Option<Credential>) -> Error {
    let (Security::Tls(tls), Some(mut server)) = (&session.dial.options.security, server) else {
        return std::future::pending().await;
    };
    let mut reloads = Some(tls.reloads());
    loop {
        if let Err(why) = server.check(&tls.loaded(), SystemTime::now()) {
            return Error::not_trusted(session.peer(), Distrust::Certificate, why);
        }
        // The server ends the session when the certificate that it has seen expires.
        let renews = !session.dial.options.reconnect.is_never() && tls.loaded().own != server.own;
        // Waits and lists are asked again by themselves.
        let is_once = |request: &Request| {
            request.user.is_some() && !matches!(request.ask, Ask::Wait { .. } | Ask::List(_))
        };
        if renews && !session.lock().pending.values().any(is_once) {
            let why = "this process connects anew with its new certificate";
            return Error::peer_lost(session.peer(), why);
        }
        tokio::select! {
            () = reloaded(&mut reloads) => {}
            // Timers do not run while the machine is suspended.
            () = sleep(WALL_CLOCK) => {}
        }
    }
}

/// Reconnects until there is a connection; `None` when no user needs one.
async fn reconnect(session: &ClientSession) -> Option<(Connection, Terms)> {
    let terms = session.terms();
    let tick = terms.heartbeat / 2;
    let work = async {
        let mut attempt = 0;
        loop {
            sleep(session.dial.options.reconnect.pause(attempt)).await;
            attempt = attempt.saturating_add(1);
            let deadline = deadline(session.dial.options.limits.handshake);
            let resumed = || session.heard();
            match establish(&session.dial, Some(&terms), resumed, deadline).await {
                Ok(established) => return established,
                Err(why) => {
                    let address = &session.dial.options.address;
                    tracing::debug!(%address, error = %why, "not connected");
                    session.still_down(why);
                }
            }
        }
    };
    tokio::pin!(work);
    let mut ticks = interval(tick);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            established = &mut work => {
                session.resumed(&established.1);
                return Some(established);
            }
            _ = ticks.tick() => {
                session.tick(tick);
            }
            () = session.wake.notified() => {}
        }
        if session.may_end(terms.lease) {
            return None;
        }
    }
}

impl ClientSession {
    /// Returns whether the connection may end: it is closing, and no release is outstanding or `timeout` is over. A
    /// program that departs waits for no answer, and for no new connection.
    fn may_end(&self, timeout: Duration) -> bool {
        let state = self.lock();
        let Some(since) = state.closing else {
            return false;
        };
        let unsent = state.internal.iter().any(Request::is_release);
        let ends = if state.departing {
            !unsent || !matches!(&*self.link.borrow(), Link::Up)
        } else {
            !unsent && !state.pending.values().any(Request::is_release)
        };
        ends || since.elapsed() >= timeout
    }

    /// Returns the next request to write, encoded: first those of the session itself. A request of more than `limit`
    /// bytes fails, and one whose user no longer waits is dropped.
    fn next_frame(&self, limit: usize) -> Option<Zeroizing<Vec<u8>>> {
        let mut state = self.lock();
        loop {
            let own = state.internal.pop_front();
            let request = own.or_else(|| state.queue.pop_front())?;
            if (request.user.as_ref()).is_some_and(|(reply, _)| reply.is_closed()) {
                continue;
            }
            let id = state.next_id;
            let bytes = encode(&(id, &request.ask));
            if bytes.len() <= limit {
                state.next_id += 1;
                state.pending.insert(id, request);
                return Some(bytes);
            }
            let (what, limit) = ("bytes in a frame that the server reads", limit as u64);
            request.finish(Err(Error::LimitReached { what, limit }));
        }
    }

    /// # Errors
    /// [`Protocol`](crate::ShareError::Protocol) for a reply that breaks it.
    fn handle_reply(self: &Arc<Self>, id: u64, answer: Answer, fds: Vec<OwnedFd>) -> Result<()> {
        let broken = |detail: &str| Err(Error::protocol(self.peer(), detail));
        let Some(request) = self.lock().pending.remove(&id) else {
            return match id {
                UNASKED => Ok(()),
                _ => broken("reply with an unknown request id").map(drop),
            };
        };
        let lease = match (&request.ask, &answer) {
            (Ask::Release { lease }, _) => {
                self.handle_release(*lease, &answer);
                Ok(None)
            }
            (Ask::Held(_), Answer::Expired { leases }) => {
                for &lease in leases {
                    let why = "it ended while the connection was broken";
                    self.end_lease(lease, Refusal::Expired, why);
                }
                Ok(None)
            }
            (Ask::Held(_), _) => broken("unexpected answer about the leases of a session"),
            (Ask::Fetch(fetch), Answer::Granted(granted)) => {
                self.hold(granted.lease, fetch.name.clone()).map(Some)
            }
            (_, Answer::Granted(_)) => broken("a grant for a request that is no fetch"),
            _ => Ok(None),
        };
        let result = lease.as_ref().map(drop).map_err(Clone::clone);
        request.finish(lease.map(|lease| Reply { answer, fds, lease }));
        result
    }

    /// Records a lease.
    fn hold(self: &Arc<Self>, lease: u64, name: String) -> Result<ClientLease> {
        let (state, receiver) = watch::channel(LeaseState::Held);
        let mut session = self.lock();
        if session.leases.contains_key(&lease) {
            let peer = session.terms.peer.clone();
            return Err(Error::protocol(peer, "the same lease granted twice"));
        }
        if let Some(recalled) = &session.recalled {
            // A change, which `RemoteBuffer::changed` returns.
            state.send_replace(recalled.clone());
        }
        session.leases.insert(lease, HeldLease { name, state });
        let instance = session.terms.welcome.instance;
        drop(session);
        Ok(ClientLease {
            session: SessionUser::new(self),
            instance,
            lease,
            state: Mutex::new(receiver),
        })
    }

    fn handle_release(&self, lease: u64, answer: &Answer) {
        use Refusal::{Expired, NotFound, Stale};
        let mut state = self.lock();
        let held = state.leases.remove(&lease);
        if let (Answer::Refused(why), Some(held)) = (answer, held)
            // It had ended already.
            && !matches!(Refusal::from_word(&why.reason), NotFound | Expired | Stale)
        {
            let error = refused(&state.terms.peer, "a release", why);
            held.set_state(LeaseState::Lost(error));
        }
        if state.closing.is_some() {
            drop(state);
            // Perhaps nothing is left that keeps the connection open.
            self.wake.notify_one();
        }
    }

    /// # Errors
    /// The reason why the server has ended the session.
    fn handle_event(&self, event: Event) -> Result<()> {
        match event {
            Event::Withdrawing { lease, ms } => {
                let state = self.lock();
                if let Some(held) = state.leases.get(&lease) {
                    held.set_state(withdrawing(ms));
                }
            }
            Event::Ended { lease, why } => {
                self.end_lease(lease, Refusal::from_word(&why.reason), &why.detail);
            }
            Event::Closing { ms } => {
                let mut state = self.lock();
                let recalled = withdrawing(ms);
                for held in state.leases.values() {
                    held.set_state(recalled.clone());
                }
                state.recalled = Some(recalled);
            }
            Event::Dismissed(why) => {
                let peer = self.peer();
                let why = match Refusal::from_word(&why.reason) {
                    Refusal::NotTrusted => {
                        let why = format!("it no longer trusts this process: {}", why.detail);
                        Error::not_trusted(peer, Distrust::ByPeer, why)
                    }
                    _ => refused(&peer, "the session", &why),
                };
                // The server's end of the session, and of its leases.
                let state = self.lock();
                self.set_down(why.clone(), true);
                state.lose_leases(&why);
                return Err(why);
            }
        }
        Ok(())
    }

    /// Marks a lease as ended by the server. A notice about a lease never overtakes its grant.
    fn end_lease(&self, lease: u64, reason: Refusal, detail: &str) {
        let state = self.lock();
        if let Some(held) = state.leases.get(&lease) {
            let what = format!("the lease on '{}'", held.name);
            let why = Error::refused(&state.terms.peer, what, reason, detail);
            held.set_state(LeaseState::Lost(why));
        }
    }
}

fn withdrawing(ms: u64) -> LeaseState {
    // A day at most: no holder waits longer, and clocks do not overflow.
    let ms = Duration::from_millis(ms.min(86_400_000));
    LeaseState::Withdrawing {
        until: std::time::Instant::now() + ms,
    }
}
