//! A node's allocator service: memory that stays while its users come and go.
//!
//! It makes the buffers that its configuration names and, within quotas, those that clients ask
//! for, and keeps a warm reserve, so that a client gets gigabytes in the time of importing and
//! granting, not of pinning. The command `egmem serve` runs it; docs/service.md is its manual.

// Until the service itself is here, which uses them.
#![allow(dead_code)]

mod config;
mod http;
mod hygiene;
mod metrics;
mod quota;
mod reserve;
mod scrub;
mod stock;
mod units;

pub use config::{
    BufferConfig, CreateConfig, DirectoryConfig, DrainConfig, LeaseConfig, LocalConfig,
    MetricsConfig, NodeConfig, ReserveConfig, ReuseConfig, ServiceConfig, TlsConfig,
};
pub use hygiene::Reuse;
pub use scrub::Scrubber;
