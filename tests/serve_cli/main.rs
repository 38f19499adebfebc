//! `egmem serve`, `ls`, `fetch`, `watch`, `delete` and `certs`: real processes over real sockets.
#![cfg(feature = "cli")]

mod certs;
mod commands;
mod configuration;
mod harness;
mod leases;
mod service;
#[path = "../../src/exchange/slow.rs"]
mod slow;
