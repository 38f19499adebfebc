//! How names end, and how their memory is released.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::quota::{Charge, Use};
use super::reserve::Chunk;
use super::reuse_policy::Past;
use super::state::{Named, Phase, Refused, ServiceState, blocking};
use crate::Refusal;
use crate::exchange::PeerName;
use crate::exchange::server::{Holder, HolderState, UnconfirmedRelease};
use crate::per_driver::lock;
use crate::share::Shared;
use crate::vmm::PhysicalMemory;

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
    /// Waits until no peer holds it. Returns `false` if a holder that is not heard of may still have it mapped.
    async fn wait_for_holders(&self, mut wait: Duration) -> bool {
        let Some(published) = self.published() else {
            return false;
        };
        loop {
            if published.vacate(wait).await.is_ok() {
                // Memory of a process that died is not reused.
                return !published.left_by_dead();
            }
            // The last one may have let go just now. If not, no holder is left that the server can hear of: all are silent, some
            // perhaps no longer listed, or the server has ended.
            let all_silent = published.importers().iter().all(is_silent);
            if all_silent && published.vacate(Duration::ZERO).await.is_err() {
                let name = &self.wanted.name;
                tracing::warn!(name, "a holder may still have it mapped");
                return false;
            }
            wait = ASK_AGAIN;
        }
    }

    /// Asks the holders to release the name by `until`, once it exists; describes those that did not. Does not wait for
    /// holders that had fallen silent before, but logs them.
    async fn unpublish_and_wait(&self, until: Instant) -> Vec<String> {
        let name = &self.wanted.name;
        if timeout_at(until, self.reach(Phase::There)).await.is_err() {
            // The server refuses to publish memory that is not created by then.
            tracing::warn!(name, "it was still being created at the deadline");
        }
        let Some(published) = self.published() else {
            return Vec::new();
        };
        let within = until.saturating_duration_since(Instant::now());
        let mut before = published.importers();
        before.retain(is_silent);
        if published.vacate(within).await.is_ok() {
            return Vec::new();
        }
        let mut still = Vec::new();
        for holder in published.importers() {
            if before.iter().any(|silent| silent.lease == holder.lease) {
                tracing::warn!(name, %holder, "a holder that fell silent may still have it mapped");
                continue;
            }
            let how = if is_silent(&holder) {
                ": silent, it may still have it mapped"
            } else {
                ""
            };
            still.push(format!("{holder} ('{name}'{how})"));
        }
        still
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
        let named = lock(&self.names).get(name).cloned();
        let shown = |named: &Named| named.published().is_some_and(|it| it.is_shown_to(peer));
        let named = match named.filter(|named| named.phase() > Phase::Making) {
            Some(named) if named.wanted.owner.as_ref() == Some(peer) => named,
            Some(named) if named.wanted.owner.is_none() && shown(&named) => {
                return Err((Refusal::Configured, "no request deletes it".into()));
            }
            // A name that is not shown to a peer does not exist for it; a refusal does not name the owner.
            _ => {
                let why = "this peer has created no such name";
                return Err((Refusal::NotFound, why.into()));
            }
        };
        let begins = named.phase.send_if_modified(|phase| {
            let begins = *phase == Phase::There;
            *phase = Phase::Ending.max(*phase);
            begins
        });
        if begins {
            // `publish` adds a name under the same lock, and a new one of this name only after this one has ended.
            let names = lock(&self.names);
            if let Some(directory) = &*lock(&self.directory) {
                directory.remove(name);
            }
            drop(names);
            let (state, named) = (Arc::clone(self), Arc::clone(&named));
            tokio::spawn(async move { state.end(&named, wait).await });
        }
        let ended = named.reach(Phase::Ended);
        let wait = wait.max(Duration::from_millis(100));
        if timeout(wait, ended).await.is_err() {
            let importers = named.published().map_or(Vec::new(), |it| it.importers());
            let mut holders: Vec<_> = importers.iter().map(Holder::to_string).collect();
            holders.dedup();
            holders.truncate(16);
            let why = if holders.is_empty() {
                "its memory is still in use in the service".into()
            } else {
                format!("held by {}", holders.join(", "))
            };
            return Err((Refusal::TimedOut, why));
        }
        self.deleted.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Ends a name: waits for its holders, and returns its memory to the reserve or the driver. Afterwards keeps
    /// charging for memory that may still be in use.
    async fn end(self: &Arc<Self>, named: &Arc<Named>, wait: Duration) {
        let clean = named.wait_for_holders(wait).await;
        // Memory that returns while the server ends is never handed out again, so it need not be kept.
        let clean = clean && !self.draining.load(Relaxed);
        let (held, reserve) = (lock(&named.held).take(), self.nodes.get(&named.wanted.node));
        let (Some(mut held), Some(reserve)) = (held, reserve) else {
            return self.free_name(named);
        };
        let mut unconfirmed = None;
        if !clean {
            held.pasts.fill(Past::Tainted);
            let release = held.published.leave();
            // It goes back to the driver, but counts until its holders have confirmed.
            if let Some(mut charge) = held.charge.take() {
                charge.turn(Use::Unconfirmed);
                let peers = release.peers();
                // A silent holder is charged, unless the owner is silent itself: it can do nothing about another peer's silence.
                let is_owner = |peer: &PeerName| named.wanted.owner.as_ref() == Some(peer);
                if let Some(silent) = peers.first().filter(|_| !peers.iter().any(is_owner)) {
                    charge.transfer(silent);
                }
                unconfirmed = Some((release, charge));
            }
        }
        let shared = held.published.shared().ok();
        drop(held.published);
        let mut taking = std::pin::pin!(async { self.take_back(shared?).await });
        let memories = match timeout(IN_USE, &mut taking).await {
            Ok(memories) => memories,
            Err(_) => {
                let name = &named.wanted.name;
                tracing::warn!(name, "its memory is still in use here");
                self.free_name(named);
                taking.await
            }
        };
        match memories {
            Some(memories) => {
                let (state, node) = (Arc::clone(self), named.wanted.node);
                let chunks = Chunk::all(memories, held.pasts);
                // The driver may take seconds for many gigabytes.
                let given_back = blocking("giving memory back", move || {
                    if let Some(reserve) = state.nodes.get(&node) {
                        reserve.give_back(chunks, held.charge);
                    }
                    Ok(())
                });
                // Where the runtime ends meanwhile, the chunks are dropped.
                let _ = given_back.await;
            }
            // Only its count is left.
            None => reserve.lost(held.pinned),
        }
        self.free_name(named);
        if let Some((release, charge)) = unconfirmed {
            self.charge_until_confirmed(named, release, charge).await;
        }
    }

    /// Takes memory back once no code in this process uses it, such as a driver call that does not return; `None` if some
    /// still does when the service drains.
    async fn take_back(&self, mut shared: Shared) -> Option<Vec<PhysicalMemory>> {
        let begun = Instant::now();
        loop {
            match shared.into_physical() {
                Ok(memories) => return Some(memories),
                Err(still) => shared = still,
            }
            let is_late = begun.elapsed() > IN_USE;
            if is_late && self.draining.load(Relaxed) {
                return None;
            }
            sleep(if is_late { RELOADED } else { LOOK }).await;
        }
    }

    /// Keeps charging the memory of a deleted name until no holder can have it mapped, or for as long as
    /// the configuration says.
    async fn charge_until_confirmed(
        &self,
        named: &Named,
        unconfirmed: UnconfirmedRelease,
        charge: Charge,
    ) {
        let (name, bytes) = (&named.wanted.name, charge.bytes());
        let owner = named.wanted.owner.as_ref().map(tracing::field::display);
        let why = "it counts until its silent holders are heard of";
        tracing::warn!(name, owner, bytes, "{why}");
        let begun = Instant::now();
        loop {
            let left = self.forgive_after().saturating_sub(begun.elapsed());
            // A reload may change the time meanwhile.
            match timeout(left.min(RELOADED), unconfirmed.resolved()).await {
                Ok(true) => {
                    return tracing::info!(name, owner, bytes, "no holder has it mapped any more");
                }
                Ok(false) => return,
                Err(_) if left.is_zero() => break,
                Err(_) => {}
            }
        }
        drop(charge);
        self.forgiven_bytes.fetch_add(bytes, Relaxed);
        let why = "it no longer counts, but its silent holders may still have it mapped";
        tracing::warn!(name, owner, bytes, "{why}");
    }

    /// Asks all holders to release their memory by `until`, also holders of names that are still being
    /// created, once they exist. Describes those that did not.
    pub async fn unpublish_and_wait(&self, until: Instant) -> Vec<String> {
        let mut asked = JoinSet::new();
        for named in lock(&self.names).values() {
            let named = Arc::clone(named);
            asked.spawn(async move { named.unpublish_and_wait(until).await });
        }
        let mut still = Vec::new();
        while let Some(done) = asked.join_next().await {
            still.extend(done.unwrap_or_default());
        }
        still
    }
}

#[cfg(test)]
mod tests;
