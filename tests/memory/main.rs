//! The memory that peers can make a server keep, and the memory of clients. Servers that peers flood are
//! processes of their own, so that neither the peers' allocations are counted nor those of other tests.

mod clients;
mod conversations;
mod counting;
mod hellos;
mod host;
mod limits;
mod messages;
mod peer;
mod setting;

#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;

/// Not a test of its own: the program starts itself as the servers.
#[test]
fn the_server() {
    if let Ok(setup) = std::env::var(host::SETUP) {
        host::serve(&serde_json::from_str(&setup).unwrap());
    }
}

/// A runtime for a test's peers, or for a server: with few threads, since their stacks are resident too.
fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).max_blocking_threads(4);
    builder.enable_all().build().unwrap()
}
