//! `egm-demo` as a process: its output and its exit status.

use std::process::Output;

use egmem_tests::{command, example};
use serde_json::Value;

const PRESETS: [&str; 4] = ["gh200", "gh200x4", "gb200", "h200x8"];

fn run(args: &[&str]) -> Output {
    command(example("egm-demo"))
        .args(args)
        .output()
        .expect("egm-demo starts")
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(args: &[&str]) -> Value {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    serde_json::from_str(stdout(&output)).unwrap_or_else(|error| {
        panic!("{args:?}: {error}: {}", stdout(&output));
    })
}

#[test]
fn the_environment_names_a_machine_and_an_option_wins() {
    let machine = |variable: &str, args: &[&str]| {
        let mut demo = command(example("egm-demo"));
        demo.args(["--size", "64KiB", "--json"]).args(args);
        let output = demo.env("EGMEM_SIM", variable).output().unwrap();
        let report = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (report["machine"]["name"].clone(), stderr(&output))
    };
    assert_eq!(machine("gb200", &[]).0, "gb200");
    assert_eq!(machine("gh300", &["--sim", "gh200"]).0, "gh200");
    let (_, error) = machine("gh300", &[]);
    assert!(error.contains("invalid EGMEM_SIM: 'gh300'"), "{error}");
}

#[test]
fn every_preset_proves_every_pair_by_every_path() {
    for preset in PRESETS {
        let report = json(&["--sim", preset, "--size", "256KiB", "--json"]);
        assert_eq!(report["backend"], "simulated", "{preset}");
        assert_eq!(report["size"], 256 << 10, "{preset}");
        assert_eq!(report["machine"]["name"], preset);
        assert!(report.get("bandwidth").is_none(), "{preset}");

        let gpus = report["gpus"].as_array().expect("gpus");
        assert!(!gpus.is_empty(), "{preset}");
        for (index, gpu) in gpus.iter().enumerate() {
            assert_eq!(gpu["ordinal"], index);
            assert!(
                gpu["name"].is_string() && gpu["host_numa"].is_i64(),
                "{gpu}"
            );
        }
        let nodes = report["nodes"].as_array().expect("nodes");
        let proofs = report["proofs"].as_array().expect("proofs");
        for node in nodes {
            for gpu in gpus {
                for path in ["vmm", "registered", "pool"] {
                    let found: Vec<&Value> = proofs
                        .iter()
                        .filter(|proof| {
                            proof["node"] == node["id"]
                                && proof["gpu"] == gpu["ordinal"]
                                && proof["path"] == path
                        })
                        .collect();
                    assert!(!found.is_empty(), "{preset}: {path} for {gpu} on {node}");
                    for proof in found {
                        assert_eq!(proof["verified"], true, "{preset}: {proof}");
                        assert!(proof["api"] == "driver" || proof["api"] == "runtime");
                    }
                }
            }
        }
    }
}

#[test]
fn people_are_told_first_that_it_is_simulated_and_see_no_rate() {
    let output = run(&[
        "--sim",
        "gh200",
        "--size",
        "256KiB",
        "--plot",
        "/nonexistent",
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    let first = text.lines().next().expect("a first line");
    assert!(
        first.contains("SIMULATED") && first.contains("gh200"),
        "{first}"
    );
    assert!(
        !text.contains("B/s") && !text.contains("andwidth"),
        "{text}"
    );
    assert!(text.contains("verified"), "{text}");
    assert!(
        stderr(&output).contains("--plot draws nothing: a simulator"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_machine_can_come_from_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("machine.json");
    let machine = r#"{
        "name": "two sockets, one GPU of unknown node",
        "nodes": [{"id": 0, "memory": "1 GiB"}, {"id": 3, "memory": "1 GiB"}],
        "gpus": [{"memory": "1 GiB"}]
    }"#;
    std::fs::write(&path, machine).expect("written");
    let path = path.to_str().expect("UTF-8");

    let report = json(&["--sim", path, "--size", "256KiB", "--json"]);
    assert_eq!(
        report["machine"]["name"],
        "two sockets, one GPU of unknown node"
    );
    assert_eq!(report["gpus"].as_array().map(Vec::len), Some(1));
    assert!(
        report["gpus"][0]["host_numa"].is_null(),
        "{}",
        report["gpus"]
    );

    let nodes: Vec<i64> = report["proofs"]
        .as_array()
        .expect("proofs")
        .iter()
        .filter(|proof| proof["path"] == "vmm")
        .map(|proof| proof["node"].as_i64().expect("an id"))
        .collect();
    assert_eq!(nodes, [0, 3]);

    std::fs::write(path, "{\"nodes\": 7}").expect("written");
    let output = run(&["--sim", path]);
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("machine description"),
        "{}",
        stderr(&output)
    );
}

#[cfg(feature = "portable")]
#[test]
fn a_machine_can_come_from_lstopo() {
    let path = egmem_tests::data("gh200x4.xml").display().to_string();
    let report = json(&["--sim", &path, "--size", "256KiB", "--gpus", "2", "--json"]);
    assert_eq!(report["gpus"][0]["host_numa"], 2, "{}", report["gpus"]);
    assert_eq!(report["nodes"].as_array().map(Vec::len), Some(4));
    let proofs = report["proofs"].as_array().expect("proofs");
    assert!(proofs.iter().all(|proof| proof["verified"] == true));
}

#[test]
fn gpus_are_chosen_by_ordinal_and_an_absent_one_is_refused() {
    let report = json(&[
        "--sim", "gh200x4", "--gpus", "3,1,3", "--size", "256KiB", "--json",
    ]);
    let of = |list: &str, field: &str| {
        let mut values: Vec<i64> = report[list]
            .as_array()
            .expect("a list")
            .iter()
            .map(|entry| entry[field].as_i64().expect("an integer"))
            .collect();
        values.sort_unstable();
        values.dedup();
        values
    };
    assert_eq!(of("gpus", "ordinal"), [1, 3]);
    assert_eq!(of("proofs", "gpu"), [1, 3]);
    assert_eq!(of("proofs", "node"), [0, 1, 2, 3]);

    let output = run(&["--sim", "gh200x4", "--gpus", "0,4", "--json"]);
    assert!(!output.status.success());
    assert_eq!(stdout(&output), "");
    assert!(
        stderr(&output).contains("there is no GPU 4"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn an_unknown_machine_is_refused_with_the_presets() {
    let output = run(&["--sim", "gh300"]);
    assert!(!output.status.success());
    for preset in PRESETS {
        assert!(stderr(&output).contains(preset), "{}", stderr(&output));
    }
}

#[test]
fn no_bytes_at_all_prove_nothing_and_are_refused() {
    for size in ["0", "18446744073709551615"] {
        let output = run(&["--sim", "gh200", "--size", size]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("--size"), "{}", stderr(&output));
    }
    assert_eq!(run(&["--size", "5 parsecs"]).status.code(), Some(2));
}

#[test]
fn memory_that_no_node_has_fails_every_proof_with_its_reason() {
    let output = run(&["--sim", "gh200", "--size", "4TiB", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report: Value = serde_json::from_str(stdout(&output)).expect("JSON");
    for proof in report["proofs"].as_array().expect("proofs") {
        assert_eq!(proof["verified"], false, "{proof}");
        assert!(
            proof["reason"].is_string() && proof["remedy"].is_string(),
            "{proof}"
        );
    }
}

#[test]
fn cuda_is_never_simulated_when_it_is_insisted_on() {
    if egmem::Driver::open().is_ok() {
        return; // There is a GPU: then this is no failure, and takes long.
    }
    let output = run(&["--cuda"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout(&output), "");

    let output = run(&["--size", "256KiB", "--gpus", "0"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.starts_with("SIMULATED"), "{text}");
    assert!(text.contains("--sim") && text.contains("--cuda"), "{text}");
}
