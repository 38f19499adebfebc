//! After server and client are gone, so are their tasks, threads and fds.

use std::time::{Duration, Instant};

use egmem::driver::NodeId;
use egmem::exchange::{Address, Client, Server};
use egmem::{Buffer, Driver, Machine};

use egmem_tests::alone;

/// Nothing takes as long that does not hang.
const PATIENCE: Duration = Duration::from_secs(300);

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}"))
        .unwrap()
        .count()
}

async fn once() {
    let exporter = Driver::simulated(Machine::gh200()).unwrap();
    let importer = Driver::simulated(Machine::gh200()).unwrap();
    let server = Server::options().listen(Address::loopback(0));
    let server = server.start().await.unwrap();
    let memory = Buffer::on(NodeId(0)).bytes(1 << 20).shareable();
    let memory = memory.allocate(&exporter).unwrap();
    let published = server.publish("x", memory).now().unwrap();
    let client = Client::options(server.addresses().remove(0));
    let client = client.connect(&importer).await.unwrap();
    let remote = client.fetch("x").go().await.unwrap();
    // One that is given up.
    let _ = tokio::time::timeout(Duration::from_millis(1), client.fetch("x").go()).await;
    drop((remote, client));
    server.close(PATIENCE).await.unwrap();
    drop((published, server));
    let metrics = tokio::runtime::Handle::current().metrics();
    let begun = Instant::now();
    while metrics.num_alive_tasks() > 0 {
        assert!(begun.elapsed() < PATIENCE, "tasks are left");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for driver in [exporter, importer] {
        let held = driver.sim().unwrap().held();
        assert!(held.is_empty(), "{held}");
    }
}

/// Whether there is more of something than there was.
fn grown(before: &(usize, usize), after: &(usize, usize)) -> bool {
    after.0 > before.0 || after.1 > before.1
}

#[test]
fn nothing_is_left_behind() {
    alone(module_path!(), "nothing_is_left_behind", rounds);
}

fn rounds() {
    let mut counts = Vec::new();
    for _ in 0..4 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(once());
        // The kernel still counts a thread for a moment after it has ended.
        let begun = Instant::now();
        let settled = loop {
            let now = (count("fd"), count("task"));
            let more = counts.first().is_none_or(|first| grown(first, &now));
            if !more || begun.elapsed() > PATIENCE {
                break now;
            }
            std::thread::sleep(Duration::from_millis(10));
            if counts.is_empty() && begun.elapsed() > Duration::from_millis(200) {
                break now;
            }
        };
        counts.push(settled);
    }
    // The first round may leave objects that a process creates once.
    assert!(
        !counts[1..].iter().any(|after| grown(&counts[0], after)),
        "{counts:?}"
    );
}
