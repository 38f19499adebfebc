//! The service itself: metrics, drain, service manager, configuration.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::ExitStatusExt;

use rustix::process::Signal;

use crate::serve_cli::harness::{PATIENCE, Service, USUAL, driver, names, stderr};
use egmem_tests::egmem;

#[test]
fn metrics_and_readiness_are_told() {
    let service = Service::start(USUAL);
    assert!(service.get("/healthz").ends_with("alive\n"));
    assert!(service.get("/readyz").starts_with("HTTP/1.1 200"));
    let text = service.get("/metrics");
    assert!(text.contains("application/openmetrics-text"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    service.until("egmem_reserve_bytes", 16 << 20);
    assert_eq!(service.metric("egmem_reserve_target_bytes"), 16 << 20);
    // 4 MiB and 6 MiB of the buffers beside it.
    service.until("egmem_pinned_bytes", 26 << 20);
    assert_eq!(service.metric("egmem_names"), 2);
    assert_eq!(service.metric("egmem_ready"), 1);
    // Warm bytes are given out, and the reserve fills up again.
    assert!(
        service
            .fetch(&["x", "--create", "--bytes", "16MiB"])
            .status
            .success()
    );
    assert!(service.metric("egmem_taken_warm_bytes_total") >= 16 << 20);
    service.until("egmem_reserve_bytes", 16 << 20);
    service.drained();
}

#[test]
fn every_metric_is_in_the_manual() {
    let service = Service::start(USUAL);
    let manual = include_str!("../../../docs/service.md");
    let text = service.get("/metrics");
    for line in text.lines().filter(|line| line.starts_with("# TYPE ")) {
        let name = line.split(' ').nth(2).unwrap();
        assert!(
            manual.contains(&format!("`{name}")),
            "{name} is not in docs/service.md"
        );
    }
    service.drained();
}

#[test]
fn a_drain_asks_the_holders_waits_and_tells_the_remaining_ones() {
    // A holder lets go when it is asked to.
    let mut service = Service::start(USUAL);
    let mut client = service.hold(&["scratch"]);
    service.running.signal(Signal::TERM);
    client.line("being withdrawn");
    assert_eq!(client.end().code(), Some(0));
    assert_eq!(service.running.end().code(), Some(0));
    service.running.line("drained");
    assert!(!service.path("egmem.sock").exists(), "the socket is gone");

    // One that is stopped cannot: when the time is over, it is named.
    let short = USUAL.replace("deadline = \"2min\"", "deadline = \"1s\"");
    let mut service = Service::start(&short);
    let client = service.hold(&["scratch"]);
    client.stop();
    service.running.signal(Signal::TERM);
    let error = service.running.line("error: ");
    assert!(error.contains("uid:"), "{error}");
    assert_eq!(service.running.end().code(), Some(3));

    // A second signal ends it at once.
    let mut service = Service::start(USUAL);
    let client = service.hold(&["scratch"]);
    client.stop();
    service.running.signal(Signal::INT);
    service.running.line("draining");
    service.running.signal(Signal::INT);
    service
        .running
        .line("error: ended at once by a second SIGINT: holders were not waited for");
    // On a slow machine the end itself may take the second that it has.
    let status = service.running.end();
    let killed = status.signal() == Some(Signal::KILL.as_raw());
    assert!(killed || status.code() == Some(128 + 2), "{status}");
}

#[test]
fn the_service_manager_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut service = Service::start_in(folder, USUAL, |command| {
        command.env("NOTIFY_SOCKET", &path);
    });
    let hear = || {
        let mut bytes = [0; 512];
        let count = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    assert!(hear().contains("READY=1"));
    service.running.signal(Signal::HUP);
    service.running.line("reloaded");
    let text = hear();
    assert!(
        text.contains("RELOADING=1") && text.contains("MONOTONIC_USEC="),
        "{text}"
    );
    assert!(hear().contains("READY=1"));
    service.running.signal(Signal::TERM);
    assert!(hear().contains("STOPPING=1"));
    assert_eq!(service.running.end().code(), Some(0));
}

#[test]
fn lists_of_peers_are_reloaded_and_mistakes_leave_them() {
    let mut service = Service::start(USUAL);
    let file = service.path("egmem.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let rewrite = |service: &mut Service, text: &str, answer: &str| {
        std::fs::write(&file, text).unwrap();
        service.running.signal(Signal::HUP);
        service.running.line(answer)
    };
    let hidden = text.replace("who = [\"*\"]\naccess", "who = [\"uid:4000000\"]\naccess");
    assert_eq!(rewrite(&mut service, &hidden, "reloaded"), "");
    let fixed = hidden.replace("quiet = \"1ms\"", "quiet = \"2ms\"");
    assert_eq!(
        rewrite(&mut service, &fixed, "reloaded"),
        "; only a restart changes node"
    );
    assert_eq!(names(&service.ls()), ["scratch"]);
    let error = rewrite(&mut service, "listen = []", "error: reload failed: ");
    assert!(error.contains("listen"), "{error}");
    assert_eq!(names(&service.ls()), ["scratch"]);
    service.drained();
}

#[test]
fn a_standard_output_that_takes_nothing_ends_no_service() {
    let short = USUAL.replace("deadline = \"2min\"", "deadline = \"1s\"");
    let mut service = Service::start_without_stdout(&short);
    let client = service.hold(&["scratch"]);
    service.running.signal(Signal::HUP);
    service.running.line_with("reloaded");
    assert_eq!(names(&service.ls()), ["scratch", "weights"]);
    client.stop();
    service.running.signal(Signal::TERM);
    let error = service.running.line("error: ");
    assert!(error.contains("uid:"), "{error}");
    assert_eq!(service.running.end().code(), Some(3));
}

#[test]
fn an_error_message_without_a_reader_does_not_panic() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let mut command = egmem(&["-vvv", "serve", "--config", "/nowhere/egmem.toml"]);
    let status = command.stderr(OwnedFd::from(ours)).status().unwrap();
    // Not that of a panic.
    assert_eq!(status.code(), Some(1), "{status}");
}

#[test]
fn a_wrong_configuration_is_named_and_nothing_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("egmem.toml");
    // An invalid argument has no remedy: its message names what is valid.
    for (text, words, advice, code) in [
        (
            "listen = []\nlisten_to = 1",
            "listen_to",
            "expected one of",
            2,
        ),
        (
            "listen = [\"tcp://0.0.0.0:0\"]",
            "without TLS",
            "what to do",
            1,
        ),
        (
            "listen = [\"unix:/nowhere/at/all\"]",
            "/nowhere/at/all",
            "what to do",
            1,
        ),
        (
            "listen = [\"tcp://127.0.0.1:0\"]\n[[reserve]]\nnode = 77\nbytes = \"2MiB\"",
            "77",
            "what to do",
            1,
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let mut command = egmem(&["serve", "--config", file.to_str().unwrap()]);
        let output = command.args(driver()).output().unwrap();
        let error = stderr(&output);
        assert!(
            error.contains(words) && error.contains(advice),
            "{text}: {error}"
        );
        assert_eq!(output.status.code(), Some(code), "{text}: {error}");
    }
    let reaching = USUAL.replace("names = [\"\"]", "names = [\"{peer}\"]");
    std::fs::write(&file, reaching).unwrap();
    let output = egmem(&["serve", "--check", "--config", file.to_str().unwrap()])
        .output()
        .unwrap();
    let error = stderr(&output);
    assert!(
        error.contains("create.prefix") && error.contains("slash"),
        "{error}"
    );
    std::fs::write(&file, USUAL.replace('@', "/tmp")).unwrap();
    let output = egmem(&["serve", "--check", "--config", file.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}
