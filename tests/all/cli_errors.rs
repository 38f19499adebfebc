//! The remedies that the command line names when something fails: they depend on the cause.

use std::path::Path;
use std::process::{Output, Stdio};

use egmem_tests::egmem;

fn run(args: &[&str]) -> Output {
    egmem(args).stdin(Stdio::null()).output().unwrap()
}

/// Fails with this status, says each of `words`, and none of `never`.
#[track_caller]
fn expect(output: &Output, status: i32, words: &[&str], never: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    for word in never {
        assert!(!text.contains(word), "{word:?} is in: {text}");
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_first_connection_that_fails_is_no_lost_peer() {
    let lost = ["is lost", "stays mapped"];
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", taken.local_addr().unwrap());
    drop(taken);
    let words = [
        "cannot connect to tcp://127.0.0.1:",
        "refused",
        "nobody listens there",
    ];
    expect(&run(&["ls", &address]), 1, &words, &lost);
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", text(&folder.path().join("no.sock")));
    let words = ["cannot connect to unix:", "no socket is there"];
    expect(&run(&["ls", &address]), 1, &words, &lost);
}

#[test]
fn a_network_address_without_certificates_names_the_option() {
    let output = run(&["ls", "tcp://192.0.2.1:7740"]);
    expect(&output, 1, &["--plain-anywhere", "certs issue"], &[]);
}

#[test]
fn certificates_are_for_names_that_can_be_and_authorities_that_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("ca");
    let issue = |args: &[&str]| run(&[&["certs", "issue"], args].concat());
    let words = ["no ca.pem in", "certs init"];
    expect(
        &issue(&["node1", "--ca", text(&at)]),
        2,
        &words,
        &["ulimit"],
    );
    assert!(run(&["certs", "init", "--out", text(&at)]).status.success());
    let wrong = issue(&["node1", "--ca", text(&at), "--san", "300.1.1.1"]);
    let words = ["'300.1.1.1' is not an IP address", "0 to 255"];
    expect(&wrong, 2, &words, &["what to do"]);
    assert!(!at.join("node1.pem").exists());
    let list = issue(&["node1", "--ca", text(&at), "--san", "a.test,10.0.0.1"]);
    expect(&list, 0, &[], &[]);
}

#[test]
fn a_name_that_cannot_be_is_refused_before_it_is_sent() {
    for command in ["fetch", "delete"] {
        let output = run(&[command, "unix:/nowhere/egmem.sock", "a b"]);
        let words = ["byte 1 may not be in a name", "1 to 255 of"];
        expect(&output, 2, &words, &["peer's log"]);
    }
}

/// Skipped where there is a driver, because `topo` then lists GPUs as well.
#[test]
fn without_a_driver_topo_still_asks_hwloc() {
    let output = egmem(&["topo"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap();
    if !String::from_utf8_lossy(&output.stderr).contains("no CUDA driver") {
        return eprintln!("SKIPPED: there is a driver");
    }
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    let source = match cfg!(feature = "portable") {
        true => "(told by hwloc)",
        false => "(told by the kernel)",
    };
    assert!(shown.contains(source), "{shown}");
}

/// A web page that offers a command to copy can put anything into its arguments.
#[test]
fn wrong_arguments_come_back_without_control_characters() {
    let wrong = "x\u{1b}]0;title\u{7}\u{9b}2J\u{202e}\nerror: forged";
    let option = format!("--{wrong}");
    let valued = format!("--bytes={wrong}");
    let several = format!("--san=a.test,{wrong}");
    for args in [
        &[wrong][..],
        &[&option],
        &["ls", &option],
        &["ls", wrong, wrong],
        &["ls", "--connect-timeout", wrong],
        &["ls", wrong],
        &["fetch", "unix:/x", "a", "--create", &valued],
        &["completions", wrong],
        &["certs", wrong],
        &["certs", "issue", "a.test", "--days", wrong],
        &["certs", "issue", "a.test", &several],
        &["doctor", "--sim", wrong],
    ] {
        let output = run(args);
        assert_ne!(output.status.code(), Some(0), "{args:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        let bad = |c: char| egmem::text::is_unsafe(c) && c != '\n';
        assert!(!text.contains(bad), "{text:?}");
        assert!(
            !text.lines().any(|line| line.starts_with("error: forged")),
            "{text:?}"
        );
    }
}
