//! The coordinator of a server's groups: the rounds, with a clock and with waiting futures.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::identity::Keys;
use super::rights::Rights;
use super::roster::Roster;
pub(crate) use super::round::Rules;
use super::round::{Asker, Told, Waiter, refused};
use super::rounds::Rounds;
use crate::Refusal;
use crate::exchange::PeerName;
use crate::exchange::account::{Charge, shrink};
use crate::exchange::protocol::{
    Admission, Answer, Empty, Event, Gather, Join, Leave, Offer, Refused,
};
use crate::exchange::transport::HeldFd;
use crate::share::BootId;

/// Sends a notice to a session; it must not block, and may not call back.
type Notify = Box<dyn Fn(u64, Event) + Send + Sync>;

/// A server's groups. A clone is the same.
///
/// For every session that ends the server calls [`gone`](Self::gone). A future that is dropped, because its
/// connection broke, counts as not asked: a rank that was gathering is out, one that was offering may offer
/// again.
#[derive(Clone)]
pub(crate) struct Groups(Arc<Inner>);

struct Inner {
    begun: Instant,
    state: Mutex<State>,
    notify: Notify,
}

struct State {
    rounds: Rounds,
    waiters: HashMap<Waiter, oneshot::Sender<Told>>,
    last: Waiter,
}

/// A page of members, as it goes into a reply.
pub(crate) struct MembersPage {
    roster: Arc<Roster>,
    page: usize,
}

impl MembersPage {
    /// The whole encoded reply to request `id`: secret bytes.
    pub fn reply(&self, id: u64) -> Zeroizing<Vec<u8>> {
        self.roster.reply(self.page, id)
    }

    /// The fds that go with the frame.
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
    /// No groups yet, for peers with these rights. `notify` sends a notice to a session: it neither
    /// blocks nor calls back.
    pub fn new(
        rules: Rules,
        rights: Rights,
        keys: Keys,
        notify: impl Fn(u64, Event) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Inner {
            begun: Instant::now(),
            state: Mutex::new(State {
                rounds: Rounds::new(rules, rights, keys),
                waiters: HashMap::new(),
                last: 0,
            }),
            notify: Box::new(notify),
        }))
    }

    /// Replaces the rights: ranks of peers that have lost theirs are out of rounds that are not
    /// complete.
    pub fn set_rights(&self, rights: Rights) {
        self.change(|rounds, now| rounds.set_rights(now, rights));
    }

    /// Keeps room for this group: the limit on all groups does not count for it.
    ///
    /// # Errors
    /// A refusal of a peer without the right, or of an admission that does not admit it.
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

    /// A rank joins: [`Answer::Agreed`] when all have, [`Answer::Incomplete`] when they do not, or
    /// [`Answer::Refused`]. `local` says whether the connection can carry fds. The charge is for what is
    /// kept of the rank: it is dropped with its seat.
    ///
    /// # Cancel safety
    /// A rank whose future is dropped has not joined.
    pub async fn join(
        &self,
        session: u64,
        peer: &PeerName,
        boot: BootId,
        local: bool,
        ask: Join,
        charge: Option<Arc<Charge>>,
    ) -> Answer {
        let asker = Asker {
            session,
            peer: peer.clone(),
            boot,
            local,
            charge,
        };
        let wait = Duration::from_millis(ask.ms);
        let told = self
            .ask(Some(wait), |rounds, now, waiter| {
                rounds.join(now, waiter, asker, ask)
            })
            .await;
        answer(told).unwrap_or_else(|_| internal())
    }

    /// A rank's handles: the members when all ranks have offered theirs. A page of them that
    /// follows is there at once.
    ///
    /// # Errors
    /// What to answer instead: [`Answer::Incomplete`], to all ranks the same, or
    /// [`Answer::Refused`].
    ///
    /// # Cancel safety
    /// A rank whose future is dropped has offered; it may ask once more.
    pub async fn offer(
        &self,
        session: u64,
        ask: Offer,
        fds: Vec<HeldFd>,
    ) -> Result<MembersPage, Answer> {
        let told = self
            .ask(None, |rounds, now, waiter| {
                rounds.offer(now, waiter, session, ask, fds)
            })
            .await;
        match answer(told) {
            Ok(other) => Err(other),
            Err(page) => Ok(page),
        }
    }

    /// A rank enters a gather: [`Answer::Done`] of a barrier, [`Answer::Agreed`] or members of another,
    /// when all ranks have entered. The charge is for what it gives: it is dropped with that.
    ///
    /// # Errors
    /// What to answer instead of members.
    ///
    /// # Cancel safety
    /// A rank whose future is dropped has entered; it may ask once more.
    pub async fn gather(
        &self,
        session: u64,
        ask: Gather,
        fds: Vec<HeldFd>,
        charge: Option<Charge>,
    ) -> Result<MembersPage, Answer> {
        let wait = Duration::from_millis(ask.ms);
        let told = self
            .ask(Some(wait), |rounds, now, waiter| {
                rounds.gather(now, waiter, session, ask, fds, charge)
            })
            .await;
        match answer(told) {
            Ok(other) => Err(other),
            Err(page) => Ok(page),
        }
    }

    /// A rank leaves: [`Answer::Done`] when all have.
    ///
    /// # Cancel safety
    /// A rank whose future is dropped has left.
    pub async fn leave(&self, session: u64, ask: Leave) -> Answer {
        let wait = Duration::from_millis(ask.ms);
        let told = self
            .ask(Some(wait), |rounds, now, waiter| {
                rounds.leave(now, waiter, session, ask)
            })
            .await;
        answer(told).unwrap_or_else(|_| internal())
    }

    /// A session has ended, and will not be resumed.
    pub fn gone(&self, session: u64) {
        self.change(|rounds, now| rounds.gone(now, session));
    }

    /// When [`tick`](Self::tick) is to be called, if nobody asks before.
    pub fn deadline(&self) -> Option<Instant> {
        let at = self.lock().rounds.deadline()?;
        self.0.begun.checked_add(at)
    }

    /// Ends what time has ended: who waits looks by itself, but there may be nobody who waits.
    pub fn tick(&self) {
        self.change(|rounds, now| rounds.tick(now));
    }

    /// How many rounds of groups there are, gathering or in use.
    pub fn len(&self) -> usize {
        self.lock().rounds.len()
    }

    async fn ask(
        &self,
        wait: Option<Duration>,
        ask: impl FnOnce(&mut Rounds, Duration, Waiter),
    ) -> Told {
        let (sender, mut told) = oneshot::channel();
        let mut waiter = 0;
        self.change_state(|state, now| {
            state.last += 1;
            waiter = state.last;
            state.waiters.insert(waiter, sender);
            ask(&mut state.rounds, now, waiter);
        });
        let _waiting = Waiting {
            groups: self,
            waiter,
        };
        let mut wait = wait.unwrap_or(Duration::ZERO);
        loop {
            // Somebody must look when time has passed: whoever waits does.
            match tokio::time::timeout(wait, &mut told).await {
                Ok(Ok(told)) => return told,
                Ok(Err(_)) => return Told::Refused(refused(Refusal::Internal, "")),
                Err(_) => wait = self.change(|rounds, now| rounds.next_tick(now, waiter)),
            }
        }
    }

    /// Changes the rounds, then tells what there is to tell.
    fn change<T>(&self, change: impl FnOnce(&mut Rounds, Duration) -> T) -> T {
        self.change_state(|state, now| change(&mut state.rounds, now))
    }

    fn change_state<T>(&self, change: impl FnOnce(&mut State, Duration) -> T) -> T {
        let now = self.0.begun.elapsed();
        let mut state = self.lock();
        let result = change(&mut state, now);
        let (told, news) = state.rounds.take();
        for (waiter, told) in told {
            if let Some(sender) = state.waiters.remove(&waiter) {
                // Who does not wait any more has its `Waiting` dropped as well.
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Groups")
            .field("rounds", &self.len())
            .finish_non_exhaustive()
    }
}

/// Takes back what is not waited for any more.
struct Waiting<'a> {
    groups: &'a Groups,
    waiter: Waiter,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let waiter = self.waiter;
        self.groups.change_state(|state, now| {
            if state.waiters.remove(&waiter).is_some() {
                state.rounds.cancel(now, waiter);
            }
        });
    }
}

/// The answer, or the page of members that is one.
fn answer(told: Told) -> Result<Answer, MembersPage> {
    Ok(match told {
        Told::Agreed(agreed) => Answer::Agreed(agreed),
        Told::Done => Answer::Done(Empty {}),
        Told::Incomplete(why) => Answer::Incomplete(Arc::unwrap_or_clone(why)),
        Told::Refused(no) => Answer::Refused(no),
        Told::Members(roster, page) => return Err(MembersPage { roster, page }),
    })
}

fn internal() -> Answer {
    Answer::Refused(refused(Refusal::Internal, ""))
}

#[cfg(test)]
#[path = "coordinator_tests.rs"]
mod tests;
