//! How names end, and how their memory is released.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::quota::{Charge, Use};
use super::reserve::{Chunk, Reserve};
use super::reuse_policy::{Discard, Past};
use super::state::{NameState, Named, Refused, ServiceState};
use crate::exchange::PeerName;
use crate::exchange::server::{Holder, HolderState, Published, UnconfirmedRelease};
use crate::per_driver::lock;
use crate::share::Shared;
use crate::vmm::PhysicalMemory;
use crate::{Error, MemoryError, Refusal, ShareError};

/// How often to ask the holders of an ending name again.
const ASK_AGAIN: Duration = Duration::from_secs(30);
/// How long the exchange may keep memory that no peer holds, and how often to look meanwhile.
const IN_USE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);
/// How often to check whether the configuration has changed.
const RELOADED: Duration = Duration::from_secs(1);

fn is_silent(holder: &Holder) -> bool {
    holder.state == HolderState::Expired
}

impl Named {
    fn published(&self) -> Option<Arc<Published>> {
        lock(&self.published).clone()
    }

    /// Waits until no peer holds it. Returns `false` if a silent holder may still have it mapped.
    async fn wait_for_holders(&self, mut wait: Duration) -> bool {
        let Some(published) = self.published() else {
            return false;
        };
        loop {
            match published.vacate(wait).await {
                // Memory of a process that died is not reused.
                Ok(()) => return !published.left_by_dead(),
                Err(Error::Share(ShareError::Memory(MemoryError::StillHeld { .. }))) => {
                    let holders = published.importers();
                    if holders.is_empty() {
                        continue; // the last one has let go just now
                    }
                    if holders.iter().all(is_silent) {
                        let name = &self.name;
                        tracing::warn!(name, "a silent holder may still have it mapped");
                        return false;
                    }
                    wait = ASK_AGAIN;
                }
                Err(error) => {
                    tracing::warn!(name = self.name, %error, "cannot withdraw");
                    return false;
                }
            }
        }
    }

    /// Asks the holders to release the name in time; describes those that did not. Does not wait for holders
    /// that had fallen silent before, but logs them.
    async fn unpublish_and_wait(&self, within: Duration) -> Vec<String> {
        let Some(published) = self.published() else {
            return Vec::new();
        };
        let mut before = published.importers();
        before.retain(is_silent);
        if published.vacate(within).await.is_ok() {
            return Vec::new();
        }
        let mut still = Vec::new();
        for holder in published.importers() {
            let name = &self.name;
            if before.iter().any(|silent| silent.lease == holder.lease) {
                tracing::warn!(name, %holder, "a holder that fell silent may still have it mapped");
            } else if is_silent(&holder) {
                let how = "silent, it may still have it mapped";
                still.push(format!("{holder} ('{name}': {how})"));
            } else {
                still.push(format!("{holder} ('{name}')"));
            }
        }
        still
    }

    /// Describes the holders.
    fn holders(&self) -> String {
        let importers = self.published().map(|published| published.importers());
        let importers = importers.unwrap_or_default();
        let mut holders: Vec<_> = importers.iter().map(Holder::to_string).collect();
        holders.dedup();
        holders.truncate(16);
        holders.join(", ")
    }
}

impl ServiceState {
    /// Ends one of `peer`'s names. At the deadline the name stays closed and continues to end.
    pub async fn delete(
        self: &Arc<Self>,
        peer: &PeerName,
        name: &str,
        wait: Duration,
    ) -> Result<(), Refused> {
        let there = match lock(&self.table).names.get(name) {
            Some(NameState::There(named)) => Some(Arc::clone(named)),
            _ => None,
        };
        let shown = |named: &Named| named.published().is_some_and(|it| it.is_shown_to(peer));
        let named = match there {
            Some(named) if named.owner.as_ref() == Some(peer) => named,
            Some(named) if named.owner.is_none() && shown(&named) => {
                return Err((Refusal::Configured, "no request deletes it".into()));
            }
            // A name that is not shown to a peer does not exist for it; a refusal does not name the owner.
            _ => {
                let why = "this peer has created no such name";
                return Err((Refusal::NotFound, why.into()));
            }
        };
        if let Some(directory) = &*lock(&self.directory) {
            directory.remove(name);
        }
        if !named.ending.swap(true, Relaxed) {
            let (state, named) = (Arc::clone(self), Arc::clone(&named));
            tokio::spawn(async move { state.end(&named, wait).await });
        }
        let mut ended = named.ended.subscribe();
        let done = ended.wait_for(|ended| *ended);
        let done = tokio::time::timeout(wait.max(Duration::from_millis(100)), done).await;
        if done.is_err() {
            let holders = named.holders();
            let why = if holders.is_empty() {
                "its memory is still in use in the service".into()
            } else {
                format!("held by {holders}")
            };
            return Err((Refusal::TimedOut, why));
        }
        self.asked.deleted.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Ends a name: waits for its holders, and returns its memory to the reserve or the driver. Afterwards keeps
    /// charging for memory that may still be in use.
    async fn end(&self, named: &Named, wait: Duration) {
        let clean = named.wait_for_holders(wait).await;
        // Memory that returns while the server ends is never handed out again, so it need not be kept.
        let clean = clean && !self.draining.load(Relaxed);
        let published = lock(&named.published).take();
        let mut charge = lock(&named.charge).take();
        let mut pasts = named.pasts.clone();
        let mut unconfirmed = None;
        if !clean {
            pasts.iter_mut().for_each(Past::taint);
            let release = published.as_ref().map(|published| published.leave());
            unconfirmed = release.map(|release| {
                // It goes back to the driver, but counts until its holders have confirmed.
                let charge = charge.take();
                let charge = charge.map(|charge| self.charge_silent(named, &release, charge));
                (release, charge)
            });
        }
        let shared = published.and_then(|published| published.shared().ok());
        if let (Some(reserve), Some(shared)) = (self.nodes.get(&named.node), shared) {
            let give_back = |memories| {
                drop(Taken {
                    reserve,
                    chunks: chunks_of(memories, pasts),
                    charge,
                });
            };
            let begun = Instant::now();
            match take_back(shared, LOOK, || begun.elapsed() > IN_USE).await {
                Ok(memories) => {
                    give_back(memories);
                    self.free_name(named);
                }
                Err(shared) => {
                    tracing::warn!(name = named.name, "its memory is still in use here");
                    self.free_name(named);
                    match take_back(shared, RELOADED, || self.draining.load(Relaxed)).await {
                        Ok(memories) => give_back(memories),
                        Err(_) => reserve.lost(named.pinned, Discard::Tainted),
                    }
                }
            }
        } else {
            self.free_name(named);
            // Without the memory, only its count is left.
            if let Some(reserve) = self.nodes.get(&named.node) {
                reserve.lost(named.pinned, Discard::Tainted);
            }
        }
        if let Some((release, Some(charge))) = unconfirmed {
            self.charge_until_confirmed(named, release, charge).await;
        }
    }

    /// Frees the name of an ended publication: another peer may create it from then on.
    fn free_name(&self, named: &Named) {
        lock(&self.table).names.remove(&named.name);
        named.ended.send_replace(true);
    }

    /// Charges a silent holder for memory that it may still have mapped, if the owner is not silent itself: the owner can do
    /// nothing about another peer's silence.
    fn charge_silent(
        &self,
        named: &Named,
        release: &UnconfirmedRelease,
        mut charge: Charge,
    ) -> Charge {
        charge.turn(Use::Unconfirmed);
        let peers = release.peers();
        let is_owner = |peer: &PeerName| named.owner.as_ref() == Some(peer);
        if let Some(silent) = peers.first()
            && !peers.iter().any(is_owner)
        {
            charge.transfer(silent);
        }
        charge
    }

    /// Keeps charging the memory of a deleted name until no holder can have it mapped, or for as long as
    /// the configuration says.
    async fn charge_until_confirmed(
        &self,
        named: &Named,
        unconfirmed: UnconfirmedRelease,
        charge: Charge,
    ) {
        let Some(owner) = &named.owner else { return };
        let (name, bytes) = (&named.name, charge.bytes());
        tracing::warn!(name, %owner, bytes, "it counts until its silent holders are heard of");
        let begun = Instant::now();
        // A reload may change the time meanwhile.
        let forgiven = async {
            loop {
                let left = self.forgive_after().saturating_sub(begun.elapsed());
                if left.is_zero() {
                    break;
                }
                sleep(left.min(RELOADED)).await;
            }
        };
        tokio::select! {
            resolved = unconfirmed.resolved() => {
                drop(charge);
                if resolved {
                    tracing::info!(name, %owner, bytes, "no holder has it mapped any more");
                }
            }
            () = forgiven => {
                drop(charge);
                self.asked.forgiven_bytes.fetch_add(bytes, Relaxed);
                let why = "it no longer counts, but its silent holders may still have it mapped";
                tracing::warn!(name, %owner, bytes, "{why}");
            }
        }
    }

    /// Asks all holders to release their memory by `until`, also holders of names that are still being
    /// created, once they exist. Describes those that did not.
    pub async fn unpublish_and_wait(&self, until: Instant) -> Vec<String> {
        let mut made = self.made.subscribe();
        let mut asked = JoinSet::new();
        let mut seen = HashSet::new();
        loop {
            made.borrow_and_update();
            let (there, making) = self.all();
            for named in there {
                if seen.insert(named.name.clone()) {
                    let left = until.saturating_duration_since(Instant::now());
                    asked.spawn(async move { named.unpublish_and_wait(left).await });
                }
            }
            if making == 0 {
                break;
            }
            // The server refuses to publish memory that is not created by then.
            let Ok(Ok(())) = tokio::time::timeout_at(until, made.changed()).await else {
                tracing::warn!(making, "names were still being created at the deadline");
                break;
            };
        }
        let mut still = Vec::new();
        while let Some(done) = asked.join_next().await {
            still.extend(done.unwrap_or_default());
        }
        still
    }
}

/// Takes memory back once no code in this process uses it, such as a driver call that does not return.
///
/// # Errors
/// The memory, when `gives_up` says so.
async fn take_back(
    mut shared: Shared,
    pause: Duration,
    gives_up: impl Fn() -> bool,
) -> Result<Vec<PhysicalMemory>, Shared> {
    loop {
        match shared.into_physical() {
            Ok(memories) => return Ok(memories),
            Err(still) => shared = still,
        }
        if gives_up() {
            return Err(shared);
        }
        sleep(pause).await;
    }
}

/// Chunks that no name has. Dropping this gives them back with their charges; the rest of the name's charge ends.
pub(super) struct Taken<'a> {
    pub reserve: &'a Reserve,
    pub chunks: Vec<Chunk>,
    pub charge: Option<Charge>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        for chunk in &mut self.chunks {
            let bytes = chunk.bytes();
            chunk.charge = self.charge.as_mut().map(|charge| charge.split(bytes));
        }
        self.reserve.give_back(std::mem::take(&mut self.chunks));
    }
}

pub(super) fn chunks_of(memories: Vec<PhysicalMemory>, pasts: Vec<Past>) -> Vec<Chunk> {
    let chunk = |(memory, past)| Chunk {
        memory,
        charge: None,
        past,
    };
    memories.into_iter().zip(pasts).map(chunk).collect()
}

#[cfg(test)]
mod tests;
