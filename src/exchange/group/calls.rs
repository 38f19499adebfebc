//! The barriers and gathers of a rank.

use std::os::fd::OwnedFd;
use std::panic::Location as Caller;
use std::time::Duration;

use tokio::sync::MutexGuard;
use tokio::time::{Instant, sleep, timeout_at};

use super::answers::incomplete;
use super::error::{Error, Result};
use super::gathered::GatheredMemory;
use super::group::Group;
use super::handles::{blocking, enough_fds, export, take};
use super::kept::{Calls, discard};
use super::member::{Slot, note_sent};
use super::options::Map;
use super::state::server_lost;
use crate::client::Answered;
use crate::driver::HandleType;
use crate::limits::deadline;
use crate::protocol::{
    Answer, Ask, Brought, Gather, Incomplete, MAX_GATHER, Member, Members, Operation, Payload,
};
use crate::share::{Description, Shared};
use crate::{Client, Error as ExchangeError, ShareError};

/// How long after its deadline a rank still waits for the result of a gather from the server.
const SLACK: Duration = Duration::from_secs(5);
/// The pause before asking again after a broken connection.
const PAUSE: Duration = Duration::from_millis(50);

impl Group {
    /// Waits until every rank has called this.
    ///
    /// Barriers and gathers form one sequence of calls in each rank. The first calls of all ranks belong
    /// together, then the second calls, and so on. Concurrent calls of one rank run one after another. A call
    /// has one result for all ranks, which the group's server decides. It succeeds when all ranks have
    /// entered. It fails when a rank has left or is lost, when ranks call different operations, and when the
    /// shortest `within` of the ranks that have entered is over; a rank that calls later gets the same error
    /// at once. The server reduces a longer `within` to its [`Limits::wait`](crate::Limits::wait),
    /// by default 600 s. A failure does not affect the next call: if all ranks try again, they meet there.
    ///
    /// The server keeps the errors of the last eight failures since the last success. A rank that enters an
    /// earlier call gets the error of the oldest of those.
    ///
    /// Only a rank that gets no answer from the server does not know the result. It gets
    /// [`PeerLost`](crate::ShareError::PeerLost), [`TimedOut`](crate::ShareError::TimedOut) or the reason why its
    /// session ended, although the call may have succeeded for the other ranks: it has if all ranks, including
    /// this one, had entered. If a rank is lost after the call succeeded, the remaining ranks still get
    /// success. The server never reports success to one rank and failure to another.
    ///
    /// # Errors
    /// [`Error::RanksMissing`] with the ranks that have not called in time, or that have left or were lost;
    /// [`Error::RanksDisagree`] if ranks call different operations; [`Refused`](ExchangeError::Refused) if the
    /// server is too old (`unsupported`), does not count this rank as a member (`not_found`), or has reached a
    /// limit for the peer of any rank (`limit`), which fails the call for all ranks;
    /// [`PeerLost`](crate::ShareError::PeerLost) if the server is lost.
    ///
    /// # Cancel safety
    /// If the future is dropped early, this rank may have entered, and the call may succeed for the others.
    /// This rank's next call has the next number, and fails the dropped call for ranks that still wait in it.
    pub async fn barrier(&self, within: Duration) -> Result<()> {
        let (mut turn, call) = self.turn(within, Own::Nothing).await?;
        self.unless_lost(call.barrier()).await?;
        discard(turn.kept.before(call.number)).await;
        Ok(())
    }

    /// Sends `bytes` to all ranks, and returns the bytes of every rank, in rank order. Every rank sends the
    /// same number of bytes, at most [`MAX_GATHER`], and all ranks together at most [`MAX_GATHER_TOTAL`]. In
    /// groups of up to 256 ranks each can send [`MAX_GATHER`].
    ///
    /// It waits, succeeds and fails as [`barrier`](Self::barrier) does.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for more bytes than [`MAX_GATHER`], which does not
    /// count as a call; those of [`barrier`](Self::barrier), where [`Error::RanksDisagree`] also means that the
    /// numbers of bytes differ, and [`Refused`](ExchangeError::Refused) with `limit` that all ranks together
    /// send more than [`MAX_GATHER_TOTAL`].
    ///
    /// [`MAX_GATHER_TOTAL`]: super::MAX_GATHER_TOTAL
    ///
    /// # Cancel safety
    /// As [`barrier`](Self::barrier).
    pub async fn gather(&self, bytes: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
        let Some(payload) = Payload::new(bytes) else {
            let why = format!("{} bytes, more than {MAX_GATHER}", bytes.len());
            return Err(ExchangeError::invalid("bytes of a gather", why).into());
        };
        let (mut turn, call) = self.turn(within, Own::Bytes(payload)).await?;
        let all = self.unless_lost(call.gather(bytes.len())).await?;
        discard(turn.kept.before(call.number)).await;
        Ok(all)
    }

    /// Shares a memory, or `None`, with all ranks, and returns the memory of every rank. The group's options
    /// apply: its handle type ([`via`](Self::via)), [`GroupOptions::map`] for the time of mapping,
    /// [`GroupOptions::import`] for the users of the mapping, and [`GroupOptions::access`] for the access
    /// that other ranks are asked to respect.
    ///
    /// The gathered memory belongs to the result: it is unmapped when the result is dropped, not when the
    /// group ends. The group keeps `memory` until a later call of this rank succeeds, because only then all
    /// others have mapped it. It does so even if this call is dropped or the server's answer is lost, because
    /// the others may have succeeded. It releases `memory` at once if ranks are missing or disagree. With
    /// [`Map::Lazy`] they may map it later, so the caller must keep it. The server keeps its file descriptors
    /// until the next gather completes, or for [`Limits::request`](crate::Limits) plus a lease.
    ///
    /// It waits, succeeds and fails as [`barrier`](Self::barrier) does. If a rank cannot map another's
    /// memory, only that rank fails.
    ///
    /// # Errors
    /// Those of [`barrier`](Self::barrier); those of describing and exporting `memory`, which do not count as a
    /// call; [`LimitReached`](ExchangeError::LimitReached) if this process may not open as many file
    /// descriptors as all ranks' memory has parts; [`Import`](ExchangeError::Import) with [`Map::All`].
    ///
    /// # Cancel safety
    /// As [`barrier`](Self::barrier). Received handles are closed and mappings are unmapped.
    ///
    /// [`GroupOptions::map`]: super::GroupOptions::map
    /// [`GroupOptions::import`]: super::GroupOptions::import
    /// [`GroupOptions::access`]: super::GroupOptions::access
    #[track_caller]
    pub fn gather_memory(
        &self,
        memory: Option<Shared>,
        within: Duration,
    ) -> impl Future<Output = Result<GatheredMemory>> {
        self.gather_memory_at(memory, within, Caller::caller())
    }

    async fn gather_memory_at(
        &self,
        memory: Option<Shared>,
        within: Duration,
        site: &'static Caller<'static>,
    ) -> Result<GatheredMemory> {
        let via = self.via();
        let described = match &memory {
            Some(memory) => Some(memory.describe(self.joined.access)?),
            None => None,
        };
        // Finds out before the call whether the memory can be shared this way, so that the others do not wait
        // in vain.
        drop(export(memory.clone(), via).await?);
        let own = Own::Memory {
            memory: memory.clone(),
            described,
            via,
        };
        let (mut turn, call) = self.turn(within, own).await?;
        // Before it enters: the others may succeed although this rank gets no answer.
        turn.kept.add(call.number, memory.clone());
        let slots = match self.unless_lost(call.gather_memory(via)).await {
            Ok(slots) => slots,
            Err(error) => {
                if failed_for_all(&error) {
                    let own = turn.kept.take(call.number);
                    discard((call, memory, own)).await;
                }
                return Err(error);
            }
        };
        discard(turn.kept.before(call.number)).await;
        let peers = self.joined.members.iter().map(Slot::peer);
        let slots = slots.into_iter().zip(peers);
        let slots: Vec<Slot> = slots.map(|(slot, peer)| slot.of(peer)).collect();
        let own = self.own_rank();
        note_sent(memory.as_ref(), &slots, own);
        let (driver, import) = (self.joined.driver.clone(), self.joined.import.clone());
        let gathered = GatheredMemory::new(slots, memory, driver, import);
        if self.joined.map == Map::Lazy {
            return Ok(gathered);
        }
        // Still holding this call's turn: a later call tells the others that all memory is mapped.
        Ok(blocking(move || gathered.map_others(own, site).map(|()| gathered)).await??)
    }

    /// Makes a call with the rank's next number, when it is its turn. The number is used up even if the call
    /// fails, because the server may have counted it.
    async fn turn(&self, within: Duration, own: Own) -> Result<(MutexGuard<'_, Calls>, Call)> {
        let until = deadline(within);
        let Some(client) = self.client.clone() else {
            let why = "the rank has left the group";
            return Err(ExchangeError::invalid("group", why).into());
        };
        let turn = timeout_at(until, self.calls.lock()).await;
        let mut turn = turn.map_err(|_| {
            ShareError::timed_out(
                format!("an earlier gather of group '{}'", self.name()),
                within,
            )
        })?;
        turn.last += 1;
        let call = Call {
            client,
            own,
            group: self.name().into(),
            round: self.round(),
            number: turn.last,
            size: self.size(),
            until,
        };
        Ok((turn, call))
    }

    /// Returns the call's result, or an error if the server is lost.
    async fn unless_lost<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            result = call => result,
            error = server_lost(self.state.clone()) => Err(error.into()),
        }
    }
}

/// Whether the server has failed the call for all ranks. No rank maps the memory of such a call.
const fn failed_for_all(error: &Error) -> bool {
    matches!(
        error,
        Error::RanksMissing { .. } | Error::RanksDisagree { .. }
    )
}

/// The contribution of this rank.
enum Own {
    Nothing,
    Bytes(Payload),
    Memory {
        memory: Option<Shared>,
        described: Option<Description>,
        via: HandleType,
    },
}

impl Own {
    /// Returns the contribution as a message, with the file descriptors of a memory.
    async fn message(&self) -> Result<(Operation, Vec<OwnedFd>)> {
        Ok(match self {
            Self::Nothing => (Operation::Barrier, Vec::new()),
            Self::Bytes(payload) => (Operation::Bytes(payload.clone()), Vec::new()),
            Self::Memory {
                memory,
                described,
                via,
            } => {
                let (fabric, fds) = export(memory.clone(), *via).await?;
                let memory = described.clone();
                (Operation::Memory(Brought { memory, fabric }), fds)
            }
        })
    }
}

/// One barrier or gather.
struct Call {
    client: Client,
    own: Own,
    group: String,
    round: u64,
    number: u64,
    size: u32,
    until: Instant,
}

impl Call {
    async fn barrier(&self) -> Result<()> {
        match self.ask(None).await?.answer {
            Answer::Done(_) => Ok(()),
            _ => Err(self.broken("unexpected answer to a barrier")),
        }
    }

    /// Returns the bytes of all ranks, `len` bytes each.
    async fn gather(&self, len: usize) -> Result<Vec<Vec<u8>>> {
        let mut answered = self.ask(None).await?;
        let mut all = Vec::new();
        loop {
            let page = self.page(answered.answer)?;
            let more = page.more && !page.members.is_empty();
            for member in page.members {
                all.push(self.bytes_of(&member, len, all.len())?);
            }
            if !more {
                return self.of_all(all);
            }
            answered = self.ask(Some(all.len())).await?;
        }
    }

    async fn gather_memory(&self, via: HandleType) -> Result<Vec<Slot>> {
        let handles = match self.ask(None).await?.answer {
            Answer::Agreed(agreed) => agreed.handles,
            _ => return Err(self.broken("unexpected answer to a gather of memory")),
        };
        if via == HandleType::PosixFd {
            enough_fds(handles.into())?;
        }
        let mut slots = Vec::new();
        loop {
            let answered = self.ask(Some(slots.len())).await?;
            let page = self.page(answered.answer)?;
            let more = page.more && !page.members.is_empty();
            take(via, self.size, page.members, answered.fds, &mut slots)
                .map_err(|wrong| self.broken(&wrong))?;
            if !more {
                return self.of_all(slots);
            }
        }
    }

    /// Enters, or asks for the members from `first` on. Asks again if the connection breaks.
    async fn ask(&self, first: Option<usize>) -> Result<Answered> {
        // Goes beyond the deadline, because the server knows the result and may still send it.
        let last = self.until.max(Instant::now()) + SLACK;
        loop {
            let (operation, fds) = match first {
                None => self.own.message().await?,
                Some(_) => (Operation::Barrier, Vec::new()),
            };
            let left = self.until.saturating_duration_since(Instant::now());
            let ask = Ask::Gather(Gather {
                group: self.group.clone(),
                round: self.round,
                number: self.number,
                operation,
                first: first.map(|first| u32::try_from(first).unwrap_or(u32::MAX)),
                ms: left.as_millis().try_into().unwrap_or(u64::MAX),
            });
            let patience = last.saturating_duration_since(Instant::now());
            match self.client.exchange(ask, fds, patience).await {
                // The client is reconnecting.
                Err(ExchangeError::Share(ShareError::PeerLost { .. }))
                    if Instant::now() + PAUSE < last =>
                {
                    sleep(PAUSE).await
                }
                Ok(Answered {
                    answer: Answer::Incomplete(why),
                    ..
                }) => return Err(self.failed(&why)),
                answered => return Ok(answered?),
            }
        }
    }

    fn failed(&self, why: &Incomplete) -> Error {
        let what = format!("gather {} of group '{}'", self.number, self.group);
        incomplete(&self.group, self.size, self.client.peer(), what, why)
    }

    fn page(&self, answer: Answer) -> Result<Members> {
        match answer {
            Answer::Members(members) => Ok(members),
            _ => Err(self.broken("unexpected answer, not members")),
        }
    }

    /// Returns a member's bytes, which must be as many as this rank's, after `before` other members.
    fn bytes_of(&self, member: &Member, len: usize, before: usize) -> Result<Vec<u8>> {
        let bytes = member.bytes.as_ref().map(Payload::expose);
        match bytes.filter(|bytes| bytes.len() == len && before < self.size as usize) {
            Some(bytes) => Ok(bytes.to_vec()),
            None => Err(self.broken("a member without the requested number of bytes")),
        }
    }

    fn of_all<T>(&self, all: Vec<T>) -> Result<Vec<T>> {
        match all.len() == self.size as usize {
            true => Ok(all),
            false => Err(self.broken("the number of members is not the group's size")),
        }
    }

    fn broken(&self, detail: &str) -> Error {
        Error::Exchange(ExchangeError::protocol(self.client.peer(), detail))
    }
}
