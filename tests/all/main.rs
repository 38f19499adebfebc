//! Tests through the public API: a module for each topic. docs/contributing.md says how to run one of them.
//!
//! Tests share this process, so none changes or counts what belongs to all of it: the environment, limits, open files.
//! A test that does runs alone in a child process (`egmem_tests::child`).
#![cfg_attr(feature = "nightly", feature(allocator_api, btreemap_alloc))]

mod capability;
mod captures;
mod demo;
mod fault_sweep;
mod forked;
mod heap;
mod leaks;
mod lifecycle;
mod mistakes;
mod replay;
mod reset;
mod stub_driver;
mod system_calls;
mod topology;
mod trace;

#[cfg(feature = "portable")]
mod access;
#[cfg(feature = "portable")]
mod conformance;
#[cfg(feature = "portable")]
mod demo_parts;
#[cfg(feature = "portable")]
mod errors;
#[cfg(feature = "portable")]
mod exchange;
#[cfg(feature = "portable")]
mod files;
#[cfg(feature = "portable")]
mod heap_share;
#[cfg(feature = "portable")]
mod kv;
#[cfg(feature = "portable")]
mod ledger;
#[cfg(feature = "portable")]
mod nodes;
#[cfg(feature = "portable")]
mod ordinary_pages;
#[cfg(feature = "portable")]
mod python_parts;
#[cfg(feature = "portable")]
mod refused;
#[cfg(feature = "portable")]
mod shapes;
#[cfg(feature = "portable")]
mod share;
#[cfg(feature = "portable")]
mod topology_xml;

// Left out by ci/sanitize and ci/aarch64: most of the time would go there, and the code that they test alone is safe, but
// for calls that it passes on to the crates below.
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod authorization;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod cli;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod cli_errors;
#[cfg(all(feature = "etcd", not(egmem_unsafe_only)))]
mod directory;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod exchange_failures;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod group;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod protocol;
#[cfg(not(egmem_unsafe_only))]
mod questions;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod report;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod serve_cli;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod service;
#[cfg(not(egmem_unsafe_only))]
mod structure;
