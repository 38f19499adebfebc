//! `egmem serve`, `ls`, `fetch`, `watch`, `delete` and `certs`: real processes over real sockets.
#![cfg(feature = "cli")]

mod audit;
mod certs;
mod commands;
mod configuration;
mod errors;
mod follow;
mod harness;
mod hostile;
mod leases;
mod log;
mod service;
