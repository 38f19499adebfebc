//! The remedies that the commands name when a service refuses: they depend on the cause.

use std::process::Output;

use crate::serve_cli::harness::{Service, USUAL, driver, stderr};
use egmem_tests::egmem;

#[track_caller]
fn expect(output: &Output, status: i32, words: &[&str], never: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    for word in never {
        assert!(!text.contains(word), "{word:?} is in: {text}");
    }
}

#[test]
fn each_refusal_has_its_remedy() {
    let service = Service::start(USUAL);
    let output = service.run("delete", &["weights"]);
    let words = ["the service's configuration defines it", "[[buffer]]"];
    expect(&output, 1, &words, &["no such"]);
    let file = service.path("bytes");
    std::fs::write(&file, [1; 8]).unwrap();
    let output = service.fetch(&["weights", "--write", file.to_str().unwrap()]);
    let words = ["it may only be read", "--read-only"];
    expect(&output, 1, &words, &["on the other's list"]);
    let create = ["x", "--create", "--bytes", "4096", "--node", "9"];
    let words = ["no host NUMA node 9", "host nodes: 0"];
    expect(
        &service.fetch(&create),
        1,
        &words,
        &["there are 0", "peer's log"],
    );
    // Its address is in use.
    let config = service.path("egmem.toml");
    let second = egmem(&["serve", "--config", config.to_str().unwrap()])
        .args(driver())
        .output()
        .unwrap();
    let words = ["in use", "choose another address"];
    expect(&second, 1, &words, &["ulimit"]);
    service.drained();
}

#[test]
fn a_certificate_for_another_name_says_which_names_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let ca = at("ca");
    let certs = |args: &[&str]| {
        let output = egmem(&["certs"]).args(args).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    };
    certs(&["init", "--out", &ca]);
    certs(&["issue", "node1.test", "--ca", &ca, "--san", "10.9.9.9"]);
    certs(&["issue", "client.test", "--ca", &ca]);
    let config = USUAL.replace("listen = [", "listen = [\"tcp://127.0.0.1:0\", ")
        + "[tls]\nca = \"@/ca/ca.pem\"\ncert = \"@/ca/node1.test.pem\"\nkey = \"@/ca/node1.test.key\"\n";
    let files = [
        at("ca/ca.pem"),
        at("ca/client.test.pem"),
        at("ca/client.test.key"),
    ];
    let service = Service::start_in(folder, &config, |_| {});
    let tcp = service.tcp.clone().unwrap();
    let ls = |more: &[&str]| {
        let given = ["--ca", &files[0], "--cert", &files[1], "--key", &files[2]];
        let output = egmem(&["ls", &tcp]).args(given).args(more).output();
        output.unwrap()
    };
    let other = ["same user"];
    let words = [
        "not valid for name \"127.0.0.1\"",
        "node1.test",
        "10.9.9.9",
        "--expect-peer",
        "--san",
    ];
    expect(&ls(&[]), 1, &words, &other);
    let words = [
        "not valid for name \"other.test\"",
        "node1.test",
        "--expect-peer",
    ];
    expect(&ls(&["--expect-peer", "other.test"]), 1, &words, &other);
    let words = ["is for node1.test, not for spiffe://x/y", "--expect-peer"];
    expect(&ls(&["--expect-peer", "spiffe://x/y"]), 1, &words, &other);
    assert!(ls(&["--expect-peer", "node1.test"]).status.success());
    service.drained();
}
