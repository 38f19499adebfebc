//! How names end, and how their memory is released.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::free_chunks::HasBytes;
use super::named::{Named, let_go};
use super::quota::{Charge, Use};
use super::reserve::{Chunk, Reserve};
use super::reuse_policy::Past;
use super::state::{NameState, No, ServiceState};
use crate::Refusal;
use crate::exchange::PeerName;
use crate::exchange::server::UnconfirmedRelease;
use crate::per_driver::lock;
use crate::share::Shared;
use crate::vmm::PhysicalMemory;

/// How often to check whether the configuration has changed.
const RELOADED: Duration = Duration::from_secs(1);

impl ServiceState {
    /// Ends one of `peer`'s names. At the deadline the name stays closed and continues to end.
    pub async fn delete(
        self: &Arc<Self>,
        peer: &PeerName,
        name: &str,
        wait: Duration,
    ) -> Result<(), No> {
        let there = match lock(&self.table).names.get(name) {
            Some(NameState::There(named)) => Some(Arc::clone(named)),
            _ => None,
        };
        let named = match there {
            Some(named) if named.owner.as_ref() == Some(peer) => named,
            Some(named) if named.owner.is_none() && named.is_shown_to(peer) => {
                return Err((Refusal::Configured, "no request deletes it".into()));
            }
            // A name that is not shown to a peer does not exist for it; a refusal does not name the owner.
            _ => {
                return Err((
                    Refusal::NotFound,
                    "this peer has created no such name".into(),
                ));
            }
        };
        if let Some(directory) = &*lock(&self.directory) {
            directory.remove(name);
        }
        self.end(&named, wait);
        let mut ended = named.ended.subscribe();
        let done = ended.wait_for(|ended| *ended);
        match tokio::time::timeout(wait.max(Duration::from_millis(100)), done).await {
            Ok(_) => {
                self.asked.deleted.fetch_add(1, Relaxed);
                Ok(())
            }
            Err(_) => Err((
                Refusal::TimedOut,
                format!("held by {}", named.holders().join(", ")),
            )),
        }
    }

    /// Begins to end a name, unless that has begun.
    fn end(self: &Arc<Self>, named: &Arc<Named>, wait: Duration) {
        if named.ending.swap(true, Relaxed) {
            return;
        }
        let (state, named) = (Arc::clone(self), Arc::clone(named));
        tokio::spawn(async move {
            let clean = named.withdraw(wait).await;
            // Memory that returns while the server ends is never handed out again, so it need not be kept.
            let clean = clean && !state.draining.load(Relaxed);
            state.take_back(&named, clean).await;
            named.ended.send_replace(true);
        });
    }

    /// Returns the memory of a name that has ended to the reserve or the driver.
    async fn take_back(self: &Arc<Self>, named: &Arc<Named>, clean: bool) {
        let published = lock(&named.published).take();
        let release = match &published {
            Some(published) if !clean => Some(published.leave()),
            _ => None,
        };
        let shared = published.and_then(|published| published.shared().ok());
        let mut pasts = named.pasts.clone();
        if !clean {
            pasts.iter_mut().for_each(Past::taint);
        }
        let mut charge = lock(&named.charge).take();
        let unconfirmed = release.map(|release| {
            // It goes back to the driver, but counts until its holders have confirmed.
            let mut charge = charge.take();
            if let Some(charge) = &mut charge {
                charge.turn(Use::Unconfirmed);
                // Its owner can do nothing about another peer's silence.
                let peers = release.peers();
                if let Some(silent) = peers.first()
                    && !peers.iter().any(|peer| named.owner.as_ref() == Some(peer))
                {
                    self.ledger.transfer(charge, silent);
                }
            }
            (release, charge)
        });
        let mut stuck = None;
        match (self.nodes.get(&named.node), shared) {
            (Some(reserve), Some(shared)) => match let_go(shared).await {
                Ok(memories) => {
                    let chunks = chunks_of(memories, pasts);
                    give_back(reserve, chunks, charge.take(), named.extra);
                }
                Err(shared) => stuck = Some(shared),
            },
            (Some(reserve), None) => reserve.lost(named.pinned),
            (None, _) => {}
        }
        lock(&self.table).names.remove(&named.name);
        if stuck.is_some() || unconfirmed.is_some() {
            let (state, named) = (Arc::clone(self), Arc::clone(named));
            tokio::spawn(async move {
                if let Some(shared) = stuck {
                    state.outlast(&named, shared).await;
                }
                drop(charge);
                if let Some((release, charge)) = unconfirmed {
                    state.charge_until_confirmed(&named, release, charge).await;
                }
            });
        }
    }

    /// Waits until no code in this process uses the memory of a deleted name, such as a driver call that
    /// does not return, and gives it back to the driver.
    async fn outlast(&self, named: &Named, mut shared: Shared) {
        let name = &named.name;
        tracing::warn!(
            name,
            "its memory is still in use here, and counts until it is not"
        );
        while !self.draining.load(Relaxed) {
            tokio::time::sleep(RELOADED).await;
            match shared.into_physical() {
                Ok(memories) => {
                    drop(memories);
                    break;
                }
                Err(still) => shared = still,
            }
        }
        if let Some(reserve) = self.nodes.get(&named.node) {
            reserve.lost(named.pinned);
        }
    }

    /// Keeps charging the memory of a deleted name until no holder can have it mapped, or for as long as
    /// the configuration says.
    async fn charge_until_confirmed(
        &self,
        named: &Named,
        unconfirmed: UnconfirmedRelease,
        charge: Option<Charge>,
    ) {
        let (Some(owner), Some(charge)) = (&named.owner, charge) else {
            return;
        };
        let (name, bytes) = (&named.name, charge.bytes());
        tracing::warn!(name, %owner, bytes, "it counts until its silent holders are heard of");
        tokio::select! {
            resolved = unconfirmed.resolved() => {
                drop(charge);
                if resolved {
                    tracing::info!(name, %owner, bytes, "no holder has it mapped any more");
                }
            }
            after = self.forgiven() => {
                drop(charge);
                self.asked.forgiven_bytes.fetch_add(bytes, Relaxed);
                tracing::warn!(
                    name, %owner, bytes, ?after,
                    "it no longer counts, but its silent holders may still have it mapped"
                );
            }
        }
    }

    /// Waits until an unconfirmed release that begins now expires; a reload may change the time meanwhile.
    async fn forgiven(&self) -> Duration {
        let begun = Instant::now();
        loop {
            let after = self.forgive_after();
            let left = after.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return after;
            }
            tokio::time::sleep(left.min(RELOADED)).await;
        }
    }

    /// Asks all holders to release their memory by `until`, also holders of names that are still being
    /// created, once they exist. Describes those that did not.
    pub async fn vacate(&self, until: Instant) -> Vec<String> {
        let mut made = self.made.subscribe();
        let mut asked = JoinSet::new();
        let mut seen = HashSet::new();
        loop {
            made.borrow_and_update();
            let (there, making) = self.all();
            for named in there {
                if seen.insert(named.name.clone()) {
                    let left = until.saturating_duration_since(Instant::now());
                    asked.spawn(async move { named.vacate(left).await });
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

/// Gives chunks back; the last one may have been added for probes. Their charges go with them; the name's
/// charge ends.
pub(super) fn give_back(
    reserve: &Reserve<PeerName>,
    mut chunks: Vec<Chunk<PeerName>>,
    mut charge: Option<Charge>,
    extra: bool,
) {
    for chunk in &mut chunks {
        let bytes = chunk.bytes();
        chunk.charge = charge.as_mut().map(|charge| charge.split(bytes));
    }
    if let Some(chunk) = chunks.pop_if(|_| extra) {
        reserve.discard_extra(chunk);
    }
    reserve.give_back(chunks);
}

pub(super) fn chunks_of(
    memories: Vec<PhysicalMemory>,
    pasts: Vec<Past<PeerName>>,
) -> Vec<Chunk<PeerName>> {
    let chunk = |(memory, past)| Chunk {
        memory,
        charge: None,
        past,
    };
    memories.into_iter().zip(pasts).map(chunk).collect()
}

#[cfg(test)]
mod tests;
