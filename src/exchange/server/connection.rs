//! Serves a connection: requests, answers, notices, and silence.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use zeroize::Zeroizing;

use super::ServerCore;
use super::publication::Publication;
use super::quota::CountedFds;
use super::requests::{Answered, Reply, handle};
use super::session::Next;
use super::sessions::Link;
use crate::limits::deadline;
use crate::per_driver::lock;
use crate::protocol::{
    Answer, Ask, Event, FromServer, Gone, Names, Refused, Request, decode, encode,
};
use crate::tls::{Reloads, Tls};
use crate::transport::{Connection, Frame, FrameReader, FrameWriter, Permit, SMALL};
use crate::{Error, Refusal, Result, ShareError};

/// Why a connection ends.
enum End {
    /// The client has closed it, or another connection has taken over the session.
    Quietly,
    /// The server ends.
    Server,
    /// The session has ended, and the client has been told.
    Dismissed,
    /// The client is silent, or does not read.
    Dropped(&'static str),
    /// It failed, or the client violated the protocol.
    Failed(Error),
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// How many notices are sent before requests have their turn.
const NOTICES_AT_ONCE: usize = 16;
/// The most bytes of a part in an answer, with its handle.
const PART: usize = 256;
/// The most bytes of a number in a message.
const NUMBER: usize = 9;

/// A connection's state, besides its reader.
struct Conversation<'a> {
    core: &'a Arc<ServerCore>,
    link: &'a Arc<Link>,
    writer: FrameWriter,
    /// Requests that wait for something.
    jobs: JoinSet<Answered>,
    attachment: Attachment<'a>,
}

/// Detaches the session when its connection is over, also after a panic of an allocator's.
struct Attachment<'a> {
    core: &'a ServerCore,
    link: &'a Link,
    last_message: Instant,
}

impl Drop for Attachment<'_> {
    fn drop(&mut self) {
        self.core.detach(self.link, self.last_message);
    }
}

/// Returns the most bytes of an answer or event about this memory.
fn bytes_about(publication: &Publication) -> usize {
    publication.description.parts.len() * PART
}

/// Serves a connection to its end.
pub(super) async fn serve(core: &Arc<ServerCore>, connection: Connection, link: Link) {
    let Connection {
        mut reader, writer, ..
    } = connection;
    let link = &Arc::new(link);
    let mut conversation = Conversation {
        core,
        link,
        writer,
        jobs: JoinSet::new(),
        attachment: Attachment {
            core,
            link,
            last_message: Instant::now(),
        },
    };
    let (peer, session) = (&link.session.peer, link.session.id);
    match conversation.run(&mut reader).await {
        Ok(()) | Err(End::Quietly | End::Dismissed) => {
            tracing::debug!(%peer, session, "disconnected")
        }
        Err(End::Server) => {
            // Bounded, because the client may read slowly and notices may be endless.
            let last = conversation.send_last();
            let _ = tokio::time::timeout(core.limits.write, last).await;
        }
        Err(End::Dropped(why)) => {
            core.counters.count(|stats| &mut stats.dropped_peers);
            tracing::warn!(%peer, session, why, "connection dropped");
        }
        Err(End::Failed(error)) => {
            if error.is_peer_lost() {
                let reading = last_releases(core, &mut reader, link);
                // Bounded, because the client may go on writing.
                let _ = tokio::time::timeout(core.limits.write, reading).await;
            }
            let counters = &core.counters;
            match error {
                Error::Share(ShareError::Protocol { .. }) => {
                    counters.count(|stats| &mut stats.protocol_errors);
                }
                Error::Share(ShareError::TimedOut { .. }) => {
                    counters.count(|stats| &mut stats.dropped_peers);
                }
                _ => {}
            }
            tracing::info!(%peer, session, %error, "connection lost");
        }
    }
    let Conversation {
        writer,
        mut jobs,
        attachment,
        ..
    } = conversation;
    drop((reader, writer));
    jobs.shutdown().await;
    drop(attachment);
}

impl Conversation<'_> {
    async fn run(&mut self, reader: &mut FrameReader) -> Result<(), End> {
        let (core, session) = (self.core, &self.link.session);
        let mut reloads = core.tls.as_ref().map(Tls::reloads);
        let idle = tokio::time::sleep(core.silence());
        tokio::pin!(idle);
        let ended = core.ended.cancelled();
        tokio::pin!(ended);
        let mut excused = Duration::ZERO;
        loop {
            self.verify();
            let more = self.notify(|| core.ended.is_cancelled()).await?;
            let expiry = lock(&session.credential)
                .as_ref()
                .and_then(|peer| peer.left((core.wall_clock)()));
            // Timers do not run while the machine is suspended.
            let expiry = expiry.map(|left| left.min(core.heartbeat));
            // Biased select: a flood of events must not starve reads. The server must hear a client that it sends
            // to, and drop it when it falls silent.
            tokio::select! {
                biased;
                () = &mut ended => return Err(End::Server),
                // Verified by the next round.
                () = Reloads::next_of(&mut reloads) => {}
                () = tokio::time::sleep(expiry.unwrap_or_default()), if expiry.is_some() => {}
                Some(done) = self.jobs.join_next(), if !self.jobs.is_empty() => {
                    // A job that panicked gets no answer: its id is unknown.
                    if let Ok(answered) = done
                        && !session.is_dismissed()
                    {
                        self.answer(answered).await?;
                    }
                }
                frame = reader.read(core.limits.frame_bytes) => {
                    let Some(frame) = frame? else {
                        return Ok(());
                    };
                    self.attachment.last_message = Instant::now();
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

    /// Returns when the client will have been silent for too long.
    fn next_idle(&mut self, excused: &mut Duration) -> Result<Instant, End> {
        let (now, silence) = (Instant::now(), self.core.silence());
        let late = now.saturating_duration_since(self.attachment.last_message + silence);
        if let Some(excuse) = excuse(self.core, late, *excused) {
            self.attachment.last_message += excuse;
            *excused += excuse;
        }
        let until = self.attachment.last_message + silence;
        if until > now {
            Ok(until)
        } else {
            Err(End::Dropped("it is silent"))
        }
    }

    /// Ends the session if its peer is no longer trusted: certificates were loaded anew, or one of the peer's has expired.
    fn verify(&self) {
        let Some(tls) = &self.core.tls else {
            return;
        };
        let verified = match &mut *lock(&self.link.session.credential) {
            Some(peer) => tls.check(peer, (self.core.wall_clock)()),
            None => Ok(()),
        };
        if let Err(why) = verified {
            (self.core).dismiss_link(self.link, Refusal::NotTrusted, &why);
        }
    }

    /// Answers a request at once, or lets a task wait for its answer. Does neither after the session's end.
    async fn request(&mut self, frame: Frame) -> Result<(), End> {
        if self.link.session.is_dismissed() {
            return Ok(());
        }
        let Frame { bytes, permit, .. } = frame;
        let request: Request = decode(&bytes)?;
        drop(bytes);
        self.core.counters.count(|stats| &mut stats.requests);
        let (core, link) = (Arc::clone(self.core), Arc::clone(self.link));
        // If the allocator panics, only a task of the request's own ends.
        let asks_allocator = matches!(request.1, Ask::Create(_) | Ask::Delete(_));
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
                    drop((running, permit));
                    answered
                });
            }
        }
        Ok(())
    }

    /// Sends the last messages: answers decided before, and the end of leases.
    async fn send_last(&mut self) -> Result<(), End> {
        if !self.link.session.is_dismissed() {
            while let Some(done) = self.jobs.try_join_next() {
                if let Ok(answered) = done {
                    self.answer(answered).await?;
                }
            }
        }
        while self.notify(|| false).await? {}
        Ok(())
    }

    /// Sends the answer to a request.
    async fn answer(&mut self, answered: Answered) -> Result<()> {
        let reply = match answered.result {
            Ok(reply) => reply,
            Err((reason, detail)) => {
                self.core.counters.refused(&reason);
                let reason = reason.word().into();
                Answer::Refused(Refused { reason, detail }).into()
            }
        };
        let (answer, fds, _permit) = self.build(reply).await?;
        let granted = match &answer {
            Answer::Granted(granted) => Some(granted.lease),
            _ => None,
        };
        let bytes: Zeroizing<Vec<u8>> = encode(&(answered.id, answer));
        let written = self.writer.write(&bytes, &fds.borrowed()).await;
        if let Some(lease) = granted {
            self.link.session.granted(lease);
        }
        written
    }

    /// Builds an answer, now that it is about to be written: until then a long description is kept only once.
    async fn build(&self, reply: Reply) -> Result<(Answer, CountedFds, Option<Permit>)> {
        let (mut fds, mut permit) = (CountedFds::default(), None);
        let answer = match reply {
            Reply::Answer(Answer::Expired(leases)) => {
                permit = self.permit(leases.leases.len() * NUMBER).await?;
                Answer::Expired(leases)
            }
            Reply::Answer(answer) => answer,
            Reply::Entry(publication) => {
                permit = self.permit(bytes_about(&publication)).await?;
                let entries = vec![self.core.state().entry(&publication)];
                Answer::Names(Names {
                    entries,
                    more: false,
                })
            }
            Reply::Page { prefix, after } => {
                let peer = &self.link.session.peer;
                let page = |least| self.core.page(peer, &prefix, after.as_deref(), least);
                match page(0) {
                    // The first entry is long.
                    names if names.more && names.entries.is_empty() => {
                        permit = Some(self.large_permit().await?);
                        Answer::Names(page(1))
                    }
                    names => Answer::Names(names),
                }
            }
            Reply::Grant(grant) => {
                permit = self.permit(bytes_about(&grant.publication)).await?;
                let granted = grant.build();
                fds = grant.fds;
                Answer::Granted(granted)
            }
        };
        Ok((answer, fds, permit))
    }

    /// Waits for a permit, if an answer or event of so many bytes is a large frame.
    async fn permit(&self, bytes: usize) -> Result<Option<Permit>> {
        if bytes <= SMALL {
            return Ok(None);
        }
        self.large_permit().await.map(Some)
    }

    async fn large_permit(&self) -> Result<Permit> {
        let within = self.core.limits.write;
        self.link.large.permit(deadline(within), within).await
    }

    /// Sends the client some of its notices, unless there is something more urgent; returns whether there may be
    /// more.
    async fn notify(&mut self, urgent: impl Fn() -> bool) -> Result<bool, End> {
        for _ in 0..NOTICES_AT_ONCE {
            if urgent() {
                break;
            }
            let (mut _permit, mut end) = (None, None);
            let event = match self.link.session.next(self.link.id) {
                Next::Nothing => return Ok(false),
                Next::TakenOver => return Err(End::Quietly),
                Next::Overflown => return Err(End::Dropped("it does not read")),
                Next::Dismissed(why) => {
                    end = Some(End::Dismissed);
                    Event::Dismissed(why)
                }
                Next::Notice(event) => event,
                Next::News(name, seen_before) => {
                    match self.core.visible(&name, &self.link.session.peer) {
                        Some(publication) => {
                            _permit = self.permit(bytes_about(&publication)).await?;
                            Event::Published(self.core.state().entry(&publication))
                        }
                        None if seen_before => Event::Gone(Gone {
                            name: name.to_string(),
                        }),
                        None => continue,
                    }
                }
            };
            let notice = FromServer::Event(event);
            self.writer.write(&encode(&notice), &[]).await?;
            if let Some(end) = end {
                return Err(end);
            }
        }
        Ok(true)
    }
}

/// Records the releases that a client sent before it closed the connection. A client that ends does not wait for the
/// answers, so writing one may fail before all releases were read.
async fn last_releases(core: &Arc<ServerCore>, reader: &mut FrameReader, link: &Link) {
    while let Ok(Some(frame)) = reader.read(core.limits.frame_bytes).await {
        let Ok::<Request, _>((_, ask)) = decode(&frame.bytes) else {
            return;
        };
        if let Ask::Release(release) = ask
            && !link.session.is_dismissed()
        {
            core.counters.count(|stats| &mut stats.requests);
            let _unanswered = core.release(link, release.lease);
        }
    }
}

/// Returns how much of a silence to ignore if this server noticed it `late`, because it did not run: a client
/// on the same busy machine may not have run either. Not without a bound.
fn excuse(core: &ServerCore, late: Duration, before: Duration) -> Option<Duration> {
    let most = core.lease.saturating_mul(3);
    (late > core.heartbeat / 2 && before < most).then(|| late.min(most) + core.heartbeat)
}
