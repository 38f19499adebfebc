//! The coordinator of a server's groups: the rounds, with a clock and with waiting futures.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::roster::Roster;
pub(crate) use super::round::Rules;
use super::round::{Asker, Told, Waiter, refused};
use super::rounds::Rounds;
use crate::Refusal;
use crate::exchange::protocol::{Answer, Empty, Event, Join, Leave, Offer};
use crate::exchange::{PeerName, Who};
use crate::share::BootId;

/// Sends a notice to a session; it must not block, and may not call back.
type Notify = Box<dyn Fn(u64, Event) + Send + Sync>;

/// A server's groups. A clone is the same.
///
/// For every session that ends the server calls [`gone`](Self::gone). A future that is dropped, because its connection broke, counts as not
/// asked: a rank that was gathering is out, one that was offering may offer again.
#[derive(Clone)]
pub(crate) struct Groups(Arc<Inner>);

struct Inner {
    begun: Instant,
    who: Who,
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
    /// No groups yet, for the peers of `who`. `notify` sends a notice to a session: it neither blocks
    /// nor calls back.
    pub fn new(
        rules: Rules,
        who: Who,
        notify: impl Fn(u64, Event) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Inner {
            begun: Instant::now(),
            who,
            state: Mutex::new(State {
                rounds: Rounds::new(rules),
                waiters: HashMap::new(),
                last: 0,
            }),
            notify: Box::new(notify),
        }))
    }

    /// A rank joins: [`Answer::Agreed`] when all have, [`Answer::Incomplete`] when they do not, or
    /// [`Answer::Refused`]. `local` says whether the connection can carry fds.
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
    ) -> Answer {
        if !self.0.who.admits(peer) {
            return Answer::Refused(refused(Refusal::Forbidden, "groups are not for this peer"));
        }
        let asker = Asker {
            session,
            peer: peer.to_string(),
            boot,
            local,
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
        fds: Vec<OwnedFd>,
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
mod tests {
    use super::*;
    use crate::driver::HandleType;
    use crate::exchange::protocol::{Agreed, Incomplete};
    use std::sync::mpsc;

    fn join(rank: u32, size: u32) -> Join {
        Join {
            group: "g".into(),
            rank,
            size,
            can: vec![HandleType::PosixFd],
            cannot: Vec::new(),
            memory: None,
            ms: 1000,
        }
    }

    fn offer(round: u64) -> Offer {
        Offer {
            group: "g".into(),
            round,
            fabric: Vec::new(),
            first: 0,
        }
    }

    fn groups() -> (Groups, mpsc::Receiver<(u64, Event)>) {
        let (sender, news) = mpsc::channel();
        let groups = Groups::new(Rules::default(), Who::only(PEER), move |session, event| {
            sender.send((session, event)).unwrap();
        });
        (groups, news)
    }

    const PEER: PeerName = PeerName::User(7);

    fn boot() -> BootId {
        BootId::from_bytes([1; 16])
    }

    async fn both(groups: &Groups) -> u64 {
        let (a, b) = tokio::join!(
            groups.join(0, &PEER, boot(), true, join(0, 2)),
            groups.join(1, &PEER, boot(), true, join(1, 2)),
        );
        assert_eq!(a, b);
        let Answer::Agreed(Agreed { round, via, .. }) = a else {
            panic!("{a:?}");
        };
        assert_eq!(via, HandleType::PosixFd);
        round
    }

    #[tokio::test(start_paused = true)]
    async fn ranks_come_together_and_part() {
        let (groups, news) = groups();
        let round = both(&groups).await;
        let (a, b) = tokio::join!(
            groups.offer(0, offer(round), Vec::new()),
            groups.offer(1, offer(round), Vec::new()),
        );
        assert_eq!(&a.unwrap().reply(1)[..], &b.unwrap().reply(1)[..]);
        let leave = || Leave {
            group: "g".into(),
            round,
            ms: 1000,
        };
        let (a, b) = tokio::join!(groups.leave(0, leave()), groups.leave(1, leave()));
        assert_eq!((a, b), (Answer::Done(Empty {}), Answer::Done(Empty {})));
        assert_eq!(groups.len(), 0);
        assert!(news.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_missing_is_said_at_the_deadline() {
        let (groups, _news) = groups();
        let before = Instant::now();
        let Answer::Incomplete(Incomplete { reason, ranks, .. }) =
            groups.join(0, &PEER, boot(), true, join(0, 3)).await
        else {
            panic!("not incomplete");
        };
        assert_eq!((reason.as_str(), ranks), ("timed_out", vec![1, 2]));
        assert!(before.elapsed() < Duration::from_secs(2));
        assert_eq!(groups.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_rank_that_does_not_offer_fails_the_others_in_time() {
        let (groups, _news) = groups();
        let round = both(&groups).await;
        let Err(Answer::Incomplete(why)) = groups.offer(0, offer(round), Vec::new()).await else {
            panic!("not incomplete");
        };
        assert_eq!((why.reason.as_str(), why.ranks), ("timed_out", vec![1]));
        groups.gone(1);
        assert_eq!(groups.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn who_hangs_up_while_gathering_has_not_joined() {
        let (groups, _news) = groups();
        let hasty = groups.join(0, &PEER, boot(), true, join(0, 2));
        assert!(
            tokio::time::timeout(Duration::from_millis(10), hasty)
                .await
                .is_err()
        );
        assert_eq!(groups.len(), 0);
    }

    #[tokio::test]
    async fn others_are_refused() {
        let (groups, _news) = groups();
        let answer = groups
            .join(0, &PeerName::Local, boot(), true, join(0, 1))
            .await;
        let Answer::Refused(no) = answer else {
            panic!("{answer:?}");
        };
        assert_eq!(no.reason, "forbidden");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_member_is_news() {
        let (groups, news) = groups();
        let round = both(&groups).await;
        let (a, b) = tokio::join!(
            groups.offer(0, offer(round), Vec::new()),
            groups.offer(1, offer(round), Vec::new()),
        );
        drop((a, b));
        groups.gone(1);
        let (session, Event::Lost(lost)) = news.try_recv().unwrap() else {
            panic!("other news");
        };
        assert_eq!((session, lost.ranks), (0, vec![1]));
    }
}
