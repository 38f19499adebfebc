//! `egmem serve`, `ls`, `fetch`, `delete` and `certs`: real processes over real sockets.

mod audit;
mod certs;
mod commands;
mod configuration;
mod errors;
mod follow;
pub mod harness;
mod hostile;
mod leases;
mod log;
mod service;
