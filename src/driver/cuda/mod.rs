//! The CUDA driver, loaded at run time.
//!
//! Nothing here panics if the library is absent, a stub, too old, or lacks functions.
//! Functions are looked up one by one, and result codes are integers.
//!
//! Calls that need a context run in the device's primary context, which is retained on first use and released
//! with the driver. The caller's current context is the same after each call, failed or not. Every method
//! works from any thread. As with CUDA itself, a child made by `fork` without `exec` cannot use a driver that
//! was opened before the fork; dropping it and its objects in the child does nothing.

mod abi;
mod backend;
mod context;
mod core;
mod devices;
mod handles;
mod library;
mod memory;
mod pools;
mod runtime;
mod symbols;
mod work;

pub(super) use backend::open;
