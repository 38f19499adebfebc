//! The owner: allocates, publishes, waits for the peer, verifies the peer's bytes.

use std::time::Duration;

use egmem::driver::{Access, Location};
use egmem::exchange::server::{Holder, HolderState, Published};
use egmem::exchange::{Error, PeerList, Result, Server};
use egmem::proof::Prover;
use egmem::share::{Shared, best_handle_types};
use egmem::size::Bytes;
use egmem::{Buffer, Topology};

use super::args::Args;
use super::report::{Play, Report};
use super::{driver, security};

/// Plays the owner's part.
pub async fn own(args: &Args) -> Result<Report> {
    let driver = driver(args)?;
    let topology = Topology::discover(&driver)?;
    let node = Location::from(topology.gpu(args.gpu)?.host_node()?);
    let Bytes(bytes) = args.size;
    let buffer = Buffer::on(node)
        .access_by([Location::Device(args.gpu)])
        .bytes(bytes)
        .shareable()
        .room_for_probes()
        .allocate(&driver)?;
    let handles = best_handle_types(&driver, node)?;
    let why = match &handles.no_fabric {
        None => "what this machine can".to_owned(),
        Some(error) => format!("no fabric: {error}"),
    };
    let shared = Shared::from(buffer);
    let buffer = shared
        .buffer()
        .cloned()
        .ok_or_else(|| Error::invalid("memory", "it has no mapping here"))?;
    let identity = shared.describe(Access::ReadWrite)?.parts[0].identity;

    let mut play = Play {
        cpu: Some(buffer.cpu()?),
        memory: &*buffer,
        prover: Prover::new(&driver, args.gpu)?,
        identity,
        steps: Vec::new(),
    };
    play.cpu_writes(0);
    play.gpu_rewrites("it", 0);

    let security = security(args)?;
    let tls = matches!(security, egmem::exchange::Security::Tls(_));
    let server = Server::options()
        .listen(args.address.clone())
        .security(security)
        .start()
        .await?;
    // Every peer with a certificate of the authority may fetch it; PeerList::list would name some.
    let published = server
        .publish(&args.name, shared.clone())
        .access(Access::ReadWrite)
        .who(PeerList::anyone())
        .now()?;
    let address = server.addresses()[0].to_string();
    eprintln!("fabric-exchange: listening at {address}");

    let visited = visited(&published, || play.has_pattern(5));
    let (other, lease) = tokio::time::timeout(args.patience(), visited)
        .await
        .map_err(|_| {
            Error::Share(egmem::share::Error::TimedOut {
                what: format!("waiting for a peer to fetch and write '{}'", args.name),
                after: args.patience(),
            })
        })??;

    // Written when the peer had checked everything.
    play.cpu_checks("the peer's pattern", 5);
    play.gpu_rewrites("the peer's pattern", 5);
    play.cpu_checks("the GPU's pattern", 6);
    let steps = std::mem::take(&mut play.steps);
    drop(play);

    published.withdraw(args.patience()).await?;
    server.close(args.patience()).await?;
    Ok(Report {
        role: "owner",
        backend: driver.name().to_string(),
        simulated: driver.is_simulated(),
        address,
        other,
        security: if tls {
            "mutual TLS 1.3"
        } else {
            "plain, on loopback"
        },
        name: args.name.clone(),
        bytes,
        location: node.to_string(),
        identity: identity.to_string(),
        lease: Some(lease),
        handles: handles.handle_types.to_string(),
        why,
        probe: None,
        steps,
        json: args.json,
    })
}

/// Waits until a peer that holds the memory has left its last pattern there, which `has_pattern` tells, or has released it; its
/// name and lease. A peer that found everything right holds the memory until this end withdraws it.
async fn visited(published: &Published, has_pattern: impl Fn() -> bool) -> Result<(String, u64)> {
    let mut seen: Option<Holder> = None;
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    loop {
        ticks.tick().await;
        match (published.importers().pop(), seen) {
            (Some(holder), _) if holder.state == HolderState::Expired => {
                return Err(Error::Share(egmem::share::Error::PeerLost {
                    peer: holder.peer.to_string(),
                    why: "it went silent before it released the memory".into(),
                }));
            }
            (Some(holder), _) if has_pattern() => {
                return Ok((holder.peer.to_string(), holder.lease));
            }
            // The checks say whether its pattern is there.
            (None, Some(holder)) => return Ok((holder.peer.to_string(), holder.lease)),
            (holder, _) => seen = holder,
        }
    }
}
