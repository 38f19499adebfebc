//! The exchange when things go wrong: real processes over real sockets, killed, stopped, cut off,
//! crowded, and lied to. After each nothing may be left behind, and nothing may hang.

mod crash;
mod example;
mod frames;
mod harness;
mod hostile;
mod many;
mod netns;
mod network;
mod raw;
mod role;
mod silent;
mod stop;
mod trust;
mod withdraw;

const MODULE: &str = module_path!();

/// Not a test of its own: the other tests start it as a child process.
#[test]
fn child_process() {
    if let Ok(setup) = std::env::var(harness::ROLE) {
        role::play(&serde_json::from_str(&setup).expect("a setup"));
    }
}
