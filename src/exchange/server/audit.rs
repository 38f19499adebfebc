//! The audit log: one event for each session, grant, refusal, release, revocation, creation, deletion, and group
//! that a rank joins or leaves.
//!
//! docs/service.md has the fields. None of them is a handle, a session's token or a key: [`Event`] has no
//! field that could hold one.

mod bound;
mod request;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde::Serialize;

use self::bound::{Bounds, BucketKind};
pub(super) use self::request::Pending;
use super::leases::LeaseRecord;
use super::link::Link;
use super::outcome::{Content, Outcome};
use super::publication::Publication;
use crate::PeerName;
use crate::Refusal;
use crate::per_driver::lock;
use crate::protocol::Answer;
use crate::text::bounded;

/// The target of the events in `tracing`.
pub(crate) const TARGET: &str = "egmem::audit";

/// A replacement for `tracing`. It must not block.
pub type Sink = Arc<dyn Fn(&Event) + Send + Sync>;

/// An audit event, as it is written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Event {
    /// The event.
    pub event: &'static str,
    /// `ok`, `refused`, or `abandoned` if the connection ended before the answer.
    pub outcome: &'static str,
    /// Empty if no peer was identified yet.
    pub peer: String,
    /// The session's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<u64>,
    /// For a local peer, the process that connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The request that was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<&'static str>,
    /// The name of the memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The peer that created the memory, or `@server`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The lease's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// The size of the memory in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The reason, as a word of [`crate::Refusal`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How many events were not written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

/// Reports events. Each server has one.
#[derive(Default)]
pub(super) struct Audit {
    sink: Option<Sink>,
    bounds: Mutex<Bounds>,
}

impl fmt::Debug for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Audit").finish_non_exhaustive()
    }
}

impl Audit {
    /// Reports to `sink`, or to `tracing` without one.
    pub fn new(sink: Option<Sink>) -> Self {
        Self {
            sink,
            bounds: Mutex::default(),
        }
    }

    /// Reports that a session has begun, was resumed, or has moved to this connection.
    pub fn session_begun(&self, link: &Link, event: &'static str) {
        self.session(of_link(link, event, Event::default()));
    }

    pub fn session_ended(&self, session: u64, peer: &PeerName, reason: Option<&str>) {
        self.session(Event {
            session: Some(session),
            reason: reason.map(str::to_owned),
            ..of_peer(peer, "session_ended")
        });
    }

    /// Reports that the server ended a session whose peer is no longer trusted or admitted.
    pub fn session_dismissed(&self, session: u64, peer: &PeerName, reason: &Refusal) {
        self.done(Event {
            session: Some(session),
            reason: Some(bounded(reason.word(), 64)),
            ..of_peer(peer, "session_dismissed")
        });
    }

    /// Reports that a peer got a lease.
    pub fn granted(&self, link: &Link, lease: u64, publication: &Publication) {
        self.done(Event {
            lease: Some(lease),
            ..of_link(link, "granted", about(publication))
        });
    }

    /// Reports the end of a lease: `event` is `released`, `expired` or `revoked`, or `withdrawing` if the
    /// holder is asked to release. The name and the size are those of its memory, if that is still published.
    pub fn lease(
        &self,
        event: &'static str,
        lease: &LeaseRecord,
        name: Option<&str>,
        bytes: Option<u64>,
    ) {
        self.done(Event {
            session: Some(lease.session),
            lease: Some(lease.holder.lease),
            name: name.map(str::to_owned),
            bytes,
            ..of_peer(&lease.holder.peer, event)
        });
    }

    /// Reports the answer to a request.
    fn answered(&self, link: &Link, asked: Event, outcome: &Outcome) {
        let reason = match outcome {
            Err((reason, _)) => reason.word(),
            Ok(Content::Answer(Answer::Refused(refused), _)) => &refused.reason,
            Ok(_) => {
                if let Some(event) = granted_event(&asked) {
                    self.done(of_link(link, event, asked));
                }
                return;
            }
        };
        self.refused(of_link(link, "refused", asked), reason);
    }

    /// Reports a request whose answer is no longer awaited: it may have been granted.
    fn abandoned(&self, link: &Link, asked: Event) {
        if let Some(event) = granted_event(&asked) {
            self.emit(&Event {
                outcome: "abandoned",
                ..of_link(link, event, asked)
            });
        }
    }

    /// Reports the refusal of a session.
    pub fn refused_without_session(
        &self,
        request: &'static str,
        peer: Option<&PeerName>,
        pid: Option<u32>,
        reason: &str,
    ) {
        let event = Event {
            event: "refused",
            peer: peer.map(PeerName::to_string).unwrap_or_default(),
            pid,
            request: Some(request),
            ..Event::default()
        };
        self.refused(event, reason);
    }

    /// Reports counts that were not written yet.
    pub fn finish(&self) {
        self.emit_all(lock(&self.bounds).take_all());
    }

    /// Returns when [`tell_suppressed`](Self::tell_suppressed) is due, if there is something to report.
    pub fn deadline(&self) -> Option<Instant> {
        lock(&self.bounds).deadline()
    }

    /// Reports how many events were not written, when that is due.
    pub fn tell_suppressed(&self, now: Instant) {
        self.emit_all(lock(&self.bounds).take_due(now));
    }

    fn emit_all(&self, events: Vec<Event>) {
        events.iter().for_each(|event| self.emit(event));
    }

    fn refused(&self, mut event: Event, reason: &str) {
        if self.admits(BucketKind::Refusal, &event) {
            event.outcome = "refused";
            event.reason = Some(bounded(reason, 64));
            self.emit(&event);
        }
    }

    fn session(&self, event: Event) {
        if self.admits(BucketKind::Session, &event) {
            self.done(event);
        }
    }

    fn done(&self, mut event: Event) {
        event.outcome = "ok";
        self.emit(&event);
    }

    /// Returns whether to write an event; otherwise counts it.
    fn admits(&self, kind: BucketKind, event: &Event) -> bool {
        let now = Instant::now();
        self.tell_suppressed(now);
        lock(&self.bounds).admit(kind, &event.peer, now)
    }

    fn emit(&self, event: &Event) {
        if let Some(sink) = &self.sink {
            return sink(event);
        }
        tracing::info!(
            target: TARGET,
            event = event.event,
            outcome = event.outcome,
            peer = event.peer,
            session = event.session,
            pid = event.pid,
            request = event.request,
            name = event.name,
            owner = event.owner,
            lease = event.lease,
            bytes = event.bytes,
            reason = event.reason,
            count = event.count,
        );
    }
}

fn of_peer(peer: &PeerName, event: &'static str) -> Event {
    Event {
        event,
        peer: peer.to_string(),
        ..Event::default()
    }
}

/// Adds the peer to an event. Only a refusal names the request.
fn of_link(link: &Link, event: &'static str, asked: Event) -> Event {
    Event {
        event,
        peer: link.session.peer.to_string(),
        session: Some(link.session.id),
        pid: link.process.as_ref().map(|known| known.shown.pid),
        request: asked.request.filter(|_| event == "refused"),
        ..asked
    }
}

fn about(publication: &Publication) -> Event {
    Event {
        name: Some(publication.name.to_string()),
        owner: Some(publication.owner.to_string()),
        bytes: Some(publication.description.len),
        ..Event::default()
    }
}

/// Returns the event for such a request when it is granted, unless its lease is reported.
fn granted_event(asked: &Event) -> Option<&'static str> {
    match asked.request? {
        "create" => Some("created"),
        "delete" => Some("deleted"),
        _ => None,
    }
}
