//! Memory of one node, used by another: `cargo run --release --features certs --example fabric-exchange`.
//!
//! The owner allocates Extended GPU Memory on its GPU's host node and publishes it under a name. The
//! peer finds it, imports it, and takes a lease. Each writes, by CPU and by GPU, and each verifies
//! the other's bytes, by CPU and by GPU. Run `owner` on one machine and `peer` on another; without a
//! role, both are started here, on the simulator. docs/multi-node.md tells more, `--help` the rest.

mod args;
mod both;
mod owner;
mod peer;
mod report;

use std::process::ExitCode;

use clap::Parser;
use egmem::exchange::{Error, Result, Security, Tls, TlsFiles};
use egmem::{Driver, Explained, Machine};

use args::{Args, Role};

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match args.role {
        Some(Role::Owner) => run(owner::own(&args)),
        Some(Role::Peer) => run(peer::visit(&args)),
        None => both::run(&args),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fabric-exchange: {}", Explained(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs a role; whether everything was verified.
fn run(role: impl Future<Output = Result<report::Report>>) -> Result<bool> {
    let runtime = tokio::runtime::Runtime::new()
        .map_err(|error| Error::system("starting the runtime", &error))?;
    let report = runtime.block_on(role)?;
    report.print()?;
    Ok(report.verified())
}

/// The driver: the simulator if it was asked for, else this machine's.
fn driver(args: &Args) -> Result<Driver> {
    let driver = match &args.sim {
        Some(name) => Driver::simulated(Machine::load(name)?)?,
        None if args.cuda => Driver::open()?,
        None => Driver::from_env()?,
    };
    match driver.device_count()? {
        0 => Err(Error::Share(egmem::share::Error::Memory(
            egmem::Error::NoSuchGpu { gpu: 0, count: 0 },
        ))),
        _ => Ok(driver),
    }
}

/// TLS with the certificates that were given; without any, plain, which only loopback allows.
fn security(args: &Args) -> Result<Security> {
    match (&args.ca, &args.cert, &args.key) {
        (Some(ca), Some(cert), Some(key)) => Ok(Security::Tls(Tls::load(TlsFiles {
            ca: ca.clone(),
            cert: cert.clone(),
            key: key.clone(),
            crl: args.crl.clone(),
        })?)),
        _ => Ok(Security::Plain),
    }
}
