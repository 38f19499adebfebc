//! Answers requests.

use std::sync::Arc;
use std::time::Duration;

use super::audit::audit;
use super::link::Link;
use super::outcome::{No, Outcome, Step, done, invalid, not_found};
use super::{Allocation, ServerCore, fetch};
use crate::Refusal;
use crate::account::{self, Account, REQUEST};
use crate::driver::random;
use crate::protocol::{Answer, Ask, Create, Delete, MAX_NAME, Probe, Probed, Release, check_name};
use crate::text::bounded;

/// Begins to answer a request. Nothing here blocks.
pub(super) fn begin(inner: &Arc<ServerCore>, link: &Link, ask: Ask) -> Result<Step, No> {
    match ask {
        Ask::Ping => done().map(Step::Now),
        Ask::List(list) => inner.list(link, &list).map(Step::Now),
        Ask::Fetch(ask) => fetch::begin(inner, link, ask),
        Ask::Held(held) => inner.held(link, &held.leases).map(Step::Now),
        Ask::Release(release) => inner.release(link, release).map(Step::Now),
        Ask::Watch(watch) => inner.watch(link, &watch).map(Step::Now),
        Ask::Wait(wait) => inner.wait(link, wait),
        Ask::Probe(probe) => inner.probe(link, probe),
        Ask::Create(create) => inner.create(link, create),
        Ask::Delete(delete) => inner.delete(link, delete),
    }
}

/// Returns a request's name in the protocol, and the name of the memory that it is about. That name
/// is not checked yet here, so this escapes and cuts it.
pub(super) fn subject(ask: &Ask) -> (&'static str, Option<String>) {
    let (request, name) = match ask {
        Ask::Ping => ("ping", None),
        Ask::List(_) => ("list", None),
        Ask::Watch(_) => ("watch", None),
        Ask::Held(_) => ("held", None),
        Ask::Release(_) => ("release", None),
        Ask::Probe(_) => ("probe", None),
        Ask::Wait(ask) => ("wait", Some(&ask.name)),
        Ask::Fetch(ask) => ("fetch", Some(&ask.name)),
        Ask::Create(ask) => ("create", Some(&ask.name)),
        Ask::Delete(ask) => ("delete", Some(&ask.name)),
    };
    (request, name.map(|name| bounded(name, MAX_NAME)))
}

/// The audit event of a deletion. A deletion goes on if its connection ends before the answer.
struct Deletion<'a> {
    inner: &'a ServerCore,
    link: &'a Link,
    name: &'a str,
    bytes: Option<u64>,
    event: Option<&'static str>,
}

impl Drop for Deletion<'_> {
    fn drop(&mut self) {
        let Some(event) = self.event else {
            return;
        };
        let (link, name, bytes) = (self.link, self.name, self.bytes);
        audit!(
            self.inner.audit,
            Memory,
            Some(&link.session.peer),
            event,
            session = link.session.id,
            pid = link.pid(),
            name,
            bytes,
        );
    }
}

impl ServerCore {
    fn release(&self, link: &Link, ask: Release) -> Outcome {
        let session = &link.session;
        let mut state = self.state();
        let lease = state.leases.release(session.id, &session.peer, ask.lease);
        let lease = lease.ok_or_else(not_found)?;
        state.returned(&lease);
        state.audit_lease("released", &lease);
        drop(state);
        self.released.notify_waiters();
        self.counters.count(|counters| &counters.released);
        done()
    }

    fn probe(self: &Arc<Self>, link: &Link, ask: Probe) -> Result<Step, No> {
        let state = self.state();
        let lease = state.leases.get(link.session.id, ask.lease);
        let lease = lease.ok_or_else(not_found)?;
        let no_place = || (Refusal::Invalid, "it has no place for a probe".into());
        let place = lease.probe.ok_or_else(no_place)?;
        let found = state.publications.get(&lease.publication);
        let publication = Arc::clone(&found.ok_or_else(not_found)?.publication);
        drop(state);
        let (inner, account) = (Arc::clone(self), Arc::clone(link.session.account()));
        Step::later(async move {
            let probe = move || {
                let shared = publication.shared()?;
                let found = shared.word(place)?;
                let word = random().map_err(|e| crate::Error::system("random bytes", &e))?;
                let wrote = u64::from_ne_bytes(word);
                shared.put_word(place, wrote)?;
                Ok(Probed { found, wrote })
            };
            let probed = inner.driver_call(&account, probe).await?;
            Ok(Answer::Probed(probed).into())
        })
    }

    /// Runs driver calls off the runtime, for at most the time of a request. The peer is charged until they
    /// return, which may be later.
    pub(super) async fn driver_call<T: Send + 'static>(
        &self,
        account: &Arc<Account>,
        call: impl FnOnce() -> crate::Result<T> + Send + 'static,
    ) -> Result<T, No> {
        let charge = account.charge(REQUEST)?;
        let call = move || {
            let result = call();
            drop(charge);
            result
        };
        let work = self.tasks.spawn_blocking(call);
        match tokio::time::timeout(self.limits.request, work).await {
            Ok(Ok(Ok(result))) => Ok(result),
            Ok(Ok(Err(error))) => Err((Refusal::Internal, error.to_string())),
            Ok(Err(_)) => Err((Refusal::Internal, "a driver call panicked".into())),
            Err(_) => Err((Refusal::TimedOut, "a driver call does not return".into())),
        }
    }

    fn create(self: &Arc<Self>, link: &Link, ask: Create) -> Result<Step, No> {
        let allocator = self.allocator()?;
        check_name(&ask.name).map_err(invalid)?;
        allocator.may_create(&link.session.peer, &ask.name)?;
        let (inner, link) = (Arc::clone(self), link.clone());
        Step::later(async move {
            let peer = &link.session.peer;
            // For the allocator's copy of the request. The name is charged when it is published, which may
            // happen after this future was dropped.
            let _charge = link.session.account().charge(account::create(&ask))?;
            let create = allocator.create(peer, &ask);
            within(inner.limits.wait, create).await?;
            let (session, name, bytes) = (link.session.id, &*ask.name, ask.bytes);
            audit!(
                inner.audit,
                Memory,
                Some(peer),
                "created",
                session,
                pid = link.pid(),
                name,
                bytes,
            );
            let state = inner.state();
            let found = state.visible(&ask.name, peer).ok_or_else(not_found)?;
            Ok(inner.entry(&found.publication))
        })
    }

    fn delete(self: &Arc<Self>, link: &Link, ask: Delete) -> Result<Step, No> {
        let allocator = self.allocator()?;
        check_name(&ask.name).map_err(invalid)?;
        let longest = Duration::from_millis(ask.ms).min(self.limits.wait);
        let (inner, link) = (Arc::clone(self), link.clone());
        Step::later(async move {
            let mut deletion = Deletion {
                inner: &inner,
                link: &link,
                name: &ask.name,
                bytes: inner.state().bytes_of(&ask.name),
                event: Some("delete_abandoned"),
            };
            let delete = allocator.delete(&link.session.peer, &ask.name, longest);
            // The allocator does the waiting; its other work has the time of a request.
            let deleted = within(longest.saturating_add(inner.limits.request), delete).await;
            // A refusal is an event of its own.
            deletion.event = deleted.is_ok().then_some("deleted");
            deleted?;
            done()
        })
    }
}

/// Waits for the allocator, for this long.
async fn within(limit: Duration, work: Allocation<'_>) -> Result<(), No> {
    let worked = tokio::time::timeout(limit, work).await;
    worked.map_err(|_| (Refusal::TimedOut, String::new()))?
}
