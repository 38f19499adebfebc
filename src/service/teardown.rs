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
            charge
                .iter_mut()
                .for_each(|charge| charge.turn(Use::Unconfirmed));
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
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::super::create::Wanted;
    use super::super::{Service, ServiceConfig};
    use super::*;
    use crate::driver::{Access, NodeId};
    use crate::exchange::protocol::{Create, Texts};
    use crate::exchange::server::HolderState;
    use crate::exchange::{Client, Who};
    use crate::{Driver, Error, Machine};

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_name_that_comes_to_be_while_it_drains_is_asked_back_too() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let text = r#"
            listen = ["tcp://127.0.0.1:0"]
            [[buffer]]
            name = "late"
            bytes = "1MiB"
            gpu = 0
            who = ["*"]
        "#;
        let config = ServiceConfig::from_toml(text).unwrap();
        let service = Service::start(config, &driver).await.unwrap();
        let address = service.addresses()[0].clone();
        let client = Client::options(address).connect(&driver).await.unwrap();
        let memory = client.fetch("late").go().await.unwrap();
        let state = Arc::clone(&service.state);

        // The state while the memory is being created.
        let insert = |entry| lock(&state.table).names.insert("late".into(), entry);
        let Some(NameState::There(named)) = insert(NameState::Making) else {
            panic!()
        };
        state.draining.store(true, Relaxed);
        let draining = Arc::clone(&state);
        let until = Instant::now() + PATIENCE;
        let mut vacate = Box::pin(async move { draining.vacate(until).await });
        let waited = tokio::time::timeout(Duration::ZERO, &mut vacate).await;
        waited.expect_err("there is a name to come");
        insert(NameState::There(Arc::clone(&named)));
        state.made.send_replace(());
        let published = lock(&named.published).clone().unwrap();
        let holder = async {
            let end = Instant::now() + PATIENCE;
            while published.importers()[0].state != HolderState::Withdrawing {
                assert!(Instant::now() < end, "it is not asked back");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            memory.release().await.unwrap();
        };
        let (still, ()) = tokio::join!(vacate, holder);
        assert!(still.is_empty(), "{still:?}");

        // No peer can create a name of the configuration, published or not.
        let ask = |name: &str, bytes| Create {
            name: name.into(),
            bytes,
            node: Some(NodeId(0)),
            peers: Texts::new(),
        };
        let any_name = super::super::PrefixConfig {
            peers: Who::anyone(),
            names: vec![String::new()],
        };
        let create = super::super::CreateConfig {
            who: Who::anyone(),
            node: None,
            peer_bytes: 1 << 30,
            peer_names: 9,
            forgive_after: PATIENCE,
            prefixes: vec![any_name],
        };
        state.set_create(Some(create));
        state.draining.store(false, Relaxed);
        let late = lock(&state.table).names.remove("late");
        let refused = state.create(&PeerName::Local, &ask("late", 1), &AtomicBool::new(false));
        assert_eq!(refused.unwrap_err().0, Refusal::Exists);
        lock(&state.table)
            .names
            .extend(late.map(|late| ("late".to_owned(), late)));

        // A reserve that has ended says so.
        state.nodes.values().for_each(Reserve::stop);
        let refused = state.create(&PeerName::Local, &ask("more", 1), &AtomicBool::new(false));
        assert_eq!(refused.unwrap_err().0, Refusal::Closing);
        state.draining.store(true, Relaxed);

        // Nothing more is created.
        let wanted = Wanted {
            name: "later",
            bytes: 1,
            node: NodeId(0),
            owner: None,
            who: Who::anyone(),
            open: true,
            access: Access::ReadWrite,
            probe: false,
        };
        let error = state.publish(&wanted, &AtomicBool::new(false)).unwrap_err();
        let closing =
            matches!(&error, Error::Refused { reason, .. } if *reason == Refusal::Closing);
        assert!(closing, "{error}");
        drop((published, named));
        client.close().await;
        service.drain(PATIENCE).await.unwrap();
        // Although tasks may still hold the state.
        assert!(driver.sim().unwrap().held().is_empty());
        drop(state);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_creation_that_outlasts_the_drain_leaves_nothing() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let text = r#"
            listen = ["tcp://127.0.0.1:0"]
            [[buffer]]
            name = "a"
            bytes = "1MiB"
            gpu = 0
            who = ["*"]
        "#;
        let config = ServiceConfig::from_toml(text).unwrap();
        let service = Service::start(config, &driver).await.unwrap();
        let state = Arc::clone(&service.state);
        // The drain's last step, while a creation that began before it is in progress.
        state.forget_published();
        let wanted = Wanted {
            name: "late",
            bytes: 1,
            node: NodeId(0),
            owner: None,
            who: Who::anyone(),
            open: true,
            access: Access::ReadWrite,
            probe: false,
        };
        let error = state.publish(&wanted, &AtomicBool::new(false)).unwrap_err();
        let closing =
            matches!(&error, Error::Refused { reason, .. } if *reason == Refusal::Closing);
        assert!(closing, "{error}");
        assert!(lock(&state.table).names.is_empty());
        service.drain(PATIENCE).await.unwrap();
        assert!(driver.sim().unwrap().held().is_empty());
        drop(state);
    }
}
