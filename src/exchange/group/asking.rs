//! The requests of a rank to its group's server.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::error::{Error, Result};
use super::handles::{enough_fds, take, tidy};
use super::member::Slot;
use crate::client::Answered;
use crate::driver::HandleType;
use crate::limits::LONGEST;
use crate::protocol::{Answer, Ask, Incomplete, Members};
use crate::{Client, Error as ExchangeError, Refusal};

/// How long after its deadline a rank still waits for the answer that the server gives to all ranks.
pub(super) const SLACK: Duration = Duration::from_secs(5);
/// The pause before asking again after a broken connection.
const PAUSE: Duration = Duration::from_millis(50);

/// A rank that asks its group's server.
pub(super) struct Asking {
    pub client: Client,
    pub group: String,
    pub size: u32,
    /// The rank's deadline for the other ranks.
    pub until: Instant,
    /// Whether a request may be sent again after the deadline. A late `Join` could end a new round of the other
    /// ranks.
    pub again_late: bool,
    /// The operation, for people.
    pub what: String,
}

impl Asking {
    /// Returns the time until the deadline, in milliseconds.
    pub fn ms(&self) -> u64 {
        let left = self.until.saturating_duration_since(Instant::now());
        left.as_millis().try_into().unwrap_or(u64::MAX)
    }

    /// Sends a request and waits for the answer, up to `slack` beyond the deadline, because the server's clock
    /// decides. Sends it again if the connection breaks: the client reconnects.
    pub async fn ask<F>(&self, slack: Duration, request: impl Fn() -> F) -> Result<Answered>
    where
        F: Future<Output = Result<(Ask, Vec<OwnedFd>)>>,
    {
        let last = self.until.max(Instant::now()) + slack.min(LONGEST);
        let last_again = match self.again_late {
            true => last,
            false => self.until,
        };
        loop {
            let (ask, fds) = request().await?;
            let patience = last.saturating_duration_since(Instant::now());
            match self.client.exchange(ask, fds, patience).await {
                Err(error) if error.is_peer_lost() && Instant::now() + PAUSE < last_again => {
                    sleep(PAUSE).await
                }
                Ok(Answered {
                    answer: Answer::Incomplete(why),
                    ..
                }) => {
                    return Err(self.incomplete(&why));
                }
                answered => return Ok(answered?),
            }
        }
    }

    /// Receives the memory of all ranks, with this many handles. `request` asks for the members from a rank on.
    pub async fn members<F>(
        &self,
        (via, handles): (HandleType, u32),
        slack: Duration,
        request: impl Fn(u32) -> F,
    ) -> Result<Vec<Slot>>
    where
        F: Future<Output = Result<(Ask, Vec<OwnedFd>)>>,
    {
        if via == HandleType::PosixFd {
            enough_fds(handles.into())?;
        }
        let mut slots = Vec::new();
        loop {
            let first = u32::try_from(slots.len()).unwrap_or(u32::MAX);
            let answered = self.ask(slack, || request(first)).await?;
            let (page, more) = self.page(answered.answer)?;
            take(via, self.size, page.members, answered.fds, &mut slots)
                .map_err(|wrong| self.broken(&wrong))?;
            if !more {
                return self.of_all(slots);
            }
        }
    }

    /// Returns a page of members, and whether there are further ones.
    pub fn page(&self, answer: Answer) -> Result<(Members, bool)> {
        match answer {
            Answer::Members(page) => {
                let more = page.more && !page.members.is_empty();
                Ok((page, more))
            }
            _ => Err(self.broken("unexpected answer, not members")),
        }
    }

    /// Checks that there is one for each rank.
    pub fn of_all<T>(&self, all: Vec<T>) -> Result<Vec<T>> {
        match all.len() == self.size as usize {
            true => Ok(all),
            false => Err(self.broken("the number of members is not the group's size")),
        }
    }

    pub fn broken(&self, detail: &str) -> Error {
        ExchangeError::protocol(self.client.peer(), detail).into()
    }

    /// Converts the answer that the server gives to all ranks when the operation has failed.
    fn incomplete(&self, why: &Incomplete) -> Error {
        let group = self.group.clone();
        let reasons = || why.reasons.iter().map(|reason| tidy(reason)).collect();
        match Refusal::from_word(&why.reason) {
            Refusal::TimedOut | Refusal::Closing if !why.ranks.is_empty() => {
                let (ranks, size) = (why.ranks.iter().copied(), self.size);
                let missing = ranks.filter(|rank| *rank < size).collect();
                Error::RanksMissing {
                    group,
                    missing,
                    size,
                }
            }
            Refusal::NoCommonHandle => ExchangeError::NoCommonHandle { reasons: reasons() }.into(),
            Refusal::RanksDisagree => Error::RanksDisagree {
                group,
                reasons: reasons(),
            },
            reason => {
                let detail = tidy(&why.detail);
                ExchangeError::refused(self.client.peer(), self.what.clone(), reason, detail).into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::ready;

    use super::*;
    use crate::client::tests::fake::{Fake, LONG, importer};
    use crate::protocol::Leave;

    fn asking(client: Client, until: Instant, again_late: bool) -> Asking {
        Asking {
            client,
            group: "g".into(),
            size: 1,
            until,
            again_late,
            what: "a test".into(),
        }
    }

    fn request() -> Ask {
        Ask::Leave(Leave {
            group: "g".into(),
            round: 1,
            ms: 0,
        })
    }

    #[tokio::test]
    async fn a_request_is_sent_again_after_the_deadline_only_if_it_may_be() {
        let driver = importer();
        for (again_late, until, sent) in [
            (false, Instant::now(), 1),
            (true, Instant::now(), 2),
            (false, Instant::now() + LONG, 2),
        ] {
            let fake = Fake::new().await;
            let (client, mut peer) = fake.client(&driver).await;
            let asking = asking(client, until, again_late);
            let count = Cell::new(0);
            let ask = asking.ask(LONG, || {
                count.set(count.get() + 1);
                ready(Ok((request(), Vec::new())))
            });
            let serve = async {
                assert!(peer.request().await.is_some());
                drop(peer);
                let (mut peer, _) = fake.greet().await;
                if let Some((id, _)) = peer.request().await {
                    peer.done(id).await;
                }
                // The connection lasts until the request is over.
                std::future::pending::<()>().await;
            };
            let answered = tokio::select! {
                answered = ask => answered,
                () = serve => unreachable!(),
            };
            assert_eq!(count.get(), sent, "{again_late} {:?}", answered.map(drop));
        }
    }

    #[tokio::test]
    async fn the_longest_slack_does_not_overflow() {
        let (driver, fake) = (importer(), Fake::new().await);
        let (client, mut peer) = fake.client(&driver).await;
        let asking = asking(client, Instant::now() + LONGEST, false);
        let ask = asking.ask(Duration::MAX, || ready(Ok((request(), Vec::new()))));
        let (answered, ()) = tokio::join!(ask, async {
            let (id, _) = peer.request().await.unwrap();
            peer.done(id).await;
        });
        assert_eq!(answered.unwrap().answer, Answer::Done);
    }
}
