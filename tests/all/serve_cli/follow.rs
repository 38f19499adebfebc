//! `egmem fetch --follow`: over a service that is killed, and names that are deleted.

use std::io::Read;

use rustix::process::Signal;

use crate::serve_cli::harness::{Running, Service, USUAL, driver, stderr};
use egmem_tests::egmem;

fn follow(service: &Service, args: &[&str]) -> Running {
    let mut command = egmem(&["fetch", &service.address()]);
    command.args(args).arg("--follow").args(driver());
    Running::start(command)
}

#[test]
fn a_killed_service_is_followed_to_its_successor() {
    let mut service = Service::start(USUAL);
    let (file, copy) = (service.path("written"), service.path("copy"));
    std::fs::write(&file, b"of the first life").unwrap();
    let written = service.fetch(&["scratch", "--write", file.to_str().unwrap()]);
    assert!(written.status.success(), "{}", stderr(&written));
    let read = ["scratch", "--verify", "--read", copy.to_str().unwrap()];
    let mut client = follow(&service, &read);
    client.line("following");
    assert!(
        std::fs::read(&copy)
            .unwrap()
            .starts_with(b"of the first life")
    );
    for _ in 0..2 {
        let Service {
            mut running,
            folder,
            ..
        } = service;
        running.signal(Signal::KILL);
        running.end();
        client.line("dropped");
        service = Service::start_in(folder, USUAL, |_| {});
        client.line("following");
        let copied = std::fs::read(&copy).unwrap();
        assert!(copied.len() == 5_000_000 && copied.iter().all(|&byte| byte == 0));
        service.until("egmem_leases", 1);
    }
    client.signal(Signal::TERM);
    client.line("released");
    assert_eq!(client.end().code(), Some(0));
    service.drained();
}

#[test]
fn a_name_that_is_deleted_and_made_again_is_followed() {
    let service = Service::start(USUAL);
    let mut client = follow(&service, &["job"]);
    client.line("job: gone: nothing that this client may fetch");
    for _ in 0..2 {
        let made = service.fetch(&["job", "--create", "--bytes", "3MiB"]);
        assert!(made.status.success(), "{}", stderr(&made));
        client.line("following");
        // It lets go by itself, so the deletion is not held up.
        let deleted = service.run("delete", &["job", "--wait", "300"]);
        assert!(deleted.status.success(), "{}", stderr(&deleted));
        client.line("dropped");
        client.line("job: gone");
    }
    client.signal(Signal::INT);
    assert_eq!(client.end().code(), Some(0));
    service.drained();
}

#[test]
fn bytes_of_one_memory_after_the_other_are_refused() {
    let service = Service::start(USUAL);
    let output = service.fetch(&["scratch", "--follow", "--read", "-"]);
    assert!(!output.status.success() && output.stdout.is_empty());
    assert!(stderr(&output).contains("--follow"), "{}", stderr(&output));
    service.drained();
}

/// Follows with a copy to a pipe, of which the test has read one byte.
fn copying(service: &Service) -> (Running, std::fs::File) {
    let pipe = service.path("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let client = follow(service, &["scratch", "--read", pipe.to_str().unwrap()]);
    let mut reader = std::fs::File::open(&pipe).unwrap();
    reader.read_exact(&mut [0]).unwrap();
    (client, reader)
}

#[test]
fn a_signal_ends_a_copy_and_releases_the_memory() {
    let service = Service::start(USUAL);
    let (mut client, mut reader) = copying(&service);
    client.signal(Signal::TERM);
    client.line("ending");
    let mut copied = Vec::new();
    reader.read_to_end(&mut copied).unwrap();
    assert!(copied.len() < 4_999_999, "{} bytes", copied.len());
    client.line("released");
    assert_eq!(client.end().code(), Some(0));
    service.drained();
}

#[test]
fn a_second_signal_ends_a_copy_that_nobody_reads() {
    let service = Service::start(USUAL);
    let (mut client, reader) = copying(&service);
    client.signal(Signal::INT);
    client.line("ending");
    client.signal(Signal::TERM);
    assert_eq!(client.end().code(), Some(128 + 15));
    drop(reader);
}
