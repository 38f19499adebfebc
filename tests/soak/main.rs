//! The soak: `egmem serve` under good clients and hostile peers, all mixed, with clients killed
//! and stopped, connections cut, reloads and restarts. Simulated driver, loopback and Unix sockets only.
//!
//! Whenever the load stops, each service must return to its baseline. docs/service.md says how to run
//! it for longer, and lists its checks.

mod bytes;
mod chaos;
mod children;
mod hostile;
mod journal;
mod measure;
mod plan;
mod proxy;
mod raw;
mod role;
mod run;
mod service;
mod table;
mod trend;
mod worker;

/// Not a test of its own: the program starts itself as its clients.
#[test]
fn child_process() {
    if let Ok(setup) = std::env::var(role::ROLE) {
        role::play(&serde_json::from_str(&setup).expect("a setup"));
    }
}

#[test]
fn services_return_to_their_baseline_after_clients_and_hostile_peers() {
    run::soak();
}
