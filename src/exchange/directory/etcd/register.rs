//! The task that keeps an exporter and its names in etcd.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use etcd_client::{Client, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::super::exporter::Exporter;
use super::super::keys::value;
use super::super::registration::{Registration, RegistrationState};
use super::{Etcd, runtime};
use crate::Result;
use crate::per_driver::lock;
use crate::share::InstanceId;

/// Changes in one transaction: etcd allows 128.
const BATCH: usize = 100;

/// The program's end of a registration.
pub(in super::super) struct Active {
    wanted: Arc<Wanted>,
    state: watch::Receiver<RegistrationState>,
    /// Dropping it ends the task; with a sender in it, the task reports how the end went.
    close: oneshot::Sender<oneshot::Sender<Result<()>>>,
}

/// The entries that etcd should have.
struct Wanted {
    names: Mutex<BTreeSet<String>>,
    changed: Notify,
    state: watch::Sender<RegistrationState>,
}

impl Wanted {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        lock(&self.names)
    }
}

impl Active {
    pub fn change(&self, change: impl FnOnce(&mut BTreeSet<String>) -> bool) {
        // Under the lock, so that the task cannot report names as registered that it has not seen.
        let mut names = self.wanted.lock();
        if change(&mut names) {
            self.wanted.state.send_if_modified(|state| {
                let done = *state == RegistrationState::Registered;
                if done {
                    *state = RegistrationState::Pending;
                }
                done
            });
            self.wanted.changed.notify_one();
        }
    }

    pub fn state(&self) -> RegistrationState {
        self.state.borrow().clone()
    }

    pub async fn changed(&self, than: &RegistrationState) -> RegistrationState {
        let mut state = self.state.clone();
        let new = state
            .wait_for(|state| state != than)
            .await
            .map(|new| new.clone());
        // The task ends only after this end.
        new.unwrap_or_else(|_| self.state())
    }

    pub async fn close(self) -> Result<()> {
        let (sender, done) = oneshot::channel();
        // A task that its runtime has dropped cannot revoke; the lease expires by itself.
        let _ = self.close.send(sender);
        done.await.unwrap_or(Ok(()))
    }
}

impl Etcd {
    /// Registers an exporter.
    pub fn register(self: &Arc<Self>, exporter: Exporter) -> Result<Registration> {
        start(Arc::clone(self), exporter, &runtime()?)
    }
}

/// Starts the task.
fn start(etcd: Arc<Etcd>, exporter: Exporter, runtime: &Handle) -> Result<Registration> {
    let Some(instance) = exporter.instance else {
        return Err(crate::Error::invalid("exporter", "no instance"));
    };
    let (sender, state) = watch::channel(RegistrationState::Pending);
    let wanted = Arc::new(Wanted {
        names: Mutex::default(),
        changed: Notify::new(),
        state: sender,
    });
    let (close, closed) = oneshot::channel();
    let task = Task {
        value: value(&exporter),
        etcd,
        instance,
        wanted: wanted.clone(),
        lease: None,
    };
    runtime.spawn(task.run(closed));
    Ok(Registration {
        active: Some(Active {
            wanted,
            state,
            close,
        }),
    })
}

struct Task {
    etcd: Arc<Etcd>,
    instance: InstanceId,
    value: Vec<u8>,
    wanted: Arc<Wanted>,
    /// The lease in etcd, even if it may be lost.
    lease: Option<i64>,
}

impl Task {
    async fn run(mut self, mut closed: oneshot::Receiver<oneshot::Sender<Result<()>>>) {
        let mut failures = 0;
        let done = loop {
            let end = tokio::select! {
                biased;
                done = &mut closed => break done,
                end = self.keep(&mut failures) => end,
            };
            tracing::warn!(error = %end, "the directory is away");
            self.wanted.state.send_replace(RegistrationState::Away(end));
            let pause = self.etcd.pause(failures);
            failures += 1;
            tokio::select! {
                biased;
                done = &mut closed => break done,
                () = tokio::time::sleep(pause) => {}
            }
        };
        let revoked = match self.lease {
            Some(lease) => self.revoke(lease).await,
            None => Ok(()),
        };
        if let Ok(done) = done {
            let _ = done.send(revoked);
        }
    }

    /// Registers, and keeps the registration alive until that fails.
    async fn keep(&mut self, failures: &mut u32) -> crate::Error {
        match self.register(failures).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn register(&mut self, failures: &mut u32) -> Result<std::convert::Infallible> {
        let ttl = i64::try_from(self.etcd.options.lease.as_secs()).unwrap_or(i64::MAX);
        let grant = self
            .etcd
            .call(|mut client| async move { client.lease_grant(ttl, None).await })
            .await?;
        let before = self.lease.replace(grant.id());
        let lease = grant.id();
        let (mut keeper, mut answers) = self
            .etcd
            .call(|mut client| async move { client.lease_keep_alive(lease).await })
            .await?;
        // An existing key moves to the new lease and keeps its place in the order.
        self.put_exporter(lease).await?;
        let mut there = BTreeSet::new();
        let mut beat = interval(beat(grant.ttl()));
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.put_names(lease, &mut there, &mut keeper, &mut answers)
            .await?;
        if let Some(before) = before {
            // Revoking it also removes names that were taken out meanwhile. It may have expired already.
            let _ = self.revoke(before).await;
        }
        tracing::debug!(instance = %self.instance, names = there.len(), "registered");
        *failures = 0;
        loop {
            tokio::select! {
                () = self.wanted.changed.notified() => {
                    self.put_names(lease, &mut there, &mut keeper, &mut answers).await?;
                }
                _ = beat.tick() => self.beat(&mut keeper, &mut answers).await?,
            }
        }
    }

    async fn put_exporter(&self, lease: i64) -> Result<()> {
        let key = self.etcd.keys.exporter(self.instance);
        let value = self.value.clone();
        let options = PutOptions::new().with_lease(lease);
        self.etcd
            .call(|mut client| async move { client.put(key, value, Some(options)).await })
            .await?;
        Ok(())
    }

    /// Changes etcd's entries from `there` to the wanted ones.
    async fn put_names(
        &self,
        lease: i64,
        there: &mut BTreeSet<String>,
        keeper: &mut LeaseKeeper,
        answers: &mut LeaseKeepAliveStream,
    ) -> Result<()> {
        let mut batches = 0_u64;
        loop {
            let changes: BTreeMap<String, bool> = {
                let wanted = self.wanted.lock();
                let new = wanted.difference(there).map(|name| (name.clone(), true));
                let old = there.difference(&wanted).map(|name| (name.clone(), false));
                let changes: BTreeMap<_, _> = new.chain(old).take(BATCH).collect();
                if changes.is_empty() {
                    self.wanted
                        .state
                        .send_replace(RegistrationState::Registered);
                    return Ok(());
                }
                changes
            };
            let operations: Vec<_> = changes
                .iter()
                .map(|(name, put)| {
                    let key = self.etcd.keys.name(name, self.instance);
                    if *put {
                        let options = PutOptions::new().with_lease(lease);
                        TxnOp::put(key, self.value.clone(), Some(options))
                    } else {
                        TxnOp::delete(key, None)
                    }
                })
                .collect();
            self.etcd
                .call(|mut client| async move { client.txn(Txn::new().and_then(operations)).await })
                .await?;
            for (name, put) in changes {
                if put {
                    there.insert(name);
                } else {
                    there.remove(&name);
                }
            }
            batches += 1;
            if batches.is_multiple_of(16) {
                // Many names take longer than the lease.
                self.beat(keeper, answers).await?;
            }
        }
    }

    /// Keeps the lease alive.
    async fn beat(
        &self,
        keeper: &mut LeaseKeeper,
        answers: &mut LeaseKeepAliveStream,
    ) -> Result<()> {
        let answer = timeout(self.etcd.options.timeout, async {
            keeper.keep_alive().await?;
            answers.message().await
        })
        .await;
        match answer {
            Ok(Ok(Some(answer))) if answer.ttl() > 0 => Ok(()),
            Ok(Ok(Some(_))) => Err(self.etcd.away("the lease has expired")),
            Ok(Ok(None)) => Err(self.etcd.away("the connection has ended")),
            Ok(Err(error)) => Err(self.etcd.failed(&error)),
            Err(_) => Err(self
                .etcd
                .away(format!("no answer in {:?}", self.etcd.options.timeout))),
        }
    }

    async fn revoke(&self, lease: i64) -> Result<()> {
        self.etcd
            .call(|mut client: Client| async move { client.lease_revoke(lease).await })
            .await?;
        Ok(())
    }
}

/// Returns the heartbeat interval: a third of the lease.
fn beat(ttl: i64) -> Duration {
    Duration::from_millis(u64::try_from(ttl).unwrap_or(1).max(1).saturating_mul(1000) / 3)
}
