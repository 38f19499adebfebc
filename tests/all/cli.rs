//! The command line as its users and their scripts see it.

use std::process::{Command, Output, Stdio};

use egmem_tests::{egmem, egmem_program, words};
use serde_json::{Value, json as value};

const PRESETS: [&str; 4] = ["gh200", "gh200x4", "gb200", "h200x8"];

/// `egmem doctor`, whose children run as it does.
fn doctor_command() -> Command {
    let mut command = egmem(&["doctor"]);
    for word in words(egmem_program()) {
        command.arg("--probe-command").arg(word);
    }
    command
}

fn doctor(args: &[&str]) -> Output {
    doctor_command().args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}\n{}{}", stdout(output), stderr(output)))
}

fn status(output: &Output) -> i32 {
    output.status.code().expect("it ended by itself")
}

/// How often each answer was given by trials of `path` and handle types `bits`.
fn answers(report: &Value, path: &str, bits: u64) -> Vec<(String, Value)> {
    report["capabilities"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|tried| tried["path"] == path && tried["handle_types"] == bits)
        .map(|tried| {
            let answer = tried["answer"].as_str().unwrap().to_owned();
            (answer, tried["reason"].clone())
        })
        .collect()
}

fn expect_narrow(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "too wide: {line}");
    }
}

#[test]
fn doctor_tells_of_every_preset_that_it_works() {
    for preset in PRESETS {
        let output = doctor(&["--sim", preset]);
        let text = stdout(&output);
        assert_eq!(status(&output), 0, "{preset}: {text}{}", stderr(&output));
        let first = text.lines().next().unwrap();
        assert!(first.starts_with("SIMULATED"), "{preset}: {first}");
        assert!(first.contains(preset), "{preset}: {first}");
        assert!(text.contains("VMM") && text.contains("pool"), "{text}");
        expect_narrow(&text);
    }
}

#[test]
fn the_documentation_shows_the_output_of_doctor() {
    let text = stdout(&doctor(&["--sim", "gh200x4"]));
    assert!(
        include_str!("../../docs/doctor.md").contains(&text),
        "{text}"
    );
}

#[test]
fn doctors_json_has_every_node_gpu_path_and_handle_type() {
    let mut channels = Vec::new();
    for preset in PRESETS {
        let machine = egmem::Machine::preset(preset).unwrap();
        let (nodes, gpus) = (machine.nodes.len(), machine.gpus.len());
        let channel = machine.imex_channel;
        channels.push(channel);
        let output = doctor(&["--json", "--sim", preset]);
        assert_eq!(status(&output), 0, "{preset}: {}", stderr(&output));
        let report = json(&output);
        assert_eq!(report["simulated"], preset);
        assert_eq!(report["works"], true);
        assert_eq!(report["driver"]["backend"], "simulated");
        assert_eq!(report["working_gpus"].as_array().unwrap().len(), gpus);
        let tried = report["capabilities"].as_array().unwrap();
        assert_eq!(tried.len(), nodes * gpus * 2 * 4, "{preset}");
        assert_eq!(report["imex"]["present"], channel, "{preset}");
        for path in ["vmm", "pool"] {
            for (bits, works) in [(0, true), (1, true), (8, channel), (9, channel)] {
                let answers = answers(&report, path, bits);
                assert_eq!(answers.len(), nodes * gpus);
                for (answer, reason) in answers {
                    assert_eq!(answer == "yes", works, "{preset} {path} {bits}: {reason}");
                    if !works {
                        assert_eq!(reason["kind"], "NoImexChannel");
                        assert_eq!(reason["code"], 800);
                        assert!(!reason["remedy"].as_str().unwrap().is_empty());
                    }
                }
            }
        }
    }
    assert!(channels.contains(&true) && channels.contains(&false));
}

#[test]
fn doctor_says_what_auto_takes_on_each_node_and_why() {
    let backings = |preset: &str| json(&doctor(&["--json", "--sim", preset]))["backings"].take();
    let registered = value!({"backing": "registered", "why": "faster"});
    let reason = "registered memory is pinned faster";
    let of = |bits: u32| value!({"node": 0, "handle_types": bits, "chosen": registered, "reason": reason});
    assert_eq!(backings("h200x8"), value!([of(0), of(1)]));
    let coherent = backings("gb200");
    let coherent = coherent.as_array().unwrap();
    let reasons = ["coherent", "coherent", "fabric"];
    for (backing, why) in coherent.iter().zip(reasons.iter().cycle()) {
        assert_eq!(backing["chosen"], value!({"backing": "driver", "why": why}));
    }
    assert_eq!(coherent.len(), 2 * 3);
    let text = stdout(&doctor(&["--sim", "h200x8"]));
    let row = format!("0: not shared → registered: {reason}");
    assert!(text.contains(&row), "{text}");
}

#[test]
fn without_a_driver_doctor_reports_all_it_can_and_fails() {
    // Where there are GPUs, hidden they count as none.
    let hidden = |args: &[&str]| {
        let mut command = egmem(&["doctor"]);
        for word in words(egmem_program()) {
            command.arg("--probe-command").arg(word);
        }
        command
            .args(args)
            .env("CUDA_VISIBLE_DEVICES", "")
            .output()
            .unwrap()
    };
    let output = hidden(&["--json"]);
    assert_eq!(status(&output), 1);
    let report = json(&output);
    assert_eq!(report["works"], false);
    assert_eq!(report["simulated"], Value::Null);
    let problem = &report["driver"]["problem"];
    assert!(!problem["remedy"].as_str().unwrap().is_empty(), "{problem}");
    assert!(!report["topology"]["nodes"].as_array().unwrap().is_empty());
    assert!(report["host"].is_object());
    let text = stdout(&hidden(&[]));
    assert!(text.contains("does NOT work"), "{text}");
    assert!(!text.contains("SIMULATED"), "{text}");
    expect_narrow(&text);
}

#[test]
fn a_trial_that_dies_is_one_no_and_takes_nothing_along() {
    for (fault, how) in [("abort", "SIGABRT"), ("exit", "exit status: 3")] {
        let args = ["--json", "--sim", "gh200x4", "--sim-probe-fault", fault];
        let output = doctor(&args);
        assert_eq!(status(&output), 0, "{}", stderr(&output));
        let report = json(&output);
        let died = answers(&report, "vmm", 8);
        assert_eq!(died.len(), 16);
        for (answer, reason) in died {
            assert_eq!(answer, "no");
            assert_eq!(reason["kind"], "ProbeDied");
            assert!(
                reason["message"].as_str().unwrap().contains(how),
                "{reason}"
            );
        }
        for (path, bits) in [("vmm", 0), ("vmm", 1), ("pool", 0), ("pool", 1)] {
            for (answer, reason) in answers(&report, path, bits) {
                assert_eq!(answer, "yes", "{path} {bits}: {reason}");
            }
        }
        // The trials after the dead one in its batch still ran.
        for (_, reason) in answers(&report, "vmm", 9) {
            assert_eq!(reason["kind"], "NoImexChannel");
        }
    }
}

#[test]
fn a_trial_that_hangs_is_stopped_and_not_repeated_elsewhere() {
    let args = ["--json", "--sim", "gh200x4", "--sim-probe-fault", "hang"];
    // Long enough for a child under an emulator to start and answer.
    let output = doctor(&[&args[..], &["--timeout", "4"]].concat());
    assert_eq!(status(&output), 0, "{}", stderr(&output));
    let report = json(&output);
    let answers_of_hung = answers(&report, "vmm", 8);
    let stopped: Vec<_> = answers_of_hung.iter().filter(|(a, _)| a == "no").collect();
    assert_eq!(stopped.len(), 1, "it hung once alone");
    let message = stopped[0].1["message"].as_str().unwrap();
    assert!(message.contains("no answer within 4s"), "{message}");
    for (answer, reason) in &answers_of_hung {
        assert_ne!(answer, "yes");
        assert_eq!(reason["kind"], "ProbeDied");
    }
    for (answer, _) in answers(&report, "vmm", 1) {
        assert_eq!(answer, "yes");
    }
}

#[test]
fn a_driver_that_dies_when_opened_is_the_drivers_problem() {
    let args = [
        "--json",
        "--sim",
        "gh200",
        "--sim-probe-fault",
        "abort-at-open",
    ];
    let output = doctor(&args);
    assert_eq!(status(&output), 1);
    let report = json(&output);
    assert_eq!(report["simulated"], "gh200");
    assert_eq!(report["driver"]["problem"]["kind"], "ProbeDied");
    assert_eq!(report["capabilities"].as_array().unwrap().len(), 0);
}

#[test]
fn an_answer_of_a_child_that_then_dies_does_not_count() {
    let args = [
        "--json",
        "--sim",
        "gh200",
        "--sim-probe-fault",
        "abort-at-end",
    ];
    let output = doctor(&args);
    assert_eq!(status(&output), 1, "{}", stderr(&output));
    let report = json(&output);
    assert_eq!(report["works"], false);
    for bits in [0, 1, 8, 9] {
        for (answer, reason) in answers(&report, "pool", bits) {
            assert_eq!(answer, "no");
            assert_eq!(reason["kind"], "ProbeDied");
        }
    }
    for backing in report["backings"].as_array().unwrap() {
        assert_eq!(backing["chosen"], Value::Null);
        let reason = backing["reason"].as_str().unwrap();
        assert!(
            reason.contains("the probe of registered memory died"),
            "{reason}"
        );
    }
}

#[test]
fn a_probe_that_does_not_start_is_no_support() {
    let mut command = egmem(&["doctor", "--json", "--sim", "gh200"]);
    let output = command
        .args(["--probe-command", "/nonexistent/probe"])
        .output();
    let output = output.unwrap();
    assert_eq!(status(&output), 1);
    let problem = &json(&output)["driver"]["problem"];
    assert_eq!(problem["kind"], "ProbeDied");
    let message = problem["message"].as_str().unwrap();
    assert!(message.contains("could not be started"), "{message}");
}

#[test]
fn topo_draws_every_preset() {
    for (preset, nodes, gpus) in [
        ("gh200", 1, 1),
        ("gh200x4", 4, 4),
        ("gb200", 2, 4),
        ("h200x8", 1, 8),
    ] {
        let topo = |args: &[&str]| {
            let output = egmem(&["topo", "--sim", preset]).args(args).output();
            let output = output.unwrap();
            assert_eq!(status(&output), 0, "{preset}: {}", stderr(&output));
            output
        };
        let text = stdout(&topo(&[]));
        assert!(text.contains("SIMULATED"), "{preset}: {text}");
        let json = json(&topo(&["--json"]));
        assert_eq!(json["nodes"].as_array().unwrap().len(), nodes, "{preset}");
        assert_eq!(json["gpus"].as_array().unwrap().len(), gpus, "{preset}");
        let svg = stdout(&topo(&["--svg", "-"]));
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.svg");
        let output = topo(&["--svg", path.to_str().unwrap()]);
        assert!(output.stdout.is_empty());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), svg);
    }
}

#[test]
fn topo_draws_a_machine_that_hwloc_described() {
    let xml = egmem_tests::data("gh200x4.xml").display().to_string();
    let output = egmem(&["topo", "--json", "--xml", &xml]).output().unwrap();
    assert_eq!(status(&output), 0, "{}", stderr(&output));
    assert_eq!(json(&output)["nodes"].as_array().unwrap().len(), 4);

    let output = egmem(&["topo", "--xml", "/nonexistent.xml"])
        .output()
        .unwrap();
    assert_eq!(status(&output), 1);
    let message = stderr(&output);
    assert!(message.contains("what to do:"), "{message}");
}

#[test]
fn wrong_usage_is_told_apart_from_missing_capabilities() {
    for args in [
        &["doctor", "--sim", "gh300"][..],
        &["doctor", "--sim", "/nonexistent/machine.json"],
        &["doctor", "--timeout", "never"],
        &["doctor", "--sim-probe-fault", "abort"],
        &["topo", "--sim", "gh300"],
        &["nonsense"],
        &[],
    ] {
        let output = egmem(args).output().unwrap();
        assert_eq!(status(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn a_machine_can_be_described_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("desk.json");
    let machine = r#"{"name": "desk", "imex_channel": true,
        "nodes": [{"memory": "64 GiB"}],
        "gpus": [{"memory": "16 GiB", "host_numa": 0}, {"memory": "16 GiB"}]}"#;
    std::fs::write(&path, machine).unwrap();
    let path = path.to_str().unwrap();
    let output = doctor(&["--json", "--sim", path]);
    assert_eq!(status(&output), 0, "{}", stderr(&output));
    let report = json(&output);
    assert_eq!(report["simulated"], "desk");
    assert_eq!(answers(&report, "vmm", 8).len(), 2);

    std::fs::write(folder.path().join("desk.json"), "{").unwrap();
    let output = doctor(&["--sim", path]);
    assert_eq!(status(&output), 2);
    assert!(stderr(&output).contains("desk.json"), "{}", stderr(&output));
}

#[test]
fn the_environment_names_a_machine_and_an_option_wins() {
    let topo = || egmem(&["topo"]);
    let ps = || egmem(&["ps", "--json"]);
    for command in [doctor_command, topo, ps] {
        let run = |variable: &str, args: &[&str]| {
            let mut command = command();
            command.args(args).env("EGMEM_SIM", variable);
            command.output().unwrap()
        };
        for (variable, args) in [("gb200", &[][..]), ("gh300", &["--sim", "gb200"])] {
            let named = run(variable, args);
            assert_eq!(status(&named), 0, "{}", stderr(&named));
            // Of these machines gb200 alone has two nodes; `ps` also shows other tests' processes.
            let of_gb200 = match serde_json::from_slice::<Value>(&named.stdout) {
                Ok(report) => report["nodes"].as_array().unwrap().len() == 2,
                Err(_) => stdout(&named).contains("gb200"),
            };
            assert!(of_gb200, "{}", stdout(&named));
        }
        let unknown = run("gh300", &[]);
        assert_eq!(status(&unknown), 2, "{}", stderr(&unknown));
        let why = "invalid EGMEM_SIM: 'gh300' is neither one of gh200, ";
        assert!(stderr(&unknown).contains(why), "{}", stderr(&unknown));
    }
    // As if it were not set.
    let empty = topo().env("EGMEM_SIM", "").output().unwrap();
    assert!(!stdout(&empty).contains("SIMULATED"), "{}", stdout(&empty));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    for args in [&["topo"][..], &["topo", "--json"], &["topo", "--svg", "-"]] {
        let mut child = egmem(args)
            .args(["--sim", "gh200x4"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
        assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
    }
}

#[test]
fn the_version_is_the_packages() {
    let output = egmem(&["--version"]).output().unwrap();
    let version = concat!("egmem ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(stdout(&output), version);
}

#[test]
fn every_help_tells_the_exit_status_and_the_log() {
    let commands = [
        "doctor",
        "topo",
        "serve",
        "ls",
        "fetch",
        "delete",
        "certs",
        "certs init",
        "certs issue",
        "completions",
        "man",
    ];
    for command in commands.into_iter().chain([""]) {
        let words: Vec<_> = command.split_whitespace().chain(["--help"]).collect();
        let output = egmem(&words).output().unwrap();
        assert_eq!(status(&output), 0, "{command}");
        let text = stdout(&output)
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert!(text.contains("RUST_LOG"), "{command}: {text}");
        for word in ["Exit status: 0 ", "1 ", "2 for wrong "] {
            assert!(text.contains(word), "{command}: {word:?}: {text}");
        }
        assert_eq!(text.matches("Exit status").count(), 1, "{command}: {text}");
    }
}

#[test]
fn a_description_that_cannot_be_read_is_wrong_usage_everywhere() {
    for command in [&["doctor"][..], &["topo"]] {
        let sim = ["--sim", "/nonexistent/machine.json"];
        let output = egmem(&[command, &sim].concat()).output().unwrap();
        assert_eq!(status(&output), 2, "{command:?}: {}", stderr(&output));
    }
}

#[test]
fn shells_complete_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let output = egmem(&["completions", shell]).output().unwrap();
        assert_eq!(status(&output), 0, "{shell}: {}", stderr(&output));
        let script = stdout(&output);
        for word in ["egmem", "doctor", "expect-peer"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    assert_eq!(status(&egmem(&["completions", "tcl"]).output().unwrap()), 2);
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("man1");
    let output = egmem(&["man", "--out", out.to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(status(&output), 0, "{}", stderr(&output));
    let page = |name: &str| std::fs::read_to_string(out.join(format!("{name}.1"))).unwrap();
    assert!(page("egmem").contains(".TH egmem 1"), "{}", page("egmem"));
    let issue = page("egmem-certs-issue");
    assert!(
        issue.contains("san") && issue.contains("Exit status"),
        "{issue}"
    );
    assert!(!out.join("egmem-probe.1").exists());
    // Once more, over those.
    assert_eq!(
        status(
            &egmem(&["man", "--out", out.to_str().unwrap()])
                .output()
                .unwrap()
        ),
        0
    );
}

#[test]
fn serve_finds_the_users_configuration_and_then_says_where_it_looked() {
    let folder = tempfile::tempdir().unwrap();
    let check = || {
        egmem(&["serve", "--check"])
            .env("XDG_CONFIG_HOME", folder.path())
            .output()
            .unwrap()
    };
    let own = folder.path().join("egmem/egmem.toml");
    if !std::path::Path::new("/etc/egmem/egmem.toml").exists() {
        let output = check();
        assert_eq!(status(&output), 2);
        let text = stderr(&output);
        for word in [
            own.to_str().unwrap(),
            "/etc/egmem/egmem.toml",
            "--config FILE",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
    std::fs::create_dir(folder.path().join("egmem")).unwrap();
    std::fs::write(&own, "listen = [\"unix:/run/egmem/egmem.sock\"]\n").unwrap();
    let output = check();
    assert_eq!(status(&output), 0, "{}", stderr(&output));
    std::fs::write(&own, "nonsense = 1\n").unwrap();
    let output = check();
    assert_eq!(status(&output), 2);
    assert!(stderr(&output).contains(own.to_str().unwrap()));
    // The working directory is none of the places.
    let mut command = egmem(&["serve", "--check"]);
    let command = command.env("XDG_CONFIG_HOME", ".");
    let output = command.current_dir(folder.path()).output().unwrap();
    assert!(!stderr(&output).contains("./egmem"), "{}", stderr(&output));
}

#[test]
fn ps_shows_the_machine_and_the_owners_of_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let ps = |args: &[&str]| {
        let output = egmem(&[&["ps", "--sim", "gh200"], args].concat())
            .env("XDG_RUNTIME_DIR", folder.path())
            .output()
            .unwrap();
        assert_eq!(status(&output), 0, "{}", stderr(&output));
        output
    };
    let report = json(&ps(&["--json"]));
    assert_eq!(report["gpus"].as_array().unwrap().len(), 1);
    assert_eq!(report["gpus"][0]["unaccounted"], 0);
    assert!(report["processes"].is_array() && report["kept"].is_array());
    let text = stdout(&ps(&[]));
    for word in ["NOT ACCOUNTED FOR", "node 0", "GPU 0"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let file = folder.path().join("ps.svg");
    ps(&["--svg", file.to_str().unwrap()]);
    // Not the same picture: processes of other tests take and free memory meanwhile.
    for svg in [
        stdout(&ps(&["--svg", "-"])),
        std::fs::read_to_string(file).unwrap(),
    ] {
        let whole = svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>");
        assert!(whole && svg.contains("GPU 0"), "{svg}");
    }
}

#[test]
fn ps_is_shown_again_until_a_signal_ends_it() {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;

    let folder = tempfile::tempdir().unwrap();
    // Longer than any test may take.
    let mut child = egmem(&["ps", "--sim", "gh200", "--watch", "3600"])
        .env("XDG_RUNTIME_DIR", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut lines = lines.map(Result::unwrap);
    // The end of the first report.
    assert!(lines.any(|line| line.starts_with("EGMEM: ")));
    let pid = rustix::process::Pid::from_child(&child);
    // Not SIGINT, which a shell's job in the background ignores.
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(15), "{status}");
    for wrong in [
        &["--json", "--watch"][..],
        &["--svg", "-", "--wide"],
        &["--watch", "0"],
    ] {
        let output = egmem(&[&["ps", "--sim", "gh200"], wrong].concat());
        assert_eq!(self::status(&{ output }.output().unwrap()), 2, "{wrong:?}");
    }
}

#[test]
fn a_trace_has_each_driver_call_and_allocation() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let path = file.to_str().unwrap();
    let args = ["--trace", path, "ps", "--sim", "gh200x4"];
    let output = egmem(&args)
        .env("XDG_RUNTIME_DIR", folder.path())
        .output()
        .unwrap();
    assert_eq!(status(&output), 0, "{}", stderr(&output));
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let trace = trace.as_array().unwrap();
    let of = |name: &str, phase: &str| {
        let is = |event: &&Value| event["name"] == name && event["ph"] == phase;
        trace.iter().filter(is).count()
    };
    assert_eq!(
        (of("cuMemGetInfo", "B"), of("cuMemGetInfo", "E")),
        (4, 4),
        "{trace:?}"
    );
    let none = egmem(&["--trace", "/no/such/file", "ps", "--sim", "gh200"])
        .output()
        .unwrap();
    assert_eq!(status(&none), 1);
    assert!(stderr(&none).contains("/no/such/file"), "{}", stderr(&none));
}
