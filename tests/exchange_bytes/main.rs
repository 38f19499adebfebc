//! How much memory peers can make a server keep, and what clients take. Servers, clients and floods are
//! in this process, one test at a time, since its allocations are counted.
#![cfg(feature = "exchange")]

mod clients;
mod counting;
mod flood;
mod limits;
mod messages;

use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;

/// While this is held no other test allocates.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A runtime for the server: the tests themselves block.
fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}
