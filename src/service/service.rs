//! The running service.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::audit::AuditFile;
use super::config::peers;
use super::http::{Endpoint, Pages};
use super::reserve::Reserve;
use super::state::ServiceState;
use super::{LineWriter, ServiceConfig};
use crate::exchange::server::ServerStats;
use crate::exchange::{Address, Server, Tls};
use crate::per_driver::lock;
use crate::share::InstanceId;
use crate::{Error, MemoryError, Progress, Result, ShareError};

/// How long a directory may take to forget a service that ends.
const DEREGISTER: Duration = Duration::from_secs(3);

/// A running service. If dropped without [`drain`](Self::drain), it ends at once: its leases end, and
/// holders' mappings stay.
#[derive(Debug)]
pub struct Service {
    pub(super) state: Arc<ServiceState>,
    pub(super) server: Server,
    pub(super) tls: Option<Tls>,
    pub(super) endpoint: Option<Endpoint>,
    /// The current configuration, which a reload changes in part.
    pub(super) config: Mutex<ServiceConfig>,
}

impl Service {
    /// Returns the addresses that clients connect to, with the ports that the kernel chose.
    pub fn addresses(&self) -> Vec<Address> {
        self.server.addresses()
    }

    /// Returns the address of the metrics, if they are served.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.endpoint.as_ref().map(Endpoint::address)
    }

    /// Returns the instance id, which is unique to this run of the service.
    pub fn instance(&self) -> InstanceId {
        self.server.instance()
    }

    /// Returns statistics of its exchange.
    pub fn stats(&self) -> ServerStats {
        self.server.stats()
    }

    /// Returns whether it is ready: it listens, its buffers exist, every reserve has been filled once or has
    /// failed to, and it is not draining.
    pub fn is_ready(&self) -> bool {
        self.state.readiness().is_ok()
    }

    /// Waits until every reserve has been filled once or has failed to; the log has the reason.
    ///
    /// # Cancel safety
    /// It may be dropped and called again.
    pub async fn ready(&self) {
        let mut unready = self.state.unready.clone();
        // If the sender is gone, nothing more is to be filled.
        let _ = unready.wait_for(|count| *count == 0).await;
    }

    /// Returns how many bytes the reserves of all nodes keep ready, of those that they are to keep.
    pub fn reserves(&self) -> Progress {
        let levels = self.state.nodes.values().map(Reserve::levels);
        let (done, total) = levels.fold((0_u64, 0_u64), |(done, total), levels| {
            let done = done.saturating_add(levels.warm);
            (done, total.saturating_add(levels.target))
        });
        Progress::new(done, total)
    }

    /// Returns the metrics in Prometheus' text form (OpenMetrics 1.0); docs/service.md lists them.
    pub fn metrics(&self) -> String {
        self.state.metrics()
    }

    /// Counts the lines that `log` loses in the metric `egmem_dropped_log_lines_total`.
    pub fn count_lost_lines_of(&self, log: &LineWriter) {
        // The first log counts.
        let _ = self.state.log.set(log.clone());
    }

    /// Returns `drain.deadline` of the configuration that applies.
    pub fn drain_deadline(&self) -> Duration {
        lock(&self.config).drain.deadline
    }

    /// Applies the values of `config` that can change at run time: reads certificates again from their files, and
    /// takes over lists of peers and users, and quotas. Returns the keys that differ
    /// and need a restart.
    ///
    /// Ends sessions whose certificates are revoked or no longer trusted, whose users may no longer connect,
    /// and whose peers were on a list and are on none now. Recalls a buffer from peers that are no longer on
    /// its list: see [`Published::set_who`](crate::exchange::server::Published::set_who).
    ///
    /// # Errors
    /// Those of [`ServiceConfig::check`], and [`Error::Tls`]: nothing has changed then.
    /// [`System`](crate::MemoryError::System) if the audit log cannot be reopened: everything else of `config`
    /// applies then, and events go to the old file.
    pub fn reload(&self, config: ServiceConfig) -> Result<Vec<&'static str>> {
        config.check()?;
        if let Some(tls) = &self.tls {
            tls.reload()?;
        }
        // A failure here must not keep the rights that `config` revokes.
        let reopened = self.state.audit.as_ref().map_or(Ok(()), AuditFile::reopen);
        let mut current = lock(&self.config);
        let before = current.clone();
        let mut restart = current.take_over(config);
        // The new rights apply before a session ends: its peer may reconnect at once.
        self.state.set_create(current.create.clone());
        for buffer in &current.buffers {
            self.state.set_who(&buffer.name, buffer.who.clone());
        }
        if self.server.set_peers(peers(&current)).is_err() {
            current.local = before.local.clone();
            restart.push("local");
        }
        let (before, now) = (&before, &*current);
        self.server
            .end_sessions_if(|peer| before.lists(peer) && !now.lists(peer));
        reopened?;
        Ok(restart)
    }

    /// Ends the service: it creates nothing more, asks all holders to release their memory, waits for them,
    /// and gives all memory back.
    ///
    /// # Errors
    /// [`StillHeld`](crate::MemoryError::StillHeld) with the holders that had not released in time: their
    /// mappings stay pinned until they unmap them. Holders that had fallen silent before are only logged. The
    /// service has ended all the same.
    ///
    /// # Cancel safety
    /// If dropped before completion, the service ends at once.
    pub async fn drain(self, within: Duration) -> Result<()> {
        self.state.draining.store(true, Relaxed);
        let until = tokio::time::Instant::now() + within;
        tracing::info!(?within, "draining");
        // First, so that the directory sends no more clients here.
        if let Some(registration) = self.state.take_directory() {
            let closed = tokio::time::timeout(DEREGISTER.min(within), registration.close()).await;
            if closed.is_err() {
                tracing::warn!(
                    "the directory does not answer: its entry for this service will expire"
                );
            }
        }
        let still = self.state.vacate(until).await;
        let left = until.saturating_duration_since(tokio::time::Instant::now());
        // The remaining holders are known already.
        let closed = match self.server.close(left).await {
            Err(Error::Share(ShareError::Memory(MemoryError::StillHeld { .. }))) => Ok(()),
            closed => closed,
        };
        self.state.drop_server();
        let state = Arc::clone(&self.state);
        let audit = state.audit.clone();
        drop(self);
        let released = tokio::task::spawn_blocking(move || {
            state.forget_published();
            state.nodes.values().for_each(|reserve| reserve.stop());
        });
        // A panic of the driver is reported where it happened.
        let _ = released.await;
        if let Some(audit) = audit {
            let flushed = tokio::task::spawn_blocking(move || audit.flush());
            let _ = flushed.await;
        }
        closed?;
        match still.is_empty() {
            true => Ok(()),
            false => Err(Error::Share(ShareError::Memory(MemoryError::StillHeld {
                name: "memory of this service".into(),
                holders: still,
            }))),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.state.draining.store(true, Relaxed);
        self.state.drop_server();
    }
}
