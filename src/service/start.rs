//! Starts a service.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

use super::Service;
use super::audit::AuditFile;
use super::config::{self, BufferConfig, ServiceConfig, TlsConfig, server_options};
use super::create::Attempt;
use super::etcd;
use super::http::Endpoint;
use super::reserve::{OnFilled, Plan, Reserve};
use super::state::ServiceState;
use super::wanted::{Abandoned, Wanted};
use crate::backing::Chosen;
use crate::backing::choose::choose_for_others;
use crate::capability::shareable::handle_types_of;
use crate::driver::{Access, AccessDesc, HandleTypes, Location, NodeId};
use crate::exchange::protocol::Create;
use crate::exchange::server::{Allocate, Allocation};
use crate::exchange::{PeerName, Security, Tls, TlsFiles};
use crate::{Driver, Error, MemoryError, Refusal, Result, ShareError, Topology};

/// How long a service that could not be started waits for clients that have fetched from it already.
const GIVE_UP: Duration = Duration::from_secs(1);

/// Counts down when a reserve has been filled for the first time.
#[derive(Debug)]
struct Countdown {
    node: NodeId,
    unready: Arc<watch::Sender<usize>>,
}

impl OnFilled for Countdown {
    fn filled(&self, result: &Result<()>) {
        let node = self.node;
        match result {
            Ok(()) => tracing::info!(%node, "the reserve is full"),
            Err(error) => tracing::warn!(%node, %error, "ready without a full reserve"),
        }
        self.unready.send_modify(|count| *count -= 1);
    }
}

/// The service as the exchange's server sees it.
pub(super) struct Allocator(pub Arc<ServiceState>);

impl Allocate for Allocator {
    /// [`ServiceState::create`] checks this, and counts and logs its refusals.
    fn may_create(&self, _: &PeerName, _: &str) -> Result<(), (Refusal, String)> {
        Ok(())
    }

    fn may_fetch(&self, peer: &PeerName) -> Result<(), (Refusal, String)> {
        if !self.0.ledger.is_silent_beyond(peer) {
            return Ok(());
        }
        let why = "deleted memory that silent processes of this peer may still have mapped uses up its quota";
        Err((Refusal::Quota, why.into()))
    }

    fn create<'a>(&'a self, peer: &'a PeerName, ask: &'a Create) -> Allocation<'a> {
        let (state, peer, ask) = (Arc::clone(&self.0), peer.clone(), ask.clone());
        Box::pin(async move {
            let request = Arc::new((peer, ask));
            // Set when this future is dropped: the creation in progress is then undone.
            let abandoned = Abandoned::default();
            loop {
                // Before the attempt, so that no change after it is missed.
                let mut made = state.made.subscribe();
                let (state, request) = (Arc::clone(&state), Arc::clone(&request));
                let flag = abandoned.flag();
                let turn = state.creations.turn(&request.0).await;
                let attempt = move || {
                    let attempt = state.create(&request.0, &request.1, &flag);
                    drop(turn);
                    attempt
                };
                let attempt = tokio::task::spawn_blocking(attempt).await;
                match attempt
                    .unwrap_or_else(|_| Err((Refusal::Internal, "it has failed".into())))?
                {
                    Attempt::Published => return Ok(()),
                    // This future holds the state, and so the sender: the wait cannot fail.
                    Attempt::BeingMade => drop(made.changed().await),
                }
            }
        })
    }

    fn delete<'a>(&'a self, peer: &'a PeerName, name: &'a str, wait: Duration) -> Allocation<'a> {
        Box::pin(self.0.delete(peer, name, wait))
    }
}

/// Runs blocking code outside the runtime.
async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(Error::failed(what, error.to_string())))
}

impl Service {
    /// Starts a service. When this returns, its buffers exist and it listens; its reserves may still be
    /// filling ([`ready`](Self::ready) waits for them).
    ///
    /// It needs a tokio runtime with timers and I/O; driver calls run in separate threads.
    ///
    /// # Errors
    /// Those of [`ServiceConfig::check`]; [`NoSuchNode`](crate::MemoryError::NoSuchNode) and
    /// [`NoSuchGpu`](crate::MemoryError::NoSuchGpu) for a node or GPU that the machine does not have; those of
    /// creating a buffer; those of [`ServerOptions::start`](crate::exchange::server::ServerOptions::start) and
    /// of loading certificates.
    ///
    /// # Cancel safety
    /// If dropped before completion, everything created is released.
    pub async fn start(config: ServiceConfig, driver: &Driver) -> Result<Self> {
        config.check()?;
        let (security, tls) = security(&config)?;
        let audit = match &config.audit {
            Some(audit) => Some(AuditFile::open(&audit.file)?),
            None => None,
        };
        // One for the names.
        let unready = Arc::new(watch::Sender::new(config.reserves.len() + 1));
        let (plans, driver) = (config.clone(), driver.clone());
        let countdown = Arc::clone(&unready);
        let (nodes, homes) = blocking("starting the reserves", move || {
            let topology = Topology::discover(&driver)?;
            let homes = homes(&plans, &topology)?;
            let nodes = reserves(&plans, &driver, (&topology, &homes), &countdown)?;
            Ok((nodes, homes))
        })
        .await?;
        let names = config.buffers.iter().map(|buffer| buffer.name.clone());
        let state = Arc::new(ServiceState::new(
            nodes,
            config.create.clone(),
            names.collect(),
            unready.subscribe(),
            config.limits.frame_fds as usize,
            audit,
        ));

        let endpoint = match &config.metrics {
            Some(metrics) => {
                let pages = Arc::clone(&state);
                Some(Endpoint::start(&metrics.address, metrics.anywhere, pages).await?)
            }
            None => None,
        };
        let mut options =
            server_options(&config, security).allocator(Arc::new(Allocator(Arc::clone(&state))));
        if let Some(audit) = &state.audit {
            options = options.audit(audit.subscriber());
        }
        let server = options.start().await?;
        state.set_server(server.clone());
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
        unready.send_modify(|count| *count -= 1);
        Ok(service)
    }

    /// Registers with the directory and creates the configured buffers, each on its node of `homes`.
    async fn fill(&self, config: ServiceConfig, homes: Vec<NodeId>) -> Result<()> {
        if let Some(directory) = &config.directory {
            let registration = etcd::register(directory, &self.server).await?;
            self.state.set_directory(registration);
        }
        for (buffer, node) in config.buffers.into_iter().zip(homes) {
            let state = Arc::clone(&self.state);
            blocking("making a buffer", move || publish(&state, &buffer, node)).await?;
        }
        Ok(())
    }
}

fn security(config: &ServiceConfig) -> Result<(Security, Option<Tls>)> {
    Ok(match (&config.tls, config.plain_anywhere) {
        (Some(files), _) => {
            let tls = Tls::load(files_of(files))?;
            (Security::Tls(tls.clone()), Some(tls))
        }
        (None, true) => (Security::PlainAnywhere, None),
        (None, false) => (Security::Plain, None),
    })
}

fn files_of(tls: &TlsConfig) -> TlsFiles {
    TlsFiles {
        ca: tls.ca.clone(),
        cert: tls.cert.clone(),
        key: tls.key.clone(),
        crl: tls.crl.clone(),
    }
}

/// Returns the node of each buffer, in order; fails if the configuration names a node that does not exist.
fn homes(config: &ServiceConfig, topology: &Topology) -> Result<Vec<NodeId>> {
    let known = |node: NodeId| match topology.nodes().iter().any(|known| known.id == node) {
        true => Ok(node),
        false => Err(Error::Share(ShareError::Memory(MemoryError::NoSuchNode {
            node,
            gpu: topology.gpu_with_memory(node),
            choices: topology.nodes().iter().map(|known| known.id).collect(),
        }))),
    };
    for reserve in &config.reserves {
        known(reserve.node)?;
    }
    if let Some(node) = config.create.as_ref().and_then(|create| create.node) {
        known(node)?;
    }
    let home = |buffer: &BufferConfig| match (buffer.node, buffer.gpu) {
        (Some(node), _) => known(node),
        (None, gpu) => Ok(topology.gpu(gpu.unwrap_or(0))?.host_node()?),
    };
    config.buffers.iter().map(home).collect()
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
    let access: &[AccessDesc] = match is_read {
        true => &[AccessDesc::new(Location::Host, Access::Read)],
        // Of the CPU and all GPUs.
        false => &[],
    };
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
) -> Result<BTreeMap<NodeId, Reserve<PeerName>>> {
    let mut reserves = BTreeMap::new();
    for node in topology.nodes() {
        let asked = config
            .reserves
            .iter()
            .find(|reserve| reserve.node == node.id);
        let (handle_types, backing) = match memory_of(config, driver, homes, node.id) {
            Ok(memory) => memory,
            Err(error) if asked.is_none() => {
                tracing::warn!(node = %node.id, %error, "memory of this node cannot be shared");
                continue;
            }
            Err(error) => return Err(error),
        };
        let plan = Plan {
            node: node.id,
            handle_types,
            backing,
            target: asked.map_or(0, |reserve| reserve.bytes),
            keep: config.reuse.keep,
            chunk: asked.map_or_else(config::chunk, |reserve| reserve.chunk),
            min_chunk: asked.map_or_else(config::min_chunk, |reserve| reserve.min_chunk),
            cap: config.node.max_bytes.unwrap_or(u64::MAX),
            headroom: config.node.headroom,
            quiet: config.node.quiet,
            retry: config.node.retry,
            reuse: config.reuse.policy,
            scrubber: config.reuse.scrub,
            scrub_threads: config.reuse.threads,
        };
        let on_filled: Box<dyn OnFilled> = match asked {
            Some(_) => Box::new(Countdown {
                node: node.id,
                unready: Arc::clone(unready),
            }),
            None => Box::new(Nothing),
        };
        reserves.insert(node.id, Reserve::start(driver, plan, on_filled)?);
    }
    Ok(reserves)
}

/// The callback of a reserve that keeps nothing: nothing waits for it.
#[derive(Debug)]
struct Nothing;

impl OnFilled for Nothing {
    fn filled(&self, _: &Result<()>) {}
}

fn publish(state: &ServiceState, buffer: &BufferConfig, node: NodeId) -> Result<()> {
    let wanted = Wanted {
        name: &buffer.name,
        bytes: buffer.bytes,
        node,
        owner: None,
        who: buffer.who.clone(),
        open: true,
        access: buffer.access,
        probe: buffer.probe,
    };
    state.publish(&wanted, &AtomicBool::new(false)).map(drop)
}
