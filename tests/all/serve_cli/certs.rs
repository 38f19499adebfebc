//! `egmem certs`, and the access that its certificates give.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::serve_cli::harness::{Service, USUAL, driver, names, stderr, stdout};
use egmem_tests::egmem;

/// Certificates made by the program; returns the folder.
fn certs(folder: &Path) -> PathBuf {
    let at = folder.join("certs");
    let out = at.to_str().unwrap();
    let run = |args: &[&str]| {
        let output = egmem(&["certs"]).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stdout(&output)
    };
    let text = run(&["init", "--out", out, "--name", "test"]);
    assert!(text.contains("ca.pem") && text.contains("ca.key"), "{text}");
    let text = run(&[
        "issue",
        "node1.test",
        "--ca",
        out,
        "--san",
        "localhost",
        "--san",
        "127.0.0.1",
    ]);
    assert!(text.contains("node1.test.pem"), "{text}");
    run(&["issue", "client.test", "--ca", out, "--days", "1"]);
    run(&["issue", "other.test", "--ca", out]);
    at
}

#[test]
fn keys_are_private_and_nothing_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let at = certs(folder.path());
    for entry in std::fs::read_dir(&at).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        let key = entry.file_name().to_string_lossy().ends_with(".key");
        assert_eq!(
            mode & 0o077,
            if key { 0 } else { mode & 0o044 },
            "{:?}",
            entry.file_name()
        );
    }
    let before = std::fs::read(at.join("ca.key")).unwrap();
    let out = at.to_str().unwrap();
    for args in [
        &["init", "--out", out][..],
        &["issue", "client.test", "--ca", out],
    ] {
        let output = egmem(&["certs"]).args(args).output().unwrap();
        let text = stderr(&output);
        assert!(
            !output.status.success() && text.contains("not overwritten"),
            "{text}"
        );
    }
    assert_eq!(std::fs::read(at.join("ca.key")).unwrap(), before);
    for name in ["../evil", ".hidden", "ca", "a b", "*.x", "-x."] {
        let output = egmem(&["certs", "issue", "--ca", out, "--", name])
            .output()
            .unwrap();
        assert!(!output.status.success(), "{name}");
    }
    assert!(!folder.path().join("evil.pem").exists());
}

#[test]
fn certificates_open_the_way_over_tcp_and_lists_of_peers_hold() {
    let folder = tempfile::tempdir().unwrap();
    certs(folder.path());
    let config = USUAL
        .replace("listen = [", "listen = [\"tcp://127.0.0.1:0\", ")
        .replace("who = [\"*\"]\naccess", "who = [\"client.test\"]\naccess")
        + "[tls]\nca = \"@/certs/ca.pem\"\ncert = \"@/certs/node1.test.pem\"\nkey = \"@/certs/node1.test.key\"\n";
    let service = Service::start_in(folder, &config, |_| {});
    let tcp = service.tcp.clone().unwrap();
    let file = |name: &str| service.path(&format!("certs/{name}")).display().to_string();
    let with = |command: &str, name: &str, args: &[&str]| {
        let mut command = egmem(&[command, &tcp]);
        command.args(args).args(["--ca", &file("ca.pem")]);
        command.args(["--cert", &file(&format!("{name}.pem"))]);
        command.args(["--key", &file(&format!("{name}.key"))]);
        command.output().unwrap()
    };
    let list = |name: &str| -> Value {
        let output = with("ls", name, &["--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(names(&list("client.test")), ["scratch", "weights"]);
    assert_eq!(names(&list("other.test")), ["scratch"]);

    // A peer does not see a name that another one creates, unless it is shared with that peer.
    let args: Vec<_> = [
        "mine",
        "--create",
        "--bytes",
        "4MiB",
        "--share",
        "node1.test",
    ]
    .iter()
    .chain(driver())
    .copied()
    .collect();
    let output = with("fetch", "client.test", &args);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("POSIX fd"),
        "same machine: {}",
        stdout(&output)
    );
    assert_eq!(names(&list("client.test")), ["mine", "scratch", "weights"]);
    assert_eq!(names(&list("other.test")), ["scratch"]);
    assert_eq!(names(&list("node1.test")), ["mine", "scratch"]);

    // Only the peer that created it can delete it.
    let output = with("delete", "node1.test", &["mine"]);
    assert!(!output.status.success(), "{}", stdout(&output));
    let output = with("delete", "client.test", &["mine"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(names(&list("client.test")), ["scratch", "weights"]);

    // Without a certificate there is no way in.
    let output = egmem(&["ls", &tcp]).output().unwrap();
    assert!(!output.status.success());
    // By environment as well.
    let output = egmem(&["ls", &tcp])
        .env("EGMEM_CA", file("ca.pem"))
        .env("EGMEM_CERT", file("client.test.pem"))
        .env("EGMEM_KEY", file("client.test.key"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    service.drained();
}
