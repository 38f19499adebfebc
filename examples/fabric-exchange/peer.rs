//! The peer: finds the memory, imports it, verifies the owner's bytes, and writes its own.

use egmem::driver::{HandleType, Location};
use egmem::exchange::{Address, Client, Error, Result, Security};
use egmem::proof::Prover;

use super::args::Args;
use super::report::{Play, Report};
use super::{driver, security};

/// Plays the peer's part.
pub async fn visit(args: &Args) -> Result<Report> {
    let driver = driver(args)?;
    let security = security(args)?;
    let tls = matches!(security, Security::Tls(_));
    if matches!(args.address, Address::Tcp { port: 0, .. }) {
        return Err(Error::invalid(
            "--address",
            "the peer needs the one at which the owner says that it is listening",
        ));
    }
    eprintln!(
        "fabric-exchange: waiting for the owner at {}, up to {} s",
        args.address, args.wait
    );
    let client = Client::options(args.address.clone())
        .security(security)
        .timeout(args.patience())
        .patient(true)
        .connect(&driver)
        .await?;
    client.wait(&args.name, args.patience()).await?;
    let mut fetch = client
        .fetch(&args.name)
        .access_by([Location::Device(args.gpu)]);
    if let Some(via) = args.via {
        fetch = fetch.via(via.into());
    }
    let memory = fetch.await?;

    let identity = memory.description().parts[0].identity;
    let cpu = match memory.cpu() {
        Ok(cpu) => Some(cpu),
        Err(egmem::Error::NotAccessible { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let mut play = Play {
        cpu,
        memory: &memory,
        prover: Prover::new(&driver, args.gpu)?,
        identity,
        steps: Vec::new(),
    };
    // The owner's GPU wrote the pattern of point 1 last.
    play.cpu_checks("the owner's pattern", 1);
    play.gpu_rewrites("the owner's pattern", 1);
    play.cpu_checks("the GPU's pattern", 2);
    play.cpu_writes(3);
    play.gpu_rewrites("it", 3);
    play.cpu_checks("the GPU's pattern", 4);
    // The sign that this end is done: the owner writes next.
    play.cpu_writes(5);
    let steps = std::mem::take(&mut play.steps);
    drop(play);

    let proof = memory.proved();
    let probe = match proof.by {
        Some(by) => format!("words went to and fro, by {by}"),
        None => format!("none: {}", proof.why_not.as_deref().unwrap_or("not wanted")),
    };
    let via = memory.via();
    let report = Report {
        role: "peer",
        backend: driver.name().to_string(),
        simulated: driver.is_simulated(),
        address: args.address.to_string(),
        other: client.peer(),
        security: if tls {
            "mutual TLS 1.3"
        } else {
            "plain, on loopback"
        },
        name: args.name.clone(),
        bytes: memory.len(),
        location: memory.description().parts[0].location.to_string(),
        identity: identity.to_string(),
        lease: None,
        handles: via.to_string(),
        why: match (args.via, memory.no_fabric(), via) {
            (Some(_), ..) => "asked for by --via".into(),
            (None, Some(why), _) => format!("no fabric: {why}"),
            (None, None, HandleType::PosixFd) => "the owner is on this machine".into(),
            (None, None, _) => "the owner is on another machine".into(),
        },
        probe: Some(probe),
        steps,
        json: args.json,
    };
    // The owner looks at the pattern, and asks for the memory back. Without a pattern there is nothing to wait for.
    if report.verified() {
        let asked = tokio::time::timeout(args.patience(), memory.changed());
        asked.await.map_err(|_| {
            Error::Share(egmem::share::Error::TimedOut {
                what: "waiting for the owner to ask for its memory back".into(),
                after: args.patience(),
            })
        })?;
    }
    memory.release().await?;
    client.close().await;
    Ok(report)
}
