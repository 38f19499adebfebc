//! The fate of memory whose holders crash, stop, or take their time.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use crate::serve_cli::harness::{Service, USUAL, driver, stderr};
use egmem_tests::egmem;
use egmem_tests::ms;

fn expiry(time: Duration) -> String {
    let time = format!("expiry = \"{}ms\"", time.as_millis());
    USUAL.replace("expiry = \"1h\"", &time)
}

#[test]
fn a_client_that_crashed_and_restarts_finds_its_bytes() {
    // A client on a busy machine may be silent for some seconds.
    let service = Service::start(&expiry(ms(12_000)));
    let file = service.path("mine");
    std::fs::write(&file, b"what a crash must not take along").unwrap();
    let write = ["--write", file.to_str().unwrap()];
    let mut client =
        service.hold(&[&["job/1", "--create", "--bytes", "10MiB"][..], &write].concat());
    assert_eq!(service.ls()[0]["leases"], 1);
    client.signal(Signal::KILL);
    assert_eq!(client.end().signal(), Some(9));

    let output = service.fetch(&["job/1", "--create", "--bytes", "10MiB", "--read", "-"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        output
            .stdout
            .starts_with(b"what a crash must not take along")
    );
    // The dead one's lease ends by itself.
    service.until("egmem_expired_total", 1);
    service.until("egmem_leases", 0);
    assert_eq!(service.metric("egmem_created_total"), 1);
    service.drained();
}

#[test]
fn a_client_keeps_its_lease_while_nobody_reads_its_output() {
    let service = Service::start(USUAL);
    let mut command = egmem(&["fetch", &service.address(), "scratch", "--read", "-"]);
    let mut client = command
        .args(driver())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = client.stdout.take().unwrap();
    let mut bytes = vec![0; 1];
    output.read_exact(&mut bytes).unwrap();
    // Its pipe is full; a client that says nothing meanwhile is taken for dead. This one pings, twice in each second.
    let before = service.metric("egmem_requests_total");
    service.until_at_least("egmem_requests_total", before + 8);
    assert_eq!(service.metric("egmem_expired_total"), 0);
    assert_eq!(service.metric("egmem_leases"), 1);
    output.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len(), 5_000_000);
    assert!(client.wait().unwrap().success());
    assert_eq!(service.metric("egmem_released_total"), 1);
    service.drained();
}
