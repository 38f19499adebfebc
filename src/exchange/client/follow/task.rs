//! The task behind a follow: tracks the state of the name and offers it to the caller.

mod failures;

use std::sync::Arc;

use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, sleep_until};

use super::decide::{Due, Seen, due};
use super::followed::Absence;
use super::generation::{Generation, Listed};
use super::slot::{Offer, Offered, Returned, Slot, Told, View};
use crate::client::greet::is_final;
use crate::client::session::{ClientSession, Notified};
use crate::client::{Client, FetchOptions, LeaseState, open};
use crate::protocol::{Answer, Ask, Entry, Watch};
use crate::{Error, Refusal, Result};
use failures::Failures;

struct Follower {
    client: Client,
    fetch: FetchOptions,
    slot: Arc<Slot>,
    notices: broadcast::Receiver<Notified>,
    /// Why the server is considered gone.
    gone: watch::Receiver<Option<Error>>,
    /// Why the server no longer admits this client.
    barred: watch::Receiver<Option<Error>>,
    seen: Seen,
    /// Whether to ask the server for the name's state.
    stale: bool,
    /// When to ask again, if the server lets this session watch no more names.
    poll_at: Option<Instant>,
    /// After a failure: no request and no fetch before this time.
    not_before: Option<Instant>,
    /// The newest entry of the name.
    last: Option<Listed>,
    /// Why this client cannot fetch the memory of that entry. Only another entry is fetched.
    rejected: Option<Error>,
    /// Fetches of that entry that failed.
    fetches: Failures,
    /// Requests for the entry that failed since the last one that succeeded.
    looks: Failures,
    /// Fetches since the last offer that returned other memory than the entry says.
    unmatched: u32,
    /// Entries that were requested without a watch.
    polls: u32,
    /// The number of notices about the name received so far.
    heard: u64,
    /// The last seen lease state of the returned memory.
    lease: LeaseState,
}

/// Runs the follow until it ends, and returns why. No offer remains.
pub(super) async fn run(fetch: FetchOptions, slot: Arc<Slot>) -> Error {
    let slot = Clearing(slot);
    let Err(why) = Follower::new(fetch, Arc::clone(&slot.0)).follow().await;
    why
}

/// Drops the offer when the task ends, also if it panics or is cut off: otherwise the memory would stay leased until
/// the caller's next call.
struct Clearing(Arc<Slot>);

impl Drop for Clearing {
    fn drop(&mut self) {
        self.0.clear();
    }
}

impl Follower {
    fn new(fetch: FetchOptions, slot: Arc<Slot>) -> Self {
        let client = fetch.client.clone();
        let session = client.session();
        Self {
            // Subscribed before the first look, so that no change is missed.
            notices: session.notices(),
            gone: session.gone.subscribe(),
            barred: session.barred.subscribe(),
            client,
            fetch,
            slot,
            seen: Seen::Unknown,
            stale: true,
            poll_at: None,
            not_before: None,
            last: None,
            rejected: None,
            fetches: Failures::default(),
            looks: Failures::default(),
            unmatched: 0,
            polls: 0,
            heard: 0,
            lease: LeaseState::Held,
        }
    }

    async fn follow(mut self) -> Result<std::convert::Infallible> {
        loop {
            self.catch_up()?;
            self.look_at_leases()?;
            let view = self.slot.view();
            let due = due(&self.seen, &view);
            let may_ask = self.not_before.is_none_or(|at| at <= Instant::now());
            match due {
                Due::Retract => discard(self.slot.retract()).await,
                Due::Gone => {
                    if let Seen::Absent(absence) = &self.seen {
                        discard(self.slot.put(Offer::Gone(absence.clone()))).await;
                    }
                }
                _ if self.stale && may_ask => self.look().await?,
                Due::Fetch if !self.stale && may_ask => self.fetch().await?,
                Due::Fetch | Due::Nothing => self.rest(&view).await?,
            }
        }
    }

    fn session(&self) -> &Arc<ClientSession> {
        self.client.session()
    }

    /// Processes all notices received so far.
    fn catch_up(&mut self) -> Result<()> {
        loop {
            let news = match self.notices.try_recv() {
                Ok(news) => Ok(news),
                Err(TryRecvError::Empty) => return self.see_server(),
                Err(TryRecvError::Lagged(count)) => Err(RecvError::Lagged(count)),
                Err(TryRecvError::Closed) => Err(RecvError::Closed),
            };
            self.hear(news)?;
        }
    }

    fn hear(&mut self, news: Result<Notified, RecvError>) -> Result<()> {
        match news {
            Ok(Notified::Published(entry)) if entry.name == self.fetch.name => {
                self.heard += 1;
                self.denotes(&entry);
            }
            Ok(Notified::Gone(name)) if *name == *self.fetch.name => {
                self.heard += 1;
                self.denotes_nothing();
            }
            // The new connection watches no names yet.
            Ok(Notified::Fresh) | Err(RecvError::Lagged(_)) => {
                self.stale = true;
                self.not_before = None;
                self.rejected = None;
            }
            Ok(Notified::Over) | Err(RecvError::Closed) => return Err(self.session().down()),
            Ok(_) => {}
        }
        Ok(())
    }

    fn denotes(&mut self, entry: &Entry) {
        let listed = Listed::of(entry);
        let generation = listed.generation.clone();
        if self.last.as_ref() != Some(&listed) {
            self.last = Some(listed);
            self.rejected = None;
            self.not_before = None;
            self.fetches = Failures::default();
            self.polls = 0;
        }
        self.seen = match &self.rejected {
            Some(why) => Seen::Absent(Absence::Unavailable(why.clone())),
            None => Seen::Present(generation),
        };
    }

    fn denotes_nothing(&mut self) {
        self.rejected = None;
        self.seen = Seen::Absent(Absence::NotThere);
    }

    /// Checks whether the server is gone, or no longer admits this client.
    fn see_server(&mut self) -> Result<()> {
        let barred = self.barred.borrow_and_update().clone();
        let gone = self.gone.borrow_and_update().clone();
        match barred.or(gone) {
            Some(why) if is_final(&why) => Err(why),
            Some(why) => {
                // `Fresh` announces the next connection.
                self.stale = false;
                self.seen = Seen::Absent(Absence::Away(why));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Tells a waiting caller that the exporter wants the returned memory back, or no longer keeps it.
    fn look_at_leases(&mut self) -> Result<()> {
        let view = self.slot.view();
        let Some(returned) = &view.returned else {
            return Ok(());
        };
        let state = returned.state();
        if let LeaseState::Lost(why) = &state
            && is_final(why)
        {
            return Err(why.clone());
        }
        let changed = std::mem::replace(&mut self.lease, state.clone()) != state;
        let tells = view.wanted && matches!(view.told, Told::Memory);
        // Its replacement may be offered already.
        let tells = tells && matches!(view.offered, Offered::Nothing);
        if changed && state != LeaseState::Held && tells {
            drop(self.slot.put(Offer::Gone(Absence::Lease(state))));
        }
        Ok(())
    }

    /// Waits until a next step may be due.
    async fn rest(&mut self, view: &View) -> Result<()> {
        let returned = lease_changes(view.returned.as_ref().map(|lease| (lease, &self.lease)));
        let offered = offered_lease(view).map(|lease| (lease, &LeaseState::Held));
        let waits = self.stale || due(&self.seen, view) == Due::Fetch;
        let until = self.not_before.filter(|_| waits);
        tokio::select! {
            news = self.notices.recv() => self.hear(news)?,
            Ok(()) = self.gone.changed() => {}
            Ok(()) = self.barred.changed() => {}
            () = self.slot.asked.notified() => {}
            () = returned => {}
            () = lease_changes(offered) => {}
            () = at(until) => self.not_before = None,
            () = at(self.poll_at) => {
                self.poll_at = None;
                self.stale = true;
            }
        }
        Ok(())
    }

    /// Asks the server for the name's state, and to be notified of changes.
    async fn look(&mut self) -> Result<()> {
        let name = self.fetch.name.clone();
        let client = self.client.clone();
        let work = async {
            let ask = Ask::Watch(Watch {
                prefix: name.clone(),
            });
            match client.again(ask, client.patience()).await {
                Ok(Answer::Names(names)) => {
                    // Entries are sorted, so the name itself comes before all longer names with this prefix.
                    let first = names.entries.into_iter().next();
                    Ok((first.filter(|entry| entry.name == name), true))
                }
                Ok(_) => Err(client.broken("unexpected answer to a watch")),
                Err(error) if error.refusal() == Some(&Refusal::Limit) => {
                    Ok((client.entry(&name).await?, false))
                }
                Err(error) => Err(error),
            }
        };
        let heard = self.heard;
        let Some(looked) = self.unless_gone(work).await? else {
            return Ok(());
        };
        let (entry, watched) = match looked {
            Ok(looked) => looked,
            Err(error) => return self.look_failed(error),
        };
        self.looks = Failures::default();
        self.stale = false;
        match entry {
            Some(entry) => self.denotes(&entry),
            None => self.denotes_nothing(),
        }
        self.poll_at = (!watched).then(|| self.pause_after(self.polls));
        self.polls = self.polls.saturating_add(1);
        self.catch_up()?;
        // Notices that crossed the answer may be older or newer than it, so ask again.
        self.stale |= self.heard != heard;
        Ok(())
    }

    /// Fetches the name's memory, and offers it if the name still has that memory afterwards.
    async fn fetch(&mut self) -> Result<()> {
        let work = Box::pin(self.fetch.clone().go());
        let Some(fetched) = self.unless_gone(work).await? else {
            return Ok(());
        };
        let memory = match fetched {
            Ok(memory) => memory,
            Err(error) => return self.fetch_failed(error),
        };
        self.catch_up()?;
        let generation = Generation::of(memory.description());
        let denoted = matches!(&self.seen, Seen::Present(seen) if *seen == generation);
        if !denoted || memory.state() != LeaseState::Held {
            open::discard(memory).await;
            self.not_as_listed(denoted);
            return Ok(());
        }
        (self.fetches, self.unmatched) = (Failures::default(), 0);
        discard(self.slot.put(Offer::Memory(Box::new(memory), generation))).await;
        Ok(())
    }

    /// Runs `work` until it is done, or returns `None` when the server is gone. Meanwhile it tells a waiting
    /// caller about changes to the lease that the caller holds, and releases offered memory that the exporter
    /// wants back.
    async fn unless_gone<T>(&mut self, work: impl Future<Output = T>) -> Result<Option<T>> {
        tokio::pin!(work);
        loop {
            self.look_at_leases()?;
            let view = self.slot.view();
            let returned = view.returned.as_ref().map(|lease| (lease, &self.lease));
            let offered = offered_lease(&view);
            if offered.is_some_and(|lease| !lease.is_held()) {
                self.slot.clear();
                continue;
            }
            let offered = offered.map(|lease| (lease, &LeaseState::Held));
            tokio::select! {
                biased;
                done = &mut work => return Ok(Some(done)),
                Ok(()) = self.gone.changed() => {}
                Ok(()) = self.barred.changed() => {}
                () = lease_changes(returned) => continue,
                () = lease_changes(offered) => continue,
            }
            self.see_server()?;
            if matches!(self.seen, Seen::Absent(Absence::Away(_))) {
                return Ok(None);
            }
        }
    }
}

/// Drops an offer. Memory is unmapped on a blocking thread.
async fn discard(offer: Option<Offer>) {
    if let Some(Offer::Memory(memory, _)) = offer {
        open::discard(memory).await;
    }
}

async fn at(when: Option<Instant>) {
    match when {
        Some(when) => sleep_until(when).await,
        None => std::future::pending().await,
    }
}

/// The lease of offered memory.
const fn offered_lease(view: &View) -> Option<&Returned> {
    match &view.offered {
        Offered::Memory(lease) => Some(lease),
        _ => None,
    }
}

fn lease_changes(lease: Option<(&Returned, &LeaseState)>) -> impl Future<Output = ()> + use<> {
    let lease = lease.map(|(lease, seen)| (lease.clone(), seen.clone()));
    async move {
        match lease {
            Some((lease, seen)) => lease.changed(seen).await,
            None => std::future::pending().await,
        }
    }
}
