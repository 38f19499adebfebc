//! A node's allocator service: its memory outlives the processes that use it.
//!
//! It creates the buffers of its configuration and, within quotas, those that clients ask for. It keeps a
//! warm reserve, so that a client gets gigabytes in the time of importing and granting, not of pinning. The
//! command `egmem serve` runs it; docs/service.md is its manual.
//!
//! ```
//! use egmem::exchange::Client;
//! use egmem::service::{Service, ServiceConfig};
//! use egmem::{Driver, Machine};
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
//! let config = ServiceConfig::from_toml(
//!     r#"
//!     listen = ["tcp://127.0.0.1:0"]
//!     [[buffer]]
//!     name = "weights"
//!     bytes = "4MiB"
//!     gpu = 0
//!     who = ["*"]
//!     "#,
//! )?;
//! let service = Service::start(config, &driver).await?;
//!
//! let client = Client::options(service.addresses()[0].clone()).connect(&driver).await?;
//! let weights = client.fetch("weights").go().await?;
//! assert_eq!(weights.get::<u64>(0)?, 0);
//! weights.release().await?;
//! service.drain(std::time::Duration::from_secs(5)).await?;
//! # Ok::<(), egmem::Error>(())
//! # }).unwrap();
//! ```
#![deny(missing_docs)]

mod audit;
mod config;
mod create;
mod free_chunks;
mod http;
mod line_writer;
mod metrics;
mod named;
mod quota;
mod report;
mod reserve;
mod reuse_policy;
mod scrub;
mod start;
mod state;
mod teardown;
mod units;

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[cfg(test)]
use egmem_core::Machine;
use egmem_core::driver::Refusal;
use egmem_core::{
    Driver, Error, Result, Stream, Topology, driver, memory, per_driver, size, text, topology, vmm,
};
use egmem_exchange as exchange;
use egmem_share as share;

pub use config::{
    AuditConfig, BufferConfig, CreateConfig, DirectoryConfig, DrainConfig, GroupsConfig,
    LeaseConfig, LocalConfig, MetricsConfig, NodeConfig, PrefixConfig, ReserveConfig, ReuseConfig,
    ServiceConfig, TlsConfig,
};
pub use line_writer::LineWriter;
pub use reuse_policy::Reuse;
pub use scrub::Scrubber;

use crate::exchange::server::ServerStats;
use crate::exchange::{Address, Server, Tls};
use crate::per_driver::lock;
use crate::share::InstanceId;
use audit::AuditFile;
use http::Endpoint;
use state::State;

/// How long a directory may take to forget a service that ends.
const DEREGISTER: Duration = Duration::from_secs(3);

/// A running service. If dropped without [`drain`](Self::drain), it ends at once: its leases end, and
/// holders' mappings stay.
#[derive(Debug)]
pub struct Service {
    state: Arc<State>,
    server: Server,
    tls: Option<Tls>,
    endpoint: Option<Endpoint>,
    /// The current configuration, which a reload changes in part.
    config: Mutex<ServiceConfig>,
}

impl Service {
    /// Starts a service. When this returns, its buffers exist and it listens; its reserves may still be
    /// filling ([`ready`](Self::ready) waits for them).
    ///
    /// It needs a tokio runtime with timers and I/O; driver calls run in separate threads.
    ///
    /// # Errors
    /// Those of [`ServiceConfig::check`]; [`Error::NoSuchNode`] and [`Error::NoSuchGpu`] for what the machine
    /// does not have; those of creating a buffer; those of
    /// [`ServerOptions::start`](crate::exchange::server::ServerOptions::start) and of loading certificates.
    ///
    /// # Cancel safety
    /// If dropped before completion, everything created is released.
    pub async fn start(config: ServiceConfig, driver: &Driver) -> Result<Self> {
        start::start(config, driver).await
    }

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

    /// Returns the metrics in Prometheus' text form (OpenMetrics 1.0); docs/service.md lists them.
    pub fn metrics(&self) -> String {
        metrics::encode(self.state.snapshot())
    }

    /// Counts the lines that `log` loses in the metric `egmem_dropped_log_lines_total`.
    pub fn count_lost_lines_of(&self, log: &LineWriter) {
        // The first log counts.
        let _ = self.state.log.set(log.clone());
    }

    /// Applies what can change at run time from `config`: reads certificates again from their files, and
    /// takes over lists of peers and users, rights to join groups and quotas. Returns the keys that differ
    /// and need a restart.
    ///
    /// Ends sessions whose certificates are revoked or no longer trusted, whose users may no longer connect,
    /// and whose peers were on a list and are on none now. Recalls a buffer from peers that are no longer on
    /// its list: see [`Published::set_who`](crate::exchange::server::Published::set_who).
    ///
    /// # Errors
    /// Those of [`ServiceConfig::check`], and [`Error::Tls`]: nothing has changed then. [`Error::System`] if
    /// the audit log cannot be reopened: everything else of `config` applies then, and events go to the old
    /// file.
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
        // The new rights apply before a session ends: its peer may reconnect at once. The patterns of groups
        // have been checked.
        self.server.set_groups(current.group_rights())?;
        self.state.set_create(current.create.clone());
        for buffer in &current.buffers {
            self.state.set_who(&buffer.name, buffer.who.clone());
        }
        if self.server.set_peers(start::peers(&current)).is_err() {
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
    /// [`Error::StillHeld`] with the holders that had not released in time: their mappings stay pinned until
    /// they unmap them. Holders that had fallen silent before are only logged. The service has ended all the
    /// same.
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
            Err(Error::StillHeld { .. }) => Ok(()),
            closed => closed,
        };
        self.state.drop_server();
        let state = Arc::clone(&self.state);
        let audit = state.audit.clone();
        drop(self);
        let released = tokio::task::spawn_blocking(move || {
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
            false => Err(Error::StillHeld {
                name: "memory of this service".into(),
                holders: still,
            }),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.state.draining.store(true, Relaxed);
        self.state.drop_server();
    }
}
