//! Answers requests.

use std::sync::Arc;
use std::time::Duration;

use super::link::Link;
use super::outcome::{Content, No, Outcome, Step, done, invalid, not_found, over};
use super::stats::count;
use super::{ServerCore, ServerEvent, fetch};
use crate::Refusal;
use crate::account::{self, Account, Charge, REQUEST};
use crate::driver::random;
use crate::group::NO_SUCH_ROUND;
use crate::protocol::{
    Answer, Ask, Create, Delete, Empty, Gather, Join, Offer, Operation, Probe, Probed, Release,
    check_name,
};
use crate::transport::HeldFd;

/// Begins to answer a request; fds may have arrived with it, or been `declined`. Nothing here blocks.
pub(super) fn begin(
    inner: &Arc<ServerCore>,
    link: &Link,
    ask: Option<Ask>,
    fds: Vec<HeldFd>,
    declined: Option<String>,
) -> Step {
    let with_fds = matches!(ask, Some(Ask::Offer(_) | Ask::Gather(_)));
    if !with_fds && (declined.is_some() || !fds.is_empty()) {
        return Step::Now(Err((Refusal::Invalid, "fds came with it".into())));
    }
    if let Some(why) = declined {
        return Step::Now(match takes_fds(link) {
            true => Err((Refusal::Limit, why)),
            false => Err((Refusal::NotFound, NO_SUCH_ROUND.into())),
        });
    }
    let Some(ask) = ask else {
        return Step::Now(Err((Refusal::Unsupported, String::new())));
    };
    match ask {
        Ask::Ping(Empty {}) => Step::Now(done()),
        Ask::List(list) => Step::Now(inner.list(link, &list)),
        Ask::Fetch(ask) => fetch::begin(inner, link, ask),
        Ask::Release(release) => Step::Now(inner.release(link, release)),
        Ask::Watch(watch) => Step::Now(inner.watch(link, &watch)),
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
        Ask::Redeem(redeem) if link.local => {
            let inner = Arc::clone(inner);
            let link = link.clone();
            Step::later(async move {
                let at = (&link.fds, link.session.account());
                (inner.redeem(
                    &link.session.peer,
                    link.process.as_ref(),
                    at,
                    &redeem.ticket,
                ))
                .await
            })
        }
        _ => Step::Now(Err((Refusal::Unsupported, String::new()))),
    }
}

/// Returns whether a frame of the session may carry fds: a rank of a group that has gathered offers some, or
/// gathers again.
pub(super) fn takes_fds(link: &Link) -> bool {
    link.session.is_kept()
}

/// Returns the request to enter a gather, without what the rank gives.
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
        self.audit_lease(&state, "released", &lease);
        let publication = state.publications.get(&lease.publication);
        let name = publication.map(|found| Arc::clone(&found.publication.name));
        drop(state);
        self.released.notify_waiters();
        count(&self.counters.released);
        self.emit(ServerEvent::Released {
            peer: session.peer.clone(),
            name: name.map_or_else(String::new, |name| name.to_string()),
            lease: ask.lease,
        });
        done()
    }

    fn probe(self: &Arc<Self>, link: &Link, ask: Probe) -> Step {
        let state = self.state();
        let Some(lease) = state.leases.get(link.session.id, ask.lease) else {
            return Step::Now(Err(not_found()));
        };
        let Some(place) = lease.probe else {
            return Step::Now(Err((
                Refusal::Invalid,
                "it has no place for a probe".into(),
            )));
        };
        let Some(found) = state.publications.get(&lease.publication) else {
            return Step::Now(Err(not_found()));
        };
        let publication = Arc::clone(&found.publication);
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
        let charge = account.charge(REQUEST).map_err(over)?;
        self.charged_call(charge, call).await
    }

    /// As [`driver_call`](Self::driver_call), with an existing charge.
    pub(super) async fn charged_call<T: Send + 'static>(
        &self,
        charge: Charge,
        call: impl FnOnce() -> crate::Result<T> + Send + 'static,
    ) -> Result<T, No> {
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

    fn join(self: &Arc<Self>, link: &Link, ask: Join) -> Step {
        // For the rank, while it is in the group.
        let kept = account::join(&ask);
        let charge = match link.session.account().charge(kept) {
            Ok(charge) => Arc::new(charge),
            Err(reached) => return Step::Now(Err(over(reached))),
        };
        let (inner, link) = (Arc::clone(self), link.clone());
        Step::later(async move {
            let session = &link.session;
            let (peer, charge) = (&session.peer, Some(charge));
            let joined = (inner.groups).join(session.id, peer, link.boot, link.local, ask, charge);
            let answer = joined.await;
            if matches!(answer, Answer::Agreed(_)) {
                // The rank's memory is in use while the session lasts, with or without leases.
                session.keep();
            }
            Ok(answer.into())
        })
    }

    fn offer(self: &Arc<Self>, link: &Link, ask: Offer, fds: Vec<HeldFd>) -> Step {
        let (inner, session) = (Arc::clone(self), link.session.id);
        Step::later(async move {
            // Even if the answer is no longer awaited.
            let _look = LookAfter(&inner);
            match inner.groups.offer(session, ask, fds).await {
                Ok(page) => Ok(Content::Members(page)),
                Err(answer) => Ok(answer.into()),
            }
        })
    }

    fn gather(self: &Arc<Self>, link: &Link, ask: Gather, fds: Vec<HeldFd>) -> Step {
        // For what the rank gives, until the group does not keep it any more.
        let charge = match link.session.account().charge(account::gather(&ask)) {
            Ok(charge) => charge,
            Err(reached) => return Step::Now(Err(over(reached))),
        };
        let (inner, session) = (Arc::clone(self), link.session.id);
        Step::later(async move {
            // Also if nobody waits for the answer any more.
            let _look = LookAfter(&inner);
            let told = inner.groups.gather(session, ask, fds, Some(charge)).await;
            match told {
                Ok(page) => Ok(Content::Members(page)),
                Err(answer) => Ok(answer.into()),
            }
        })
    }

    /// Answers a rank that was refused its entry into a gather because of a limit: the gather fails for all
    /// ranks, which would wait for this one.
    pub(super) fn refuse_gather(&self, link: &Link, ask: &Gather, limit: String) -> Outcome {
        match self.groups.refuse_gather(link.session.id, ask, limit) {
            Ok(answer) => Ok(answer.into()),
            Err(page) => Ok(Content::Members(page)),
        }
    }

    fn create(self: &Arc<Self>, link: &Link, ask: Create) -> Step {
        let allocator = match self.allocator() {
            Ok(allocator) => allocator,
            Err(no) => return Step::Now(Err(no)),
        };
        if let Err(error) = check_name(&ask.name) {
            return Step::Now(Err(invalid(error)));
        }
        if let Err(no) = allocator.may_create(&link.session.peer, &ask.name) {
            return Step::Now(Err(no));
        }
        let (inner, link) = (Arc::clone(self), link.clone());
        Step::later(async move {
            let peer = &link.session.peer;
            // For the allocator's copy of the request. The name is charged when it is published, which may
            // happen after this future was dropped.
            let kept = account::create(&ask);
            let _charge = link.session.account().charge(kept).map_err(over)?;
            let create = allocator.create(peer, &ask);
            (tokio::time::timeout(inner.limits.wait, create).await)
                .map_err(|_| (Refusal::TimedOut, String::new()))??;
            let state = inner.state();
            let found = state.visible(&ask.name, peer).ok_or_else(not_found)?;
            Ok(Content::Name(Arc::clone(&found.publication)))
        })
    }

    fn delete(self: &Arc<Self>, link: &Link, ask: Delete) -> Step {
        let allocator = match self.allocator() {
            Ok(allocator) => allocator,
            Err(no) => return Step::Now(Err(no)),
        };
        if let Err(error) = check_name(&ask.name) {
            return Step::Now(Err(invalid(error)));
        }
        let longest = Duration::from_millis(ask.ms).min(self.limits.wait);
        let (inner, link) = (Arc::clone(self), link.clone());
        Step::later(async move {
            let delete = allocator.delete(&link.session.peer, &ask.name, longest);
            // The allocator does the waiting; its other work has the time of a request.
            let most = longest.saturating_add(inner.limits.request);
            (tokio::time::timeout(most, delete).await)
                .map_err(|_| (Refusal::TimedOut, String::new()))??;
            done()
        })
    }
}
