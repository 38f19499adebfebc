//! The coordinator of a server's groups: adds a clock and waiting futures to the rounds.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::identity::Keys;
use super::rights::Rights;
use super::roster::Roster;
use super::round::Asker;
pub(crate) use super::round::Rules;
use super::rounds::Rounds;
use super::told::{Told, Waiter, refused};
use crate::account::{Charge, shrink};
use crate::per_driver::lock;
use crate::protocol::{Admission, Answer, Event, Gather, Join, Leave, Offer, Refused};
use crate::share::BootId;
use crate::transport::HeldFd;
use crate::{PeerName, Refusal};

/// Sends a notice to a session. It must not block or call back.
type Notify = Box<dyn Fn(u64, Event) + Send + Sync>;

/// A server's groups. Clones share the same state.
///
/// The server calls [`gone`](Self::gone) for every session that ends. A dropped future, as after a broken
/// connection, counts as not asked: a rank that was gathering is out, and one that was offering may offer
/// again.
#[derive(Clone)]
pub(crate) struct Groups(Arc<Coordinator>);

struct Coordinator {
    begun: Instant,
    state: Mutex<CoordinatorState>,
    notify: Notify,
}

struct CoordinatorState {
    rounds: Rounds,
    waiters: HashMap<Waiter, oneshot::Sender<Told>>,
    last: Waiter,
}

/// A page of members, ready for a reply.
pub(crate) struct MembersPage {
    roster: Arc<Roster>,
    page: usize,
}

impl MembersPage {
    /// Returns the whole encoded reply to request `id`: secret bytes.
    pub fn reply(&self, id: u64) -> Zeroizing<Vec<u8>> {
        self.roster.reply(self.page, id)
    }

    /// Returns the fds that are sent with the frame.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.roster.fds(self.page)
    }
}

impl fmt::Debug for MembersPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MembersPage")
            .field("page", &self.page)
            .finish_non_exhaustive()
    }
}

impl Groups {
    /// Creates an empty set of groups for peers with these rights. `notify` sends a notice to a session; it
    /// must not block or call back.
    pub fn new(
        rules: Rules,
        rights: Rights,
        keys: Keys,
        notify: impl Fn(u64, Event) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Coordinator {
            begun: Instant::now(),
            state: Mutex::new(CoordinatorState {
                rounds: Rounds::new(rules, rights, keys),
                waiters: HashMap::new(),
                last: 0,
            }),
            notify: Box::new(notify),
        }))
    }

    /// Replaces the rights. Ranks of peers that have lost theirs leave the rounds that are not complete.
    pub fn set_rights(&self, rights: Rights) {
        self.change(|rounds, now| rounds.set_rights(now, rights));
    }

    /// Reserves room for this group: the limit on all groups does not count it.
    ///
    /// # Errors
    ///
    /// A refusal if the peer has no right, or the admission does not admit the peer itself.
    pub fn keep_room(
        &self,
        peer: &PeerName,
        group: &str,
        admission: &Admission,
    ) -> Result<(), Refused> {
        let mut state = self.lock();
        let identity = state.rounds.may_join(peer, group, admission)?;
        state.rounds.own = Some(identity);
        Ok(())
    }

    /// Adds a rank. Returns [`Answer::Agreed`] when all ranks have joined, [`Answer::Incomplete`] if they do
    /// not, or [`Answer::Refused`]. `local` says whether the connection can carry fds. The charge covers the
    /// rank's state, and is dropped with its seat.
    ///
    /// # Cancel safety
    ///
    /// A rank whose future is dropped has not joined.
    pub async fn join(
        &self,
        session: u64,
        peer: &PeerName,
        boot: BootId,
        (local, queues): (bool, bool),
        ask: Join,
        charge: Option<Arc<Charge>>,
    ) -> Answer {
        let asker = Asker {
            session,
            peer: peer.clone(),
            boot,
            local,
            queues,
            charge,
        };
        let told = self
            .ask(ask.ms, |rounds, now, waiter| {
                rounds.join(now, waiter, asker, ask)
            })
            .await;
        answer(told).unwrap_or_else(|_| internal())
    }

    /// Takes a rank's handles, and returns the members when all ranks have offered theirs. Later pages are
    /// available at once.
    ///
    /// # Errors
    ///
    /// The answer to send instead: [`Answer::Incomplete`], the same to all ranks, or [`Answer::Refused`].
    ///
    /// # Cancel safety
    ///
    /// A rank whose future is dropped has offered; it may ask once more.
    pub async fn offer(
        &self,
        session: u64,
        ask: Offer,
        fds: Vec<HeldFd>,
    ) -> Result<MembersPage, Answer> {
        let told = self
            .ask(0, |rounds, now, waiter| {
                rounds.offer(now, waiter, session, ask, fds)
            })
            .await;
        match answer(told) {
            Ok(other) => Err(other),
            Err(page) => Ok(page),
        }
    }

    /// Lets a rank enter a gather. When all ranks have entered, returns [`Answer::Done`] for a barrier, and
    /// [`Answer::Agreed`] or members for other gathers. The charge covers the rank's contribution, and is
    /// dropped with it.
    ///
    /// # Errors
    ///
    /// The answer to send instead of members.
    ///
    /// # Cancel safety
    ///
    /// A rank whose future is dropped has entered; it may ask once more.
    pub async fn gather(
        &self,
        session: u64,
        ask: Gather,
        fds: Vec<HeldFd>,
        charge: Option<Charge>,
    ) -> Result<MembersPage, Answer> {
        let told = self
            .ask(ask.ms, |rounds, now, waiter| {
                rounds.gather(now, waiter, session, ask, fds, charge)
            })
            .await;
        match answer(told) {
            Ok(other) => Err(other),
            Err(page) => Ok(page),
        }
    }

    /// Fails the gather that a rank asks to enter, because of a limit. All ranks get the same answer.
    ///
    /// # Errors
    /// Members instead, if the rank asks again for a gather that has completed.
    pub fn refuse_gather(
        &self,
        session: u64,
        ask: &Gather,
        limit: String,
    ) -> Result<Answer, MembersPage> {
        answer(self.change(|rounds, now| rounds.refuse_gather(now, session, ask, limit)))
    }

    /// Lets a rank leave. Returns [`Answer::Done`] when all ranks have left.
    ///
    /// # Cancel safety
    ///
    /// A rank whose future is dropped has left.
    pub async fn leave(&self, session: u64, ask: Leave) -> Answer {
        let told = self
            .ask(ask.ms, |rounds, now, waiter| {
                rounds.leave(now, waiter, session, ask)
            })
            .await;
        answer(told).unwrap_or_else(|_| internal())
    }

    /// Records that a session has ended and cannot be resumed.
    pub fn gone(&self, session: u64) {
        self.change(|rounds, now| rounds.gone(now, session));
    }

    /// Returns when to call [`tick`](Self::tick) if no request arrives before.
    pub fn deadline(&self) -> Option<Instant> {
        let at = self.lock().rounds.deadline()?;
        self.0.begun.checked_add(at)
    }

    /// Ends waits and rounds that have timed out. Waiting ranks check the time themselves, but there may be no
    /// waiting rank.
    pub fn tick(&self) {
        self.change(|rounds, now| rounds.tick(now));
    }

    /// Returns the number of rounds, both gathering and in use.
    pub fn len(&self) -> usize {
        self.lock().rounds.len()
    }

    /// Asks the rounds, and waits for the answer; `ms` is the time until the first look at the clock.
    async fn ask(&self, ms: u64, ask: impl FnOnce(&mut Rounds, Duration, Waiter)) -> Told {
        let (sender, mut told) = oneshot::channel();
        let mut waiter = 0;
        self.change_state(|state, now| {
            state.last += 1;
            waiter = state.last;
            state.waiters.insert(waiter, sender);
            ask(&mut state.rounds, now, waiter);
        });
        let _waiting = CancelOnDrop {
            groups: self,
            waiter,
        };
        let mut wait = Duration::from_millis(ms);
        loop {
            // Each waiting rank wakes to check the time, because no one else may.
            match tokio::time::timeout(wait, &mut told).await {
                Ok(Ok(told)) => return told,
                Ok(Err(_)) => return Told::Refused(refused(Refusal::Internal, "")),
                Err(_) => wait = self.change(|rounds, now| rounds.next_tick(now, waiter)),
            }
        }
    }

    /// Changes the rounds, then sends the answers and notices that result.
    fn change<T>(&self, change: impl FnOnce(&mut Rounds, Duration) -> T) -> T {
        self.change_state(|state, now| change(&mut state.rounds, now))
    }

    fn change_state<T>(&self, change: impl FnOnce(&mut CoordinatorState, Duration) -> T) -> T {
        let now = self.0.begun.elapsed();
        let mut state = self.lock();
        let result = change(&mut state, now);
        let (told, news) = state.rounds.take();
        for (waiter, told) in told {
            if let Some(sender) = state.waiters.remove(&waiter) {
                // If the receiver is gone, its `CancelOnDrop` is dropped as well.
                let _ = sender.send(told);
            }
        }
        shrink(&mut state.waiters);
        drop(state);
        for (session, lost) in news {
            (self.0.notify)(session, Event::Lost(lost));
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, CoordinatorState> {
        lock(&self.0.state)
    }
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Groups")
            .field("rounds", &self.len())
            .finish_non_exhaustive()
    }
}

/// Cancels a wait when it is dropped.
struct CancelOnDrop<'a> {
    groups: &'a Groups,
    waiter: Waiter,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        let waiter = self.waiter;
        self.groups.change_state(|state, now| {
            if state.waiters.remove(&waiter).is_some() {
                state.rounds.cancel(now, waiter);
            }
        });
    }
}

/// Returns the answer, or the page of members that takes its place.
fn answer(told: Told) -> Result<Answer, MembersPage> {
    Ok(match told {
        Told::Agreed(agreed) => Answer::Agreed(agreed),
        Told::Done => Answer::Done,
        Told::Incomplete(why) => Answer::Incomplete(Arc::unwrap_or_clone(why)),
        Told::Refused(no) => Answer::Refused(no),
        Told::Members(roster, page) => return Err(MembersPage { roster, page }),
    })
}

fn internal() -> Answer {
    Answer::Refused(refused(Refusal::Internal, ""))
}

#[cfg(test)]
mod tests;
