//! The barriers and gathers of a rank.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::sync::MutexGuard;
use tokio::time::timeout_at;

use super::asking::{Asking, SLACK};
use super::error::{Error, Result};
use super::gathered::GatheredMemory;
use super::group::Group;
use super::handles::{Passing, export};
use super::kept::Calls;
use super::member::{Slot, note_sent};
use super::options::Map;
use super::state::server_lost;
use crate::client::{Answered, discard};
use crate::ledger::Site;
use crate::limits::deadline;
use crate::protocol::{Answer, Ask, Brought, Gather, MAX_GATHER, Operation, Payload};
use crate::share::Shared;
use crate::{Error as ExchangeError, ShareError};

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
        let (mut turn, call) = self.turn(within, Operation::Barrier, None).await?;
        self.unless_lost(call.barrier()).await?;
        discard(turn.before(call.number)).await;
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
        let (mut turn, call) = self.turn(within, Operation::Bytes(payload), None).await?;
        let all = self.unless_lost(call.gather(bytes.len())).await?;
        discard(turn.before(call.number)).await;
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
        let site = Site::here();
        async move {
            let passing = self.joined.passing;
            let access = self.joined.access;
            let described = memory
                .as_ref()
                .map(|memory| memory.describe(access))
                .transpose()?;
            // Finds out before the call whether the memory can be shared this way, so that the others do not wait
            // in vain.
            drop(export(memory.clone(), passing).await?);
            let operation = Operation::Memory(Brought {
                memory: described,
                fabric: Vec::new(),
            });
            let (mut turn, call) = self.turn(within, operation, memory.clone()).await?;
            // Before it enters: the others may succeed although this rank gets no answer.
            turn.kept
                .extend(memory.clone().map(|memory| (call.number, memory)));
            let mut slots = match self.unless_lost(call.gather_memory()).await {
                Ok(slots) => slots,
                Err(error) => {
                    // The server has failed the call for all ranks, so none maps the memory.
                    if matches!(
                        error,
                        Error::RanksMissing { .. } | Error::RanksDisagree { .. }
                    ) {
                        let own = turn.take(call.number);
                        discard((call, memory, own)).await;
                    }
                    return Err(error);
                }
            };
            discard(turn.before(call.number)).await;
            let (own, members) = (self.own_rank(), &self.joined.members);
            for (slot, member) in slots.iter_mut().zip(&members.slots) {
                slot.peer = member.peer.clone();
            }
            note_sent(memory.as_ref(), &slots, own);
            let gathered = GatheredMemory {
                slots,
                own: memory,
                driver: members.driver.clone(),
                import: members.import.clone(),
            };
            match self.joined.map {
                Map::Lazy => Ok(gathered),
                // Still holding this call's turn: a later call tells the others that all memory is mapped.
                Map::All => Ok(gathered.mapped(own, site).await?),
            }
        }
    }

    /// Makes a call with the rank's next number, when it is its turn. The number is used up even if the call
    /// fails, because the server may have counted it.
    async fn turn(
        &self,
        within: Duration,
        operation: Operation,
        memory: Option<Shared>,
    ) -> Result<(MutexGuard<'_, Calls>, Call)> {
        let until = deadline(within);
        let Some(client) = self.client.clone() else {
            let why = "the rank has left the group";
            return Err(ExchangeError::invalid("group", why).into());
        };
        let group = self.name().to_owned();
        let mut turn = timeout_at(until, self.calls.lock()).await.map_err(|_| {
            ShareError::timed_out(format!("an earlier gather of group '{group}'"), within)
        })?;
        turn.last += 1;
        let number = turn.last;
        let what = format!("gather {number} of group '{group}'");
        let call = Call {
            server: Asking {
                client,
                group,
                size: self.size(),
                until,
                // The server has the result, and may still send it.
                again_late: true,
                what,
            },
            operation,
            memory,
            passing: self.joined.passing,
            round: self.joined.leave.round,
            number,
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

/// One barrier or gather.
struct Call {
    server: Asking,
    operation: Operation,
    /// This rank's memory, in a gather of memory.
    memory: Option<Shared>,
    passing: Passing,
    round: u64,
    number: u64,
}

impl Call {
    async fn barrier(&self) -> Result<()> {
        match self.ask(None).await?.answer {
            Answer::Done => Ok(()),
            _ => Err(self.server.broken("unexpected answer to a barrier")),
        }
    }

    /// Returns the bytes of all ranks, `len` bytes each.
    async fn gather(&self, len: usize) -> Result<Vec<Vec<u8>>> {
        let mut answered = self.ask(None).await?;
        let mut all = Vec::new();
        loop {
            let (page, more) = self.server.page(answered.answer)?;
            for member in page.members {
                let bytes = member.bytes.as_ref().map(Payload::expose);
                match bytes.filter(|bytes| bytes.len() == len && all.len() < self.size()) {
                    Some(bytes) => all.push(bytes.to_vec()),
                    None => {
                        let why = "a member without the requested number of bytes";
                        return Err(self.server.broken(why));
                    }
                }
            }
            if !more {
                return self.server.of_all(all);
            }
            let first = u32::try_from(all.len()).unwrap_or(u32::MAX);
            answered = self.ask(Some(first)).await?;
        }
    }

    fn size(&self) -> usize {
        self.server.size as usize
    }

    async fn gather_memory(&self) -> Result<Vec<Slot>> {
        let Answer::Agreed(agreed) = self.ask(None).await?.answer else {
            return Err(self
                .server
                .broken("unexpected answer to a gather of memory"));
        };
        let request = |first| self.request(Some(first));
        self.server
            .members((self.passing.via, agreed.handles), SLACK, request)
            .await
    }

    /// Enters, or asks for the members from `first` on.
    async fn ask(&self, first: Option<u32>) -> Result<Answered> {
        self.server.ask(SLACK, || self.request(first)).await
    }

    async fn request(&self, first: Option<u32>) -> Result<(Ask, Vec<OwnedFd>)> {
        let (mut operation, memory) = match first {
            None => (self.operation.clone(), self.memory.clone()),
            Some(_) => (Operation::Barrier, None),
        };
        let (handles, fds) = export(memory, self.passing).await?;
        if let Operation::Memory(brought) = &mut operation {
            brought.fabric = handles;
        }
        let ask = Ask::Gather(Gather {
            group: self.server.group.clone(),
            round: self.round,
            number: self.number,
            operation,
            first,
            ms: self.server.ms(),
        });
        Ok((ask, fds))
    }
}
