//! `egmem report`: whole on every machine, and without anything that identifies one.

use std::path::Path;
use std::process::{Command, Output};

use egmem::doctor::Survey;
use egmem::doctor::survey::VERSION;
use egmem_tests::{egmem, egmem_program, words};
use serde_json::{Value, json as value};

const PARTS: [&str; 6] = [
    "proofs",
    "bandwidth_gb_s",
    "latency_us",
    "pinning",
    "placement",
    "fabric",
];

/// A machine with one GPU that the driver knows no node of.
const LAPTOP: &str = r#"{"name": "laptop", "nodes": [{"memory": "8 GiB"}],
    "gpus": [{"memory": "4 GiB", "name": "a laptop's GPU", "compute_capability": [8, 6]}]}"#;

const UUID: &str = "01234567-89ab-cdef-0123-456789abcdef";

/// `egmem report`, whose children run as it does.
fn command(args: &[&str]) -> Command {
    let mut command = egmem(&["report"]);
    for word in words(egmem_program()) {
        command.arg("--probe-command").arg(word);
    }
    command.args(args);
    command
}

/// Runs the command with a JSON file, and returns the text and the JSON.
fn run(command: &mut Command) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = command.arg("--json").arg(&path).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    (String::from_utf8(output.stdout).unwrap(), json)
}

/// Writes a machine's description, and returns the option for it.
fn described(folder: &Path, machine: &str) -> [String; 2] {
    let path = folder.join("machine.json");
    std::fs::write(&path, machine).unwrap();
    ["--sim".into(), path.to_str().unwrap().into()]
}

fn problems(section: &Value) -> Vec<&str> {
    let mut messages = Vec::new();
    for problem in section["problems"].as_array().unwrap() {
        messages.push(problem["reason"]["message"].as_str().unwrap());
    }
    messages
}

fn rows(section: &Value) -> &Vec<Value> {
    section["rows"].as_array().unwrap()
}

#[test]
fn every_simulated_machine_has_every_part_and_no_figure() {
    let folder = tempfile::tempdir().unwrap();
    let laptop = described(folder.path(), LAPTOP);
    for sim in ["gh200", "gh200x4", "gb200", "h200x8", &laptop[1]] {
        let (text, report) = run(&mut command(&["--sim", sim]));
        assert_eq!(report["version"], VERSION);
        assert!(text.contains("SIMULATED"), "{text}");
        assert!(!report["topology"]["nodes"].as_array().unwrap().is_empty());
        let imex = report["doctor"]["imex"]["present"] == true;
        for part in PARTS {
            let section = &report[part];
            assert_eq!(section["seconds"], "simulated", "{sim} {part}");
            let refused = part == "fabric" && !imex;
            assert_eq!(rows(section).is_empty(), refused, "{sim} {part}: {section}");
            let problems = problems(section);
            assert_eq!(problems.is_empty(), !refused, "{sim} {part}: {problems:?}");
            assert!(problems.iter().all(|text| text.contains("no IMEX channel")));
        }
        assert!(
            rows(&report["proofs"])
                .iter()
                .all(|row| row["verified"] == true)
        );
        assert!(
            rows(&report["placement"])
                .iter()
                .all(|row| row["on_node"] == true)
        );
        let figures = ["bandwidth_gb_s", "latency_us", "pinning"].map(|part| rows(&report[part]));
        let names = ["copy_to_gpu", "copy_to_host", "kernel_read", "kernel_write"];
        for row in figures.into_iter().flatten() {
            for name in names.iter().chain(&["allocate_s", "release_s"]) {
                let figure = row.get(name).unwrap_or(&Value::Null);
                assert!(figure.is_null() || figure == "simulated", "{sim}: {row}");
            }
        }
        assert!(!text.contains(" GB/s)"), "{text}");
        let wide = text.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None);
    }
}

#[test]
fn a_report_is_the_same_after_a_round_trip() {
    let output = command(&["--sim", "gb200", "--json", "-"])
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let survey: Survey = serde_json::from_value(report.clone()).unwrap();
    assert_eq!(serde_json::to_value(&survey).unwrap(), report);
}

#[test]
fn measured_figures_are_read_and_shown() {
    let output = command(&["--sim", "gb200", "--json", "-"])
        .output()
        .unwrap();
    let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rate = value!({"median": 1234.56, "min": 1.0, "max": 2000.0});
    for part in ["bandwidth_gb_s", "latency_us", "pinning"] {
        for row in report[part]["rows"].as_array_mut().unwrap() {
            for (name, figure) in row.as_object_mut().unwrap() {
                if figure == "simulated" {
                    let seconds = name.ends_with("_s");
                    *figure = if seconds { value!(0.5) } else { rate.clone() };
                }
            }
        }
    }
    report["pinning"]["seconds"] = value!(2.5);
    let survey: Survey = serde_json::from_value(report.clone()).unwrap();
    assert_eq!(serde_json::to_value(&survey).unwrap(), report);
    let text = survey.to_text();
    for words in [
        "1234.6",
        "1234.56",
        "registered, 4 MiB: 0.500 s (0.0 GB/s), released in 0.500 s",
    ] {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
    let wide = text.lines().find(|line| line.chars().count() > 80);
    assert_eq!(wide, None);
}

#[test]
fn without_a_driver_the_host_s_facts_and_the_reason_remain() {
    // Where there are GPUs, hidden they count as none.
    let mut command = command(&[]);
    let (text, report) = run(command
        .env("CUDA_VISIBLE_DEVICES", "")
        .env_remove("EGMEM_SIM"));
    assert!(text.contains("does NOT work"), "{text}");
    assert!(report["doctor"]["host"]["kernel"].is_string(), "{report}");
    assert!(!report["topology"]["nodes"].as_array().unwrap().is_empty());
    let problem = &report["doctor"]["driver"]["problem"]["message"];
    for part in PARTS {
        assert!(rows(&report[part]).is_empty());
        assert_eq!(problems(&report[part]), [problem.as_str().unwrap()]);
    }
}

#[test]
fn a_driver_that_crashes_ends_no_report() {
    let crash = |fault| {
        let args = ["--sim", "gh200", "--sim-probe-fault", fault];
        run(&mut command(&args)).1
    };
    let report = crash("abort-at-end");
    for part in PARTS {
        let problems = problems(&report[part]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains("SIGABRT"), "{problems:?}");
        assert!(
            !rows(&report[part]).is_empty(),
            "what it said before counts"
        );
    }
    let report = crash("abort-at-open");
    assert_eq!(report["doctor"]["works"], false);
    for part in PARTS {
        assert!(problems(&report[part])[0].contains("SIGABRT"), "{report}");
    }
}

#[test]
fn gpus_are_chosen_by_ordinal_and_an_absent_one_is_refused() {
    let (_, report) = run(&mut command(&["--sim", "gh200x4", "--gpu", "1,3"]));
    for row in rows(&report["proofs"]) {
        assert!(row["gpu"] == 1 || row["gpu"] == 3, "{row}");
    }
    let refused: Output = command(&["--sim", "gh200x4", "--gpu", "4"])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stdout.is_empty());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("there is no GPU 4"));
}

/// Returns what a report must not say.
fn secrets() -> Vec<String> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let mut secrets: Vec<String> = ["ada-lovelace", "engine.so", "wine-cellar", "0x7", UUID]
        .map(str::to_owned)
        .into();
    secrets.push(host.trim().to_owned());
    secrets
}

/// Returns a secret that stands in a text, and is not a part of a longer word.
fn leak(text: &str) -> Option<String> {
    let is_word = |char: char| char.is_alphanumeric();
    secrets().into_iter().find(|secret| {
        text.match_indices(secret.as_str()).any(|(at, _)| {
            let after = &text[at + secret.len()..];
            let open = secret == "0x7" || !after.starts_with(is_word);
            open && !text[..at].ends_with(is_word)
        })
    })
}

#[test]
fn neither_output_identifies_the_machine_its_users_or_its_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let host = secrets().pop().unwrap();
    let name = format!("ada-lovelace's {host} at 0x7f0012345678, /home/wine-cellar/x, GPU-{UUID}");
    let gpu =
        value!({"memory": "1 GiB", "host_numa": 0, "name": name, "uuid": format!("GPU-{UUID}")});
    let machine = value!({"name": name, "nodes": [{"memory": "1 GiB"}], "gpus": [gpu]});
    let sim = described(folder.path(), &machine.to_string());
    let sim: Vec<&str> = sim.iter().map(String::as_str).collect();
    let mut report = command(&sim);
    report
        .env("USER", "ada-lovelace")
        .env("CUDA_VISIBLE_DEVICES", format!("GPU-{UUID}"))
        .env("LD_PRELOAD", "/opt/wine-cellar/engine.so");
    let (text, json) = run(&mut report);
    // The doctor's own report does: otherwise this test shows nothing.
    let found = leak(&machine.to_string());
    assert!(found.is_some());
    assert_eq!(leak(&text), None, "{text}");
    let json = json.to_string();
    assert_eq!(leak(&json), None, "{json}");
    for output in [text, json] {
        for word in ["<name>", "<address>", "<path>", "<uuid>"] {
            assert!(output.contains(word), "{word} is not in {output}");
        }
        // Where GPUs are on the bus: 0000:01:00.0.
        assert!(!output.contains("0000:"), "{output}");
        assert!(!output.contains("pci_bus_id"), "{output}");
    }
}
