//! A service's configuration: read from TOML, with every value checked.

mod check;
mod defaults;
mod network;
mod options;
mod read;
mod tables;
#[cfg(test)]
mod tests;

pub(super) use defaults::{chunk, forgive_after, min_chunk};
pub(super) use options::{peers, server_options};
pub use tables::{
    AuditConfig, BufferConfig, CreateConfig, DirectoryConfig, DrainConfig, LeaseConfig,
    LocalConfig, MetricsConfig, NodeConfig, PrefixConfig, ReserveConfig, ReuseConfig,
    ServiceConfig, TlsConfig,
};
