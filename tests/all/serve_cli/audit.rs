//! The audit log of a service.

use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use serde_json::Value;

use crate::serve_cli::harness::{Service, USUAL};

fn events(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn actions_of_peers_are_in_the_audit_log() {
    let config = format!("{USUAL}[audit]\nfile = \"@/audit.jsonl\"\n");
    let mut service = Service::start(&config);
    let file = service.path("audit.jsonl");
    assert_eq!(
        file.metadata().unwrap().permissions().mode() & 0o7777,
        0o600
    );
    let made = service.fetch(&["job", "--create", "--bytes", "4MiB"]);
    assert!(made.status.success());
    assert!(!service.fetch(&["absent"]).status.success());
    assert!(service.run("delete", &["job"]).status.success());
    // A rotated log goes on in a new file.
    let moved = service.path("audit.jsonl.1");
    std::fs::rename(&file, &moved).unwrap();
    service.running.signal(Signal::HUP);
    service.running.line("reloaded");
    assert!(service.fetch(&["weights", "--read-only"]).status.success());
    assert_eq!(service.metric("egmem_dropped_audit_lines_total"), 0);
    let folder = tempfile::tempdir().unwrap();
    let (kept, rest) = (folder.path().join("1"), folder.path().join("2"));
    let mut running = service.running;
    running.signal(Signal::TERM);
    assert_eq!(running.end().code(), Some(0));
    std::fs::copy(&moved, &kept).unwrap();
    std::fs::copy(&file, &rest).unwrap();
    // Events that were queued when the file was opened again are in the new one.
    let mut before = events(&std::fs::read_to_string(kept).unwrap());
    let after = events(&std::fs::read_to_string(rest).unwrap());
    before.extend(after.clone());

    let find = |events: &[Value], event: &str, name: &str| {
        let found = events
            .iter()
            .find(|found| found["event"] == event && found["name"] == name);
        found
            .unwrap_or_else(|| panic!("no {event} of {name} in {events:?}"))
            .clone()
    };
    let uid = format!("uid:{}", rustix::process::getuid().as_raw());
    for (event, name) in [
        ("created", "job"),
        ("granted", "job"),
        ("released", "job"),
        ("deleted", "job"),
    ] {
        let found = find(&before, event, name);
        assert_eq!(found["bytes"], 4 << 20, "{found}");
        assert_eq!(found["peer"], uid.as_str(), "{found}");
        assert!(found["session"].is_u64(), "{found}");
        assert!(
            found["timestamp"].as_str().unwrap().ends_with('Z'),
            "{found}"
        );
    }
    let granted = find(&before, "granted", "job");
    assert!(
        granted["lease"].is_u64() && granted["pid"].is_u64(),
        "{granted}"
    );
    let refused = find(&before, "refused", "absent");
    assert_eq!(refused["reason"], "not_found", "{refused}");
    assert_eq!(refused["request"], "fetch", "{refused}");
    for event in ["session_begun", "session_ended"] {
        assert!(
            before.iter().any(|found| found["event"] == event),
            "{event}"
        );
    }
    find(&after, "granted", "weights");
}

#[test]
fn without_a_file_audit_events_are_in_the_log_by_default() {
    audit_events_are_logged(Service::start(USUAL));
}

#[test]
fn a_log_filter_for_other_events_keeps_audit_events() {
    let folder = tempfile::tempdir().unwrap();
    audit_events_are_logged(Service::start_in(folder, USUAL, |command| {
        command.env("RUST_LOG", "warn");
    }));
}

fn audit_events_are_logged(mut service: Service) {
    assert!(service.fetch(&["weights", "--read-only"]).status.success());
    // The time comes first.
    let line = service.running.line_with("egmem::audit: event=\"granted\"");
    assert!(
        line.contains("name=\"weights\"") && line.contains("peer=\"uid:"),
        "{line}"
    );
    service.drained();
}
