//! Serves a connection: requests, answers, notices, and silence.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};

use super::ServerCore;
use super::requests::{Reply, Requester, handle};
use super::session::{Link, ServerSession};
use super::sessions::Attached;
use crate::per_driver::lock;
use crate::protocol::{Ask, Event, FromServer, Request, decode, encode};
use crate::tls::{Tls, reloaded};
use crate::transport::{Connection, Frame, FrameReader, FrameWriter};
use crate::{Error, Refusal, Result, ShareError};

/// How many notices are sent before requests have their turn.
const NOTICES_AT_ONCE: usize = 16;

/// A connection's state, besides its reader.
struct Conversation {
    core: Arc<ServerCore>,
    link: Arc<Link>,
    writer: FrameWriter,
    /// Requests that wait for something.
    jobs: JoinSet<(Requester, Reply)>,
    attached: Attached,
}

/// Serves a connection to its end.
pub(super) async fn serve(connection: Connection, attached: Attached) {
    let mut reader = connection.reader;
    let (core, link) = (Arc::clone(&attached.core), Arc::clone(&attached.link));
    let mut conversation = Conversation {
        core: Arc::clone(&core),
        link: Arc::clone(&link),
        writer: connection.writer,
        jobs: JoinSet::new(),
        attached,
    };
    let (peer, session) = (&link.session.peer, link.session.id);
    let ended = tokio::select! {
        biased;
        // Also in the middle of a write. The client has been told why, has another connection, or may go on over TCP.
        () = link.lost.cancelled() => Ok(()),
        ended = conversation.run(&mut reader) => ended,
    };
    match &ended {
        Err(error) if error.is_timed_out() => {
            tracing::warn!(%peer, session, %error, "connection dropped");
        }
        Err(error) => tracing::info!(%peer, session, %error, "connection lost"),
        Ok(()) => tracing::debug!(%peer, session, "disconnected"),
    }
    match ended {
        Err(Error::Share(ShareError::PeerLost { .. })) => {
            let reading = last_releases(&core, &mut reader, &link);
            // Bounded, because the client may go on writing.
            let _ = timeout(core.options.limits.write, reading).await;
        }
        Err(Error::Share(ShareError::Protocol { .. })) => {
            core.count(|stats| &mut stats.protocol_errors);
        }
        Err(Error::Share(ShareError::TimedOut { .. })) => {
            core.count(|stats| &mut stats.dropped_peers);
        }
        _ => {}
    }
    // The socket closes at once: a job may take long to end.
    drop((reader, conversation.writer));
    conversation.jobs.shutdown().await;
    drop(conversation.attached);
}

impl Conversation {
    async fn run(&mut self, reader: &mut FrameReader) -> Result<()> {
        let (core, session) = (Arc::clone(&self.core), Arc::clone(&self.link.session));
        let mut reloads = core.tls().map(Tls::reloads);
        let mut idle = pin!(sleep(core.silence()));
        let mut expiry = pin!(sleep_until(self.next_verification().into()));
        let mut ended = pin!(core.ended.cancelled());
        let mut excused = Duration::ZERO;
        loop {
            let more = self.notify(|| core.ended.is_cancelled()).await?;
            // Biased select: a flood of events must not starve reads. The server must hear a client that it sends
            // to, and drop it when it falls silent.
            tokio::select! {
                biased;
                () = &mut ended => {
                    // Bounded, because the client may read slowly and notices may be endless.
                    let _ = timeout(core.options.limits.write, self.send_last()).await;
                    return Ok(());
                }
                // The next round verifies.
                () = reloaded(&mut reloads) => {}
                () = &mut expiry, if core.tls().is_some() => {
                    // First: a certificate that has just expired would make the timer due again at once.
                    self.verify();
                    expiry.as_mut().reset(self.next_verification().into());
                }
                Some(done) = self.jobs.join_next(), if !self.jobs.is_empty() => {
                    // No timer ran while the machine was suspended.
                    self.verify();
                    // A job that panicked gets no answer: its id is unknown.
                    if let Ok(answered) = done
                        && !session.is_dismissed()
                    {
                        self.answer(answered).await?;
                    }
                }
                frame = reader.read(core.frame_bytes()) => {
                    let Some(frame) = frame? else {
                        return Ok(());
                    };
                    self.attached.last_message = Instant::now();
                    excused = Duration::ZERO;
                    self.verify();
                    self.request(frame).await?;
                }
                () = &mut idle => idle.as_mut().reset(self.next_idle(&mut excused)?.into()),
                () = session.wake.notified(), if !more => {}
                // Lets other tasks of this thread run, and polls for input.
                () = tokio::task::yield_now(), if more => {}
            }
        }
    }

    /// Returns when the peer's certificate has to be verified again: when it expires, at the latest.
    fn next_verification(&self) -> Instant {
        let credential = lock(&self.link.session.credential);
        let left =
            (credential.as_ref()).and_then(|peer| peer.left((self.core.options.wall_clock)()));
        // Timers do not run while the machine is suspended.
        let heartbeat = self.core.options.heartbeat;
        Instant::now() + left.map_or(heartbeat, |left| left.min(heartbeat))
    }

    /// Returns when the client will have been silent for too long.
    fn next_idle(&mut self, excused: &mut Duration) -> Result<Instant> {
        let (now, core) = (Instant::now(), &self.core);
        let silence = core.silence();
        let late = now.saturating_duration_since(self.attached.last_message + silence);
        // If this server notices it late, it did not run, and a client on the same busy machine may not have run either. Not
        // without a bound.
        let most = core.options.lease.saturating_mul(3);
        if late > core.options.heartbeat / 2 && *excused < most {
            let excuse = late.min(most) + core.options.heartbeat;
            self.attached.last_message += excuse;
            *excused += excuse;
        }
        let until = self.attached.last_message + silence;
        if until > now {
            return Ok(until);
        }
        Err(Error::timed_out("a message of the client", silence))
    }

    /// Ends the session if its peer is no longer trusted: certificates were loaded anew, or one of the peer's has expired.
    fn verify(&self) {
        let Some(tls) = self.core.tls() else {
            return;
        };
        let verified = match &mut *lock(&self.link.session.credential) {
            Some(peer) => peer.check(&tls.loaded(), (self.core.options.wall_clock)()),
            None => Ok(()),
        };
        if let Err(why) = verified {
            // Unless another connection has taken the session over.
            let id = self.link.session.id;
            let own = |one: &ServerSession| one.id == id && one.is_of(&self.link);
            self.core.dismiss(own, &Refusal::NotTrusted, &why);
        }
    }

    /// Answers a request at once, or lets a task wait for its answer. Does neither after the session's end.
    async fn request(&mut self, frame: Frame) -> Result<()> {
        if self.link.session.is_dismissed() {
            return Ok(());
        }
        let request: Request = decode(&frame.bytes)?;
        drop(frame);
        self.core.count(|stats| &mut stats.requests);
        let (core, link) = (Arc::clone(&self.core), Arc::clone(&self.link));
        // If the allocator panics, only a task of the request's own ends.
        let asks_allocator = matches!(request.1, Ask::Create(_) | Ask::Delete { .. });
        let mut handling = Box::pin(handle(core, link, request, self.jobs.len()));
        // Most of the others need not wait: a task would cost them more than the rest.
        let polled = if asks_allocator {
            Poll::Pending
        } else {
            poll_fn(|cx| Poll::Ready(handling.as_mut().poll(cx))).await
        };
        match polled {
            Poll::Ready(answered) => self.answer(answered).await?,
            Poll::Pending => {
                let running = self.core.tasks.token();
                self.jobs.spawn(async move {
                    let answered = handling.await;
                    drop(running);
                    answered
                });
            }
        }
        Ok(())
    }

    /// Sends the last messages: answers decided before, and the end of leases.
    async fn send_last(&mut self) -> Result<()> {
        while let Some(done) = self.jobs.try_join_next() {
            self.verify();
            if let Ok(answered) = done
                && !self.link.session.is_dismissed()
            {
                self.answer(answered).await?;
            }
        }
        while self.notify(|| false).await? {}
        Ok(())
    }

    /// Sends the answer to a request, which is counted until then.
    ///
    /// A lease stays if writing its grant fails: the grant may have arrived. A client without it says so when it resumes the
    /// session (`held`).
    async fn answer(&mut self, (requester, reply): (Requester, Reply)) -> Result<()> {
        let Reply { build, _large } = reply;
        let (answer, fds) = requester.build(build);
        let bytes = encode(&FromServer::Reply(requester.id, answer));
        self.writer.write(&bytes, &fds.borrowed()).await
    }

    /// Sends the client some of its notices, unless there is something more urgent; returns whether there may be
    /// more.
    async fn notify(&mut self, urgent: impl Fn() -> bool) -> Result<bool> {
        for _ in 0..NOTICES_AT_ONCE {
            if self.link.lost.is_cancelled() {
                return Ok(false);
            }
            if urgent() {
                break;
            }
            self.verify();
            let Some(event) = self.link.session.next(&self.link) else {
                return Ok(false);
            };
            let is_last = matches!(event, Event::Dismissed(_));
            let bytes = encode(&FromServer::Event(event));
            self.writer.write(&bytes, &[]).await?;
            if is_last {
                self.link.lost.cancel();
            }
        }
        Ok(true)
    }
}

/// Records the releases that a client sent before it closed the connection, and the leases that it had. A client that ends does
/// not wait for the answers, so writing one may fail before all releases were read.
async fn last_releases(core: &Arc<ServerCore>, reader: &mut FrameReader, link: &Link) {
    while let Ok(Some(frame)) = reader.read(core.frame_bytes()).await {
        let Ok::<Request, _>((_, ask)) = decode(&frame.bytes) else {
            return;
        };
        if link.session.is_dismissed() {
            continue;
        }
        match ask {
            Ask::Release { lease } => {
                core.count(|stats| &mut stats.requests);
                let _unanswered = core.release(link, lease);
            }
            // Of a client that closes while a grant is on its way.
            Ask::Held(held) => drop(core.held(link, &held)),
            _ => {}
        }
    }
}
