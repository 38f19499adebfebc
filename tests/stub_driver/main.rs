//! The CUDA backend on stub libraries, which `cc` builds here from tests/stubs. With any set
//! of installed libraries, opening it gives a driver or a typed error, and never a panic.
//!
//! Each test runs in a child process that finds its stub by LD_LIBRARY_PATH.
#![cfg(target_os = "linux")]

mod abi;
mod contexts;
mod harness;
#[cfg(feature = "interop")]
mod interop;
mod open;
#[cfg(feature = "cli")]
#[path = "../serve_cli/harness.rs"]
#[expect(dead_code, reason = "there is no simulator here, and few commands")]
mod program;
mod runtime;
#[cfg(feature = "cli")]
mod signals;
