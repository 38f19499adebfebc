//! The task that keeps an exporter and its names in etcd.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp};
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::super::exporter::Exporter;
use super::super::keys::value;
use super::super::{Registration, RegistrationState, Wanted};
use super::{Etcd, runtime};
use crate::Result;
use crate::share::InstanceId;

/// Changes in one transaction: etcd allows 128.
const BATCH: usize = 100;

impl Etcd {
    /// Registers an exporter.
    pub fn register(self: &Arc<Self>, exporter: &Exporter) -> Result<Registration> {
        let runtime = runtime()?;
        let (close, closed) = oneshot::channel();
        let registration = Registration::new(close);
        let task = Task {
            value: value(exporter),
            etcd: Arc::clone(self),
            instance: exporter.instance,
            wanted: Arc::clone(&registration.wanted),
            lease: None,
        };
        runtime.spawn(task.run(closed));
        Ok(registration)
    }
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
                Err(end) = self.register(&mut failures) => end,
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
    async fn register(&mut self, failures: &mut u32) -> Result<Infallible> {
        let ttl = i64::try_from(self.etcd.options.lease.as_secs()).unwrap_or(i64::MAX);
        let grant = |mut client: Client| async move { client.lease_grant(ttl, None).await };
        let grant = self.etcd.call(grant).await?;
        let before = self.lease.replace(grant.id());
        let lease = grant.id();
        let keep = |mut client: Client| async move { client.lease_keep_alive(lease).await };
        let (mut keeper, mut answers) = self.etcd.call(keep).await?;
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
        let put = |mut client: Client| async move { client.put(key, value, Some(options)).await };
        self.etcd.call(put).await.map(|_| ())
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
                let wanted = self.wanted.names();
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
                match put {
                    true => there.insert(name),
                    false => there.remove(&name),
                };
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
        let revoke = |mut client: Client| async move { client.lease_revoke(lease).await };
        self.etcd.call(revoke).await.map(|_| ())
    }
}

/// Returns the heartbeat interval: a third of the lease.
fn beat(ttl: i64) -> Duration {
    Duration::from_millis(u64::try_from(ttl).unwrap_or(1).max(1).saturating_mul(1000) / 3)
}
