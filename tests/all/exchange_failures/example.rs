//! `fabric-exchange` as a process: its output and its exit status.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::exchange_failures::netns::Cable;
use egmem_tests::example;
use egmem_tests::pki::{Files, Pki};

fn command(namespace: Option<&str>, arguments: &[&str]) -> Command {
    let enter = namespace.map(|name| ["ip", "netns", "exec", name].map(OsString::from));
    let mut words: Vec<OsString> = enter.into_iter().flatten().collect();
    words.extend(egmem_tests::words(example("fabric-exchange")));
    let mut command = Command::new(&words[0]);
    command
        .args(&words[1..])
        .args(arguments)
        .stdin(Stdio::null());
    command
}

#[track_caller]
fn good(output: Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    // A report that is not verified is on the standard output.
    assert!(output.status.success(), "{}: {errors}{text}", output.status);
    text
}

#[test]
fn without_a_role_both_run_and_verify() {
    for via in ["fabric", "fd"] {
        let arguments = ["--size", "3MiB", "--via", via];
        let text = good(command(None, &arguments).output().expect("it starts"));
        assert_eq!(text.matches("SIMULATED").count(), 2, "{text}");
        assert_eq!(text.matches("  verified").count(), 2, "{text}");
        assert!(!text.contains("WRONG"), "{text}");
    }
    let arguments = ["--size", "3MiB", "--json"];
    let text = good(command(None, &arguments).output().expect("it starts"));
    let documents: Vec<Value> = serde_json::Deserializer::from_str(&text)
        .into_iter()
        .collect::<Result<_, _>>()
        .expect("JSON");
    assert_eq!(documents.len(), 2, "{text}");
    for report in &documents {
        let steps = report["steps"].as_array().expect("steps");
        assert!(steps.len() >= 4 && steps.iter().all(|step| step["verified"] == true));
    }
}

#[test]
fn the_environment_names_the_machine_of_both_ends() {
    let run = |variable: &str| {
        let mut both = command(None, &["--size", "3MiB"]);
        both.env("EGMEM_SIM", variable).output().expect("it starts")
    };
    // h200x8 has no fabric, and gh200, which is simulated otherwise, has.
    let text = good(run("h200x8"));
    assert!(text.contains("no fabric"), "{text}");
    let unknown = run("gh300");
    let errors = String::from_utf8_lossy(&unknown.stderr);
    assert!(errors.contains("invalid EGMEM_SIM: 'gh300'"), "{errors}");
}

#[test]
fn a_machine_without_fabric_says_so_and_takes_fds() {
    let text = good(
        command(None, &["--size", "3MiB", "--sim", "h200x8"])
            .output()
            .expect("it starts"),
    );
    assert!(
        text.contains("no fabric") && text.contains("IMEX"),
        "{text}"
    );
    // Asked for by name, it is not silently something else.
    let arguments = [
        "--size", "3MiB", "--sim", "h200x8", "--via", "fabric", "--wait", "20",
    ];
    let output = command(None, &arguments).output().expect("it starts");
    assert!(!output.status.success());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("fabric"), "{errors}");
}

#[test]
fn two_nodes_verify_each_other_over_a_real_network() {
    let Some(cable) = Cable::lay() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let address = format!("{}:7411", cable.address(0));
    let role = |end: usize, role: &str, files: &Files| {
        let path = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        let files = [path(&files.ca), path(&files.cert), path(&files.key)];
        let mut command = command(Some(cable.name(end)), &[role, "--address", &address]);
        command.args(["--sim", "gh200", "--size", "3MiB", "--wait", "60"]);
        command.args(["--ca", &files[0], "--cert", &files[1], "--key", &files[2]]);
        command
    };
    let files = pki.issue_for("owner", &["owner", &cable.address(0)], |_| ());
    let owner = role(0, "owner", &files)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut peer = role(1, "peer", &pki.issue("peer"));
    let peer = good(peer.args(["--via", "fabric"]).output().expect("it starts"));
    assert!(
        peer.contains("mutual TLS") && peer.contains("  verified"),
        "{peer}"
    );
    let owner = good(owner.wait_with_output().expect("it ends"));
    assert!(
        owner.contains("other end peer") && owner.contains("  verified"),
        "{owner}"
    );
}
