//! The CUDA backend on stub libraries, which `cc` builds here from tests/stubs. With any set
//! of installed libraries, opening it gives a driver or a typed error, and never a panic.
//!
//! Each test runs in a child process that finds its stub by LD_LIBRARY_PATH.

mod abi;
mod contexts;
pub mod harness;
#[cfg(feature = "portable")]
mod interop;
mod open;
mod runtime;
#[cfg(all(feature = "portable", not(egmem_unsafe_only)))]
mod signals;
