//! Answers requests.

use std::sync::Arc;
use std::time::Duration;

use super::link::Link;
use super::outcome::{Content, No, Outcome, Step, done, invalid, not_found};
use super::{Allocation, ServerCore, ServerEvent, fetch};
use crate::Refusal;
use crate::account::{self, Account, REQUEST};
use crate::driver::random;
use crate::group::NO_SUCH_ROUND;
use crate::protocol::{
    Answer, Ask, Create, Delete, Gather, Join, Offer, Operation, Probe, Probed, Release, check_name,
};
use crate::transport::HeldFd;

/// Begins to answer a request; fds may have arrived with it, or been `declined`. Nothing here blocks.
pub(super) fn begin(
    inner: &Arc<ServerCore>,
    link: &Link,
    ask: Ask,
    fds: Vec<HeldFd>,
    declined: Option<String>,
) -> Result<Step, No> {
    let with_fds = matches!(ask, Ask::Offer(_) | Ask::Gather(_));
    if !with_fds && (declined.is_some() || !fds.is_empty()) {
        return Err((Refusal::Invalid, "fds came with it".into()));
    }
    if let Some(why) = declined {
        return Err(match takes_fds(link) {
            true => (Refusal::Limit, why),
            false => (Refusal::NotFound, NO_SUCH_ROUND.into()),
        });
    }
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
        Ask::Join(join) => inner.join(link, join),
        Ask::Offer(offer) => inner.offer(link, offer, fds),
        Ask::Gather(gather) => inner.gather(link, gather, fds),
        Ask::Leave(leave) => {
            let (inner, session) = (Arc::clone(inner), link.session.id);
            Step::later(async move { Ok(inner.groups.leave(session, leave).await.into()) })
        }
    }
}

/// Returns whether a frame of the session may carry fds: a rank of a group that has gathered offers some, or
/// gathers again.
pub(super) fn takes_fds(link: &Link) -> bool {
    link.session.is_kept()
}

/// Returns the request to enter a gather, without the rank's contribution.
pub(super) fn entering(ask: &Ask) -> Option<Gather> {
    match ask {
        Ask::Gather(ask) if ask.first.is_none() => Some(Gather {
            group: ask.group.clone(),
            operation: Operation::Barrier,
            ..*ask
        }),
        _ => None,
    }
}

/// Makes the janitor check its deadlines, when dropped.
struct LookAfter<'a>(&'a ServerCore);

impl Drop for LookAfter<'_> {
    fn drop(&mut self) {
        self.0.janitor.notify_one();
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

    fn join(self: &Arc<Self>, link: &Link, ask: Join) -> Result<Step, No> {
        // For the rank, while it is in the group.
        let charge = Arc::new(link.session.account().charge(account::join(&ask))?);
        let (inner, link) = (Arc::clone(self), link.clone());
        Step::later(async move {
            let session = &link.session;
            let (peer, charge) = (&session.peer, Some(charge));
            let fds = (link.local, link.queues);
            let joined = (inner.groups).join(session.id, peer, link.boot, fds, ask, charge);
            let answer = joined.await;
            if matches!(answer, Answer::Agreed(_)) {
                // The rank's memory is in use while the session lasts, with or without leases.
                session.keep();
            }
            Ok(answer.into())
        })
    }

    fn offer(self: &Arc<Self>, link: &Link, ask: Offer, fds: Vec<HeldFd>) -> Result<Step, No> {
        let (inner, session) = (Arc::clone(self), link.session.id);
        Step::later(async move {
            // Even if the answer is no longer awaited.
            let _look = LookAfter(&inner);
            let offered = inner.groups.offer(session, ask, fds).await;
            Ok(offered.map_or_else(Content::from, Content::Members))
        })
    }

    fn gather(self: &Arc<Self>, link: &Link, ask: Gather, fds: Vec<HeldFd>) -> Result<Step, No> {
        // For the rank's contribution, as long as the group keeps it.
        let charge = link.session.account().charge(account::gather(&ask))?;
        let (inner, session) = (Arc::clone(self), link.session.id);
        Step::later(async move {
            // Even if the answer is no longer awaited.
            let _look = LookAfter(&inner);
            let gathered = inner.groups.gather(session, ask, fds, Some(charge)).await;
            Ok(gathered.map_or_else(Content::from, Content::Members))
        })
    }

    /// Answers a rank that was refused its entry into a gather because of a limit: the gather fails for all
    /// ranks, which would wait for this one.
    pub(super) fn refuse_gather(&self, link: &Link, ask: &Gather, limit: String) -> Outcome {
        let refused = self.groups.refuse_gather(link.session.id, ask, limit);
        Ok(refused.map_or_else(Content::Members, Content::from))
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
