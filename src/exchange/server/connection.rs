//! Serves a connection: requests, answers, notices, and silence.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use zeroize::Zeroizing;

use super::audit::audit;
use super::link::Link;
use super::outcome::{Content, Outcome, Step};
use super::session::Next;
use super::{ServerCore, requests};
use crate::account::{self, Charge};
use crate::per_driver::lock;
use crate::protocol::{Answer, Ask, Event, FromServer, Gone, Refused, Request};
use crate::protocol::{decode, encode};
use crate::text::bounded;
use crate::tls::{Reloads, Tls};
use crate::transport::{Connection, Frame, FrameReader, FrameWriter};
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

/// Requests that are being answered, each with its charge.
type Jobs = JoinSet<(u64, Outcome, Option<Charge>)>;

/// How many notices are sent before requests have their turn.
const NOTICES_AT_ONCE: usize = 16;

/// Serves a connection to its end.
pub(super) async fn serve(inner: &Arc<ServerCore>, mut connection: Connection, link: &Link) {
    let mut last_word = Instant::now();
    let mut jobs = JoinSet::new();
    let end = converse(inner, &mut connection, link, &mut jobs, &mut last_word).await;
    let (peer, session) = (&link.session.peer, link.session.id);
    match end {
        Ok(()) | Err(End::Quietly | End::Dismissed) => {
            tracing::debug!(%peer, session, "disconnected")
        }
        Err(End::Server) => {
            // The last messages: answers decided before, and the end of leases.
            let writer = &mut connection.writer;
            let telling = async {
                let ended = link.session.is_dismissed();
                if ended || answer_done(inner, writer, link, &mut jobs).await.is_ok() {
                    while let Ok(true) = notify(inner, writer, link, || false).await {}
                }
            };
            // Bounded, because the client may read slowly and notices may be endless.
            let _ = tokio::time::timeout(inner.limits.write, telling).await;
        }
        Err(End::Dropped(why)) => {
            inner.counters.count(|counters| &counters.dropped_peers);
            tracing::warn!(%peer, session, why, "connection dropped");
        }
        Err(End::Failed(error)) => {
            if error.is_peer_lost() {
                let reading = last_releases(inner, &mut connection.reader, link);
                // Bounded, because the client may go on writing.
                let _ = tokio::time::timeout(inner.limits.write, reading).await;
            }
            let counters = &inner.counters;
            match error {
                Error::Share(ShareError::Protocol { .. }) => {
                    counters.count(|counters| &counters.protocol_errors);
                }
                Error::Share(ShareError::TimedOut { .. }) => {
                    counters.count(|counters| &counters.dropped_peers);
                }
                _ => {}
            }
            tracing::info!(%peer, session, %error, "connection lost");
        }
    }
    drop(connection);
    jobs.shutdown().await;
    inner.detach(link, last_word);
}

async fn converse(
    inner: &Arc<ServerCore>,
    connection: &mut Connection,
    link: &Link,
    jobs: &mut Jobs,
    last_word: &mut Instant,
) -> Result<(), End> {
    let Connection { reader, writer, .. } = connection;
    let session = &link.session;
    let mut reloads = inner.tls.as_ref().map(Tls::reloads);
    let silence = inner.silence();
    let limit = inner.limits.frame_bytes;
    let quiet = tokio::time::sleep(silence);
    tokio::pin!(quiet);
    let ended = inner.ended.cancelled();
    tokio::pin!(ended);
    let mut excused = Duration::ZERO;
    loop {
        verify(inner, link);
        let more = notify(inner, writer, link, || inner.ended.is_cancelled()).await?;
        let expiry = lock(&session.credential)
            .as_ref()
            .and_then(|peer| peer.left((inner.wall_clock)()));
        // Timers do not run while the machine is suspended.
        let expiry = expiry.map(|left| left.min(inner.heartbeat));
        // Biased select: a flood of events must not starve reads. The server must hear a client that it sends
        // to, and drop it when it falls silent.
        tokio::select! {
            biased;
            () = &mut ended => return Err(End::Server),
            // Verified by the next round.
            () = Reloads::next_of(&mut reloads) => {}
            () = tokio::time::sleep(expiry.unwrap_or_default()), if expiry.is_some() => {}
            Some(done) = jobs.join_next(), if !jobs.is_empty() => {
                // A job that panicked gets no answer: its id is unknown.
                if let Ok((id, outcome, _charge)) = done
                    && !session.is_dismissed()
                {
                    answer(inner, writer, link, id, outcome).await?;
                }
            }
            frame = reader.read(limit) => {
                let Some(frame) = frame? else {
                    return Ok(());
                };
                *last_word = Instant::now();
                excused = Duration::ZERO;
                verify(inner, link);
                request(inner, writer, link, jobs, frame).await?;
            }
            () = &mut quiet => {
                let now = Instant::now();
                let late = now.saturating_duration_since(*last_word + silence);
                if let Some(excuse) = excuse(inner, late, excused) {
                    *last_word += excuse;
                    excused += excuse;
                }
                let until = *last_word + silence;
                if until <= now {
                    return Err(End::Dropped("it is silent"));
                }
                quiet.as_mut().reset(until.into());
            }
            () = session.wake.notified(), if !more => {}
            // Lets other tasks of this thread run, and polls for input.
            () = tokio::task::yield_now(), if more => {}
        }
    }
}

/// Ends the session if its peer is no longer trusted: certificates were loaded anew, or one of the peer's has expired.
fn verify(inner: &ServerCore, link: &Link) {
    let Some(tls) = &inner.tls else {
        return;
    };
    let verified = match &mut *lock(&link.session.credential) {
        Some(peer) => tls.check(peer, (inner.wall_clock)()),
        None => Ok(()),
    };
    if let Err(why) = verified {
        inner.dismiss_link(link, Refusal::NotTrusted, &why);
    }
}

/// Records the releases that a client sent before it closed the connection. A client that ends does not wait for the
/// answers, so writing one may fail before all releases were read.
async fn last_releases(inner: &Arc<ServerCore>, reader: &mut FrameReader, link: &Link) {
    while let Ok(Some(frame)) = reader.read(inner.limits.frame_bytes).await {
        let Ok::<Request, _>((_, ask)) = decode(&frame.bytes) else {
            return;
        };
        if let Ask::Release(_) = &ask
            && !link.session.is_dismissed()
        {
            inner.counters.count(|counters| &counters.requests);
            let _unanswered = requests::begin(inner, link, ask);
        }
    }
}

/// Returns how much of a silence to ignore if this server noticed it `late`, because it did not run: a client
/// on the same busy machine may not have run either. Not without a bound.
fn excuse(inner: &ServerCore, late: Duration, before: Duration) -> Option<Duration> {
    let most = inner.lease.saturating_mul(3);
    (late > inner.heartbeat / 2 && before < most).then(|| late.min(most) + inner.heartbeat)
}

/// Answers a request at once, or starts a job for it. Does neither after the session's end.
async fn request(
    inner: &Arc<ServerCore>,
    writer: &mut FrameWriter,
    link: &Link,
    jobs: &mut Jobs,
    frame: Frame,
) -> Result<(), End> {
    if link.session.is_dismissed() {
        return Ok(());
    }
    let Frame {
        bytes,
        charge: read,
        ..
    } = frame;
    let (id, ask): Request = decode(&bytes)?;
    drop((bytes, read));
    inner.counters.count(|counters| &counters.requests);
    let subject = requests::subject(&ask);
    let kept = account::request(&ask);
    let begun = requests::begin(inner, link, ask);
    let begun = begun.and_then(|step| match step {
        Step::Now(_) => Ok((step, None)),
        Step::Later(_) if jobs.len() >= inner.limits.requests_in_flight => {
            let limit = inner.limits.requests_in_flight;
            Err((Refusal::Limit, format!("{limit} requests at once")))
        }
        Step::Later(_) => Ok((step, Some(link.session.account().charge(kept)?))),
    });
    let outcome = match begun {
        Ok((Step::Later(job), charge)) => {
            let running = inner.tasks.token();
            let (core, link) = (Arc::clone(inner), link.clone());
            jobs.spawn(async move {
                let outcome = job.await;
                audit_refusal(&core, &link, subject, &outcome);
                drop(running);
                (id, outcome, charge)
            });
            return Ok(());
        }
        Ok((Step::Now(content), _)) => Ok(content),
        Err(no) => Err(no),
    };
    audit_refusal(inner, link, subject, &outcome);
    Ok(answer(inner, writer, link, id, outcome).await?)
}

/// Writes an audit event if a request was refused.
fn audit_refusal(
    inner: &ServerCore,
    link: &Link,
    (request, name): (&'static str, Option<String>),
    outcome: &Outcome,
) {
    let reason = match outcome {
        Err((reason, _)) => reason.word(),
        Ok(Content::Answer(Answer::Refused(refused), _)) => &refused.reason,
        Ok(_) => return,
    };
    let (reason, peer, session) = (bounded(reason, 64), &link.session.peer, link.session.id);
    audit!(
        inner.audit,
        Refusal,
        Some(peer),
        "refused",
        session,
        pid = link.pid(),
        request,
        name,
        reason,
    );
}

/// Sends the answers that are ready.
async fn answer_done(
    inner: &ServerCore,
    writer: &mut FrameWriter,
    link: &Link,
    jobs: &mut Jobs,
) -> Result<()> {
    while let Some(done) = jobs.try_join_next() {
        if let Ok((id, outcome, _charge)) = done {
            answer(inner, writer, link, id, outcome).await?;
        }
    }
    Ok(())
}

/// Sends the answer to a request.
async fn answer(
    inner: &ServerCore,
    writer: &mut FrameWriter,
    link: &Link,
    id: u64,
    outcome: Outcome,
) -> Result<()> {
    let (answer, fds) = match outcome {
        Ok(Content::Answer(answer, fds)) => (answer, fds),
        Ok(Content::Built(build)) => build(),
        Err((reason, detail)) => (refused(&reason, detail), Vec::new()),
    };
    if let Answer::Refused(refused) = &answer {
        inner.counters.refused(&Refusal::from_word(&refused.reason));
    }
    let (names, grant) = (
        matches!(answer, Answer::Names(_)),
        matches!(answer, Answer::Granted(_)),
    );
    let bytes = reply(id, answer);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let written = writer.write(&bytes, &fds).await;
    if grant {
        link.session.granted(link.id);
    }
    match written {
        // Nothing else depends on names that were not listed.
        Err(Error::LimitReached { what, limit }) if names => {
            drop(bytes);
            inner.counters.refused(&Refusal::Limit);
            let answer = refused(&Refusal::Limit, format!("{limit} {what}"));
            writer.write(&reply(id, answer), &[]).await
        }
        written => written,
    }
}

/// Encodes the whole message.
fn reply(id: u64, answer: Answer) -> Zeroizing<Vec<u8>> {
    encode(&(id, answer))
}

fn refused(reason: &Refusal, detail: String) -> Answer {
    let reason = reason.word().into();
    Answer::Refused(Refused { reason, detail })
}

/// Sends the client some of its notices, unless there is something more urgent; returns whether there may be
/// more.
async fn notify(
    inner: &ServerCore,
    writer: &mut FrameWriter,
    link: &Link,
    urgent: impl Fn() -> bool,
) -> Result<bool, End> {
    for _ in 0..NOTICES_AT_ONCE {
        if urgent() {
            break;
        }
        let event = match link.session.next(link.id) {
            Next::Nothing => return Ok(false),
            Next::TakenOver => return Err(End::Quietly),
            Next::Overflown => return Err(End::Dropped("it does not read")),
            Next::Dismissed(why) => {
                let notice = FromServer::Event(Event::Dismissed(why));
                writer.write(&encode(&notice), &[]).await?;
                return Err(End::Dismissed);
            }
            Next::Notice(event) => event,
            Next::News(name, seen_before) => {
                let state = inner.state();
                match state.visible(&name, &link.session.peer) {
                    Some(found) => Event::Published(state.entry(&found.publication)),
                    None if seen_before => Event::Gone(Gone {
                        name: name.to_string(),
                    }),
                    None => continue,
                }
            }
        };
        let notice = FromServer::Event(event);
        writer.write(&encode(&notice), &[]).await?;
    }
    Ok(true)
}
