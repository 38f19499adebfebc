//! Answers requests.

use std::sync::Arc;
use std::time::Duration;

use super::link::Link;
use super::outcome::{No, Outcome, Step, done, invalid, not_found};
use super::{Allocation, ServerCore, ServerEvent, fetch};
use crate::Refusal;
use crate::account::{self, Account, REQUEST};
use crate::driver::random;
use crate::protocol::{Answer, Ask, Create, Delete, Probe, Probed, Release, check_name};

/// Begins to answer a request. Nothing here blocks.
pub(super) fn begin(inner: &Arc<ServerCore>, link: &Link, ask: Ask) -> Result<Step, No> {
    match ask {
        Ask::Ping => done().map(Step::Now),
        Ask::List(list) => inner.list(link, &list).map(Step::Now),
        Ask::Fetch(ask) => fetch::begin(inner, link, ask),
        Ask::Release(release) => inner.release(link, release).map(Step::Now),
        Ask::Watch(watch) => inner.watch(link, &watch).map(Step::Now),
        Ask::Wait(wait) => inner.wait(link, wait),
        Ask::Probe(probe) => inner.probe(link, probe),
        Ask::Create(create) => inner.create(link, create),
        Ask::Delete(delete) => inner.delete(link, delete),
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
        let name = state
            .name_of(lease.publication)
            .map(|name| name.to_string());
        drop(state);
        self.released.notify_waiters();
        self.counters.count(|counters| &counters.released);
        self.emit(ServerEvent::Released {
            peer: session.peer.clone(),
            name: name.unwrap_or_default(),
            lease: ask.lease,
        });
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
            let delete = allocator.delete(&link.session.peer, &ask.name, longest);
            // The allocator does the waiting; its other work has the time of a request.
            within(longest.saturating_add(inner.limits.request), delete).await?;
            done()
        })
    }
}

/// Waits for the allocator, for this long.
async fn within(limit: Duration, work: Allocation<'_>) -> Result<(), No> {
    let worked = tokio::time::timeout(limit, work).await;
    worked.map_err(|_| (Refusal::TimedOut, String::new()))?
}
