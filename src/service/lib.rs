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
//! # Ok::<(), egmem::exchange::Error>(())
//! # }).unwrap();
//! ```
//!
//! # Design
//! `egmem serve` is `service::Service` with signals: an allocator behind an exchange server, which publishes like any
//! other. **The reserve** exists because pinning is slow and importing is not. Two threads work on each node: one makes
//! chunks, one zeroes. Filling rests for a while after memory was given out, since the driver does one thing at a time, and
//! the client should import first. **The reuse policy is a table of its own** (`reuse_policy.rs`), without any memory,
//! tested against every history. A handle cannot be taken back, so memory goes to another peer only if every earlier holder
//! has said that it unmapped it, and by default not even then. Memory of a holder that died is never reused. **Names belong
//! to peers, not to processes**: a client that crashed finds its bytes again.
#![deny(missing_docs)]

mod config;
mod create;
mod lines;
mod metrics;
mod quota;
mod reserve;
mod reuse_policy;
mod service;
mod state;
mod teardown;

#[cfg(test)]
use egmem_core::Machine;
use egmem_core::{
    Backing, Driver, Error as MemoryError, Growth, Progress, Result as MemoryResult, Stream,
    Topology, backing, capability, driver, guard, memory, per_driver, size, text, topology, vmm,
};
use egmem_exchange::{self as exchange, Error, Refusal, Result};
use egmem_share::{self as share, Error as ShareError};

pub use config::{
    AuditConfig, BufferConfig, CreateConfig, DirectoryConfig, DrainConfig, LeaseConfig,
    LocalConfig, MetricsConfig, NodeConfig, PrefixConfig, ReserveConfig, ReuseConfig,
    ServiceConfig,
};
pub use lines::LineWriter;
pub use reuse_policy::{Reuse, Scrubber};
pub use service::Service;

/// The refusal of requests that come too late.
const ENDING: &str = "the service is ending";

/// Returns the refusal of a request to the service.
fn refused(what: impl Into<String>, reason: Refusal, detail: &str) -> Error {
    Error::Refused {
        peer: "the service".into(),
        what: what.into(),
        reason,
        detail: detail.into(),
    }
}
