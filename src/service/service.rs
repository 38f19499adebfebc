//! The running service.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::config::{BufferConfig, CHUNK, MIN_CHUNK, ReserveConfig, peers, server_options};
use super::create::Allocator;
use super::lines::{AuditFile, LineWriter};
use super::metrics::serve;
use super::reserve::{Plan, Reserve};
use super::state::{Phase, ServiceState, Wanted, blocking};
use crate::ServiceConfig;
use crate::backing::Chosen;
use crate::backing::choose::choose_for_others;
use crate::capability::shareable::handle_types_of;
use crate::driver::{Access, AccessDesc, HandleTypes, Location, NodeId};
use crate::exchange::server::ServerStats;
use crate::exchange::{Address, Security, Server, Tls};
use crate::per_driver::lock;
use crate::share::InstanceId;
use crate::size::Bytes;
use crate::topology::{Overcommit, cgroup_room, free_now};
use crate::{Driver, Error, MemoryError, Progress, Result, ShareError, Topology};

/// How long a service that could not be started waits for clients that have fetched from it already.
const GIVE_UP: Duration = Duration::from_secs(1);
/// How long a directory may take to forget a service that ends.
const DEREGISTER: Duration = Duration::from_secs(3);
/// The longest time that a drain has, a year: the clock has an end.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// A running service. If dropped without [`drain`](Self::drain), it ends at once: its leases end, and
/// holders' mappings stay.
#[derive(Debug)]
pub struct Service {
    pub(super) state: Arc<ServiceState>,
    server: Server,
    tls: Option<Tls>,
    endpoint: Option<(SocketAddr, JoinSet<()>)>,
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
    /// Those of [`ServiceConfig::check`]; [`NoSuchNode`](crate::MemoryError::NoSuchNode) and
    /// [`NoSuchGpu`](crate::MemoryError::NoSuchGpu) for a node or GPU that the machine does not have;
    /// [`NodeTooFull`](crate::MemoryError::NodeTooFull) and [`NodesTooFull`](crate::MemoryError::NodesTooFull) for buffers
    /// that do not fit their nodes together, before any memory is pinned; those of creating a buffer; those of [`ServerOptions::start`](crate::exchange::server::ServerOptions::start) and
    /// of loading certificates.
    ///
    /// # Cancel safety
    /// If dropped before completion, everything created is released, once the chunk that is being created exists.
    pub async fn start(config: ServiceConfig, driver: &Driver) -> Result<Self> {
        config.check()?;
        let tls = config.tls.clone().map(Tls::load).transpose()?;
        let security = match &tls {
            Some(tls) => Security::Tls(tls.clone()),
            None if config.plain_anywhere => Security::PlainAnywhere,
            None => Security::Plain,
        };
        let audit = config.audit.as_ref();
        let audit = audit.map(|it| AuditFile::open(&it.file)).transpose()?;
        // One for the names.
        let unready = Arc::new(watch::Sender::new(config.reserves.len() + 1));
        let (plans, driver) = (config.clone(), driver.clone());
        let countdown = Arc::clone(&unready);
        let (nodes, homes) = blocking("starting the reserves", move || {
            let topology = Topology::discover(&driver)?;
            let homes = homes(&plans, &topology)?;
            check_room(&plans, &driver, &homes)?;
            let nodes = reserves(&plans, &driver, (&topology, &homes), &countdown)?;
            Ok((nodes, homes))
        })
        .await?;
        let configured = config.buffers.iter().map(|buffer| buffer.name.clone());
        let state = Arc::new(ServiceState {
            nodes,
            configured: configured.collect(),
            unready,
            audit,
            ..ServiceState::default()
        });
        state.set_create(config.create.clone());

        let endpoint = match &config.metrics {
            Some(metrics) => Some(serve(metrics, Arc::clone(&state)).await?),
            None => None,
        };
        let mut options =
            server_options(&config, security).allocator(Arc::new(Allocator(Arc::clone(&state))));
        if let Some(audit) = &state.audit {
            options = options.audit(audit.subscriber());
        }
        let server = options.start().await?;
        *lock(&state.server) = Some(server.clone());
        // From here on dropping `service` ends it: state and server refer to each other.
        let service = Service {
            state: Arc::clone(&state),
            server,
            tls,
            endpoint,
            config: Mutex::new(config.clone()),
        };
        if let Err(error) = service.fill(config, homes).await {
            // Waits until it no longer listens, so that the caller can start another at once.
            let _ = service.drain(GIVE_UP).await;
            return Err(error);
        }
        state.unready.send_modify(|count| *count -= 1);
        Ok(service)
    }

    /// Registers with the directory and creates the configured buffers, each on its node of `homes`.
    async fn fill(&self, config: ServiceConfig, homes: Vec<NodeId>) -> Result<()> {
        #[cfg(feature = "etcd")]
        if let Some(directory) = &config.directory {
            *lock(&self.state.directory) = Some(directory.register(&self.server)?);
        }
        for (buffer, node) in config.buffers.into_iter().zip(homes) {
            let state = Arc::clone(&self.state);
            let wanted = Wanted {
                name: buffer.name,
                bytes: buffer.bytes,
                node,
                owner: None,
                peers: buffer.who,
                open: true,
                access: buffer.access,
                probe: buffer.probe,
            };
            let publish = move || {
                let client = Arc::new(());
                let (named, claim) = state.claim(wanted)?;
                let publish = |claim| state.publish(&named, claim, &Arc::downgrade(&client));
                // Only a peer's name is waited for.
                claim.map_or(Ok(()), publish)
            };
            blocking("making a buffer", publish).await?;
        }
        Ok(())
    }

    /// Returns the addresses that clients connect to, with the ports that the kernel chose.
    pub fn addresses(&self) -> Vec<Address> {
        self.server.addresses()
    }

    /// Returns the address of the metrics, if they are served.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.endpoint.as_ref().map(|(address, _)| *address)
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
        let mut unready = self.state.unready.subscribe();
        // It does not fail: the state keeps the sender.
        let _ = unready.wait_for(|count| *count == 0).await;
    }

    /// Returns how many bytes the reserves of all nodes keep ready, of those that they are to keep.
    pub fn reserves(&self) -> Progress {
        let levels = self.state.nodes.values().map(|reserve| reserve.levels());
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
            let named = lock(&self.state.names).get(&buffer.name).cloned();
            let own = named.filter(|named| named.wanted.owner.is_none());
            if let Some(published) = own.and_then(|named| named.published()) {
                published.set_who(buffer.who.clone());
            }
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
        let until = Instant::now() + within.min(LONGEST);
        tracing::info!(?within, "draining");
        // First, so that the directory sends no more clients here.
        let registration = lock(&self.state.directory).take();
        if let Some(registration) = registration {
            let closed = tokio::time::timeout(DEREGISTER.min(within), registration.close()).await;
            if closed.is_err() {
                let why = "its entry for this service will expire";
                tracing::warn!("the directory does not answer: {why}");
            }
        }
        let still = self.state.unpublish_and_wait(until).await;
        let left = until.saturating_duration_since(Instant::now());
        // The remaining holders are known already.
        let closed = match self.server.close(left).await {
            Err(Error::Share(ShareError::Memory(MemoryError::StillHeld { .. }))) => Ok(()),
            closed => closed,
        };
        drop(lock(&self.state.server).take());
        let state = Arc::clone(&self.state);
        let audit = state.audit.clone();
        drop(self);
        let released = tokio::task::spawn_blocking(move || {
            let rest = state.forget_names();
            state.nodes.values().for_each(|reserve| reserve.stop());
            rest
        });
        // A panic of the driver is reported where it happened.
        for named in released.await.unwrap_or_default() {
            named.reach(Phase::Ended).await;
        }
        if let Some(audit) = audit {
            let flushed = tokio::task::spawn_blocking(move || audit.flush());
            let _ = flushed.await;
        }
        closed?;
        if still.is_empty() {
            return Ok(());
        }
        let (name, holders) = ("memory of this service".into(), still);
        Err(MemoryError::StillHeld { name, holders }.into())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.state.draining.store(true, Relaxed);
        drop(lock(&self.state.server).take());
    }
}

/// Returns the node of each buffer, in order; fails if the configuration names a node that does not exist.
fn homes(config: &ServiceConfig, topology: &Topology) -> Result<Vec<NodeId>> {
    let reserves = config.reserves.iter().map(|reserve| reserve.node);
    let create = config.create.as_ref().and_then(|create| create.node);
    for node in reserves.chain(create) {
        topology.node(node)?;
    }
    let home = |buffer: &BufferConfig| match (buffer.node, buffer.gpu) {
        (Some(node), _) => Ok(topology.node(node)?.id),
        (None, gpu) => Ok(topology.gpu(gpu.unwrap_or(0))?.host_node()?),
    };
    config.buffers.iter().map(home).collect()
}

/// Checks that the configured buffers fit their nodes, all of a node together. Otherwise the service would pin most of a
/// node, which takes long and starves every other process, before the driver refuses the rest. The driver's memory must fit
/// the control groups' limit too, as everywhere in this library: some drivers charge it to the group.
///
/// # Errors
/// [`NodeTooFull`](MemoryError::NodeTooFull), [`NodesTooFull`](MemoryError::NodesTooFull) by the limit of the control
/// groups, [`InvalidArgument`](MemoryError::InvalidArgument) beyond `node.max_bytes`.
fn check_room(config: &ServiceConfig, driver: &Driver, homes: &[NodeId]) -> Result<()> {
    let mut sums = BTreeMap::<NodeId, u64>::new();
    for (buffer, &node) in config.buffers.iter().zip(homes) {
        let sum = sums.entry(node).or_default();
        *sum = sum.saturating_add(buffer.bytes);
    }
    let (max, overcommit) = (config.node.max_bytes, Overcommit::from_env());
    let lacks = |free: Option<u64>, bytes: u64| {
        let free = free.filter(|_| overcommit == Overcommit::Refuse)?;
        let free = free.saturating_sub(config.node.headroom);
        (bytes > free).then_some(free)
    };
    for (&node, &requested) in &sums {
        if requested > max {
            let (sum, max) = (Bytes(requested), Bytes(max));
            let why = format!(
                "the buffers of node {node} have {sum} together, `node.max_bytes` is {max}"
            );
            return Err(Error::invalid("service configuration", why));
        }
        if let Some(free) = lacks(free_now(driver, node), requested) {
            return Err(MemoryError::NodeTooFull {
                node,
                requested,
                free,
            }
            .into());
        }
    }
    let requested = sums.values().copied().fold(0, u64::saturating_add);
    if let Some(free) = lacks(cgroup_room(driver), requested) {
        let nodes = sums.into_keys().collect();
        return Err(MemoryError::NodesTooFull {
            nodes,
            requested,
            free,
        }
        .into());
    }
    Ok(())
}

/// Decides how a node's memory is shared and what it is. `homes` are the nodes of the configured buffers.
fn memory_of(
    config: &ServiceConfig,
    driver: &Driver,
    homes: &[NodeId],
    node: NodeId,
) -> Result<(HandleTypes, Chosen)> {
    let asked = config.node.backing;
    let shareable = handle_types_of(driver, node.into(), asked)?;
    if let Some(why) = &shareable.no_fabric {
        tracing::info!(%node, %why, "no fabric handles");
    }
    let handle_types = shareable.handle_types;
    // A chunk may be any buffer's of the node.
    let mut buffers = config.buffers.iter().zip(homes);
    let is_read = buffers.any(|(buffer, home)| *home == node && buffer.access == Access::Read);
    let read = [AccessDesc::new(Location::Host, Access::Read)];
    // Without a list, of the CPU and all GPUs.
    let access: &[AccessDesc] = if is_read { &read } else { &[] };
    let chosen = choose_for_others(driver, asked, (node.into(), handle_types), access)?;
    tracing::info!(%node, memory = %chosen, "decided what memory is");
    Ok((handle_types, chosen))
}

/// Creates a reserve for every host node; one without a configuration keeps nothing ready.
fn reserves(
    config: &ServiceConfig,
    driver: &Driver,
    (topology, homes): (&Topology, &[NodeId]),
    unready: &Arc<watch::Sender<usize>>,
) -> Result<BTreeMap<NodeId, Reserve>> {
    let mut reserves = BTreeMap::new();
    for node in topology.nodes() {
        let mut asked = config.reserves.iter();
        let asked = asked.find(|reserve| reserve.node == node.id);
        let (handle_types, backing) = match memory_of(config, driver, homes, node.id) {
            Ok(memory) => memory,
            Err(error) if asked.is_none() => {
                tracing::warn!(node = %node.id, %error, "memory of this node cannot be shared");
                continue;
            }
            Err(error) => return Err(error),
        };
        let empty = ReserveConfig {
            node: node.id,
            bytes: 0,
            chunk: CHUNK,
            min_chunk: MIN_CHUNK,
        };
        let plan = Plan {
            handle_types,
            backing,
            reserve: asked.cloned().unwrap_or(empty),
            limits: config.node.clone(),
            reuse: config.reuse.clone(),
            overcommit: Overcommit::from_env(),
            unready: asked.map(|_| Arc::clone(unready)),
        };
        reserves.insert(node.id, Reserve::start(driver, plan)?);
    }
    Ok(reserves)
}
