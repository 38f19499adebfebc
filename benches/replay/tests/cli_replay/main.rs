//! The program `replay` as its users see it, on the traces in benches/data.

mod recorded;

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const SHAPES: [&str; 3] = ["kv-cache", "dataframe", "training"];

/// The program, where it was built or where `EGMEM_TEST_REPLAY` says it was carried to, run as
/// `EGMEM_TEST_RUNNER` says where that is set.
fn replay(args: &[&str]) -> Command {
    let program = std::env::var("EGMEM_TEST_REPLAY");
    let program = program.unwrap_or_else(|_| env!("CARGO_BIN_EXE_replay").into());
    let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
    let mut words: Vec<OsString> = runner.split_whitespace().map(OsString::from).collect();
    words.push(program.into());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(args);
    command.env_remove("RUST_LOG").env_remove("EGMEM_UMF_LIB");
    command
}

fn run(args: &[&str]) -> Output {
    replay(args).output().unwrap()
}

/// A file of benches/data, where it lies in the tree or where `EGMEM_BENCH_DATA` says it was carried to.
fn data(name: &str) -> PathBuf {
    let folder = match std::env::var_os("EGMEM_BENCH_DATA") {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../data"),
    };
    folder.join(name)
}

fn trace(shape: &str) -> PathBuf {
    data(&format!("{shape}.csv"))
}

/// The log of a KV cache that serves the requests in a file of benches/data/llm.
fn served(requests: &str, args: &[&str]) -> String {
    let mut convert = Command::new("python3");
    convert.arg(data("llm/convert.py")).arg(data(requests));
    let output = convert.args(args).output().expect("python3 in the PATH");
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// `log` given on standard input, to one allocator.
fn given(log: impl AsRef<[u8]>, allocator: &str, args: &[&str]) -> Output {
    let mut command = replay(&["-", "--allocators", allocator, "--repeat", "1"]);
    command.args(args).stdin(Stdio::piped());
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The program may end before it has read all of it.
    let _ = child.stdin.take().unwrap().write_all(log.as_ref());
    child.wait_with_output().unwrap()
}

fn piped(log: impl AsRef<[u8]>, args: &[&str]) -> Output {
    given(log, "best-fit", args)
}

#[test]
fn the_traces_are_what_the_program_makes() {
    for shape in SHAPES {
        let made = run(&["--generate", shape]);
        assert!(made.status.success());
        let there = std::fs::read(trace(shape)).unwrap();
        assert!(there.len() <= 300 << 10, "{shape}: {} bytes", there.len());
        // Not compared by assert_eq!, which would print both.
        assert!(made.stdout == there, "{shape}.csv is another one");
    }
}

#[test]
fn every_trace_is_replayed() {
    for shape in SHAPES {
        let path = trace(shape);
        let path = path.to_str().unwrap();
        for threads in [&[][..], &["--threads"]] {
            let few = [
                "--allocators",
                "best-fit,glibc,heap",
                "--repeat",
                "2",
                "--json",
            ];
            let args = [&[path, "--sim", "gh200"], &few[..], threads];
            let report = json(&run(&args.concat()));
            let count = |name: &str| report["log"][name].as_u64().unwrap();
            assert_eq!(
                count("lines"),
                count("allocations") + count("frees") + count("headers")
            );
            assert_eq!(
                count("unknown_frees") + count("bad") + count("never_freed"),
                0
            );
            let results = report["results"].as_array().unwrap();
            assert_eq!(results.len(), 3);
            assert_eq!(report["simulated"], true);
            for result in results {
                assert_eq!(result["peak_live"], report["peak"], "{result}");
                assert_eq!(
                    (&result["failed"], &result["overlaps"]),
                    (&0.into(), &0.into())
                );
                assert!(result["ns"].as_f64().unwrap() > 0.0);
                assert!(result["ns_least"].as_f64() <= result["ns"].as_f64());
                assert!(result["ns"].as_f64() <= result["ns_most"].as_f64());
            }
            let (fit, glibc, heap) = (&results[0], &results[1], &results[2]);
            for bounded in [fit, heap] {
                let ratio = bounded["span_by_peak"].as_f64().unwrap();
                assert!((1.0..1.5).contains(&ratio), "{shape}: {ratio}");
            }
            let worst = heap["worst_fragmentation"].as_f64().unwrap();
            assert!((0.0..1.0).contains(&worst), "{shape}: {worst}");
            assert_eq!(fit["worst_fragmentation"], Value::Null);
            // Its blocks lie wherever the kernel puts them.
            assert_eq!(glibc["span_by_peak"], Value::Null);
        }
    }
}

#[test]
fn requests_to_language_models_become_logs_that_are_replayed() {
    for (name, requests) in [
        ("llm/mooncake-conversation.jsonl", 250),
        ("llm/azure-conv.csv", 600),
        ("llm/azure-code.csv", 600),
    ] {
        let log = served(name, &["--cache", "1.5GiB"]);
        let args = ["--json", "--sim", "gh200"];
        let report = json(&given(log, "heap", &args));
        let count = |name: &str| report["log"][name].as_u64().unwrap();
        assert_eq!(count("allocations"), 12 * requests, "{name}");
        assert!(count("frees") > 0, "{name}: nothing was evicted");
        assert_eq!(count("frees") + count("never_freed"), count("allocations"));
        assert_eq!(count("unknown_frees") + count("implied_frees"), 0);
        let peak = report["peak"].as_u64().unwrap();
        assert!(
            (3 << 29) * 9 / 10 < peak && peak <= 3 << 29,
            "{name}: {peak}"
        );
        let heap = &report["results"][0];
        assert_eq!(heap["failed"], 0);
        let span = heap["span_by_peak"].as_f64().unwrap();
        assert!(span < 1.4, "{name}: {span}");
    }
}

#[test]
fn the_cache_evicts_the_oldest_requests_until_the_next_one_fits() {
    let two = ["--requests", "3", "--blocks", "1x10,2x1"];
    // 374 + 44, 396 + 109 and 879 + 55 tokens: 12 bytes each.
    let (first, second, third) = (418 * 12, 505 * 12, 934 * 12);
    let frees = |cache: u64| {
        let cache = cache.to_string();
        let log = served(
            "llm/azure-conv.csv",
            &[&two[..], &["--cache", &cache]].concat(),
        );
        let actions = log.lines().skip(1).map(|line| line.contains(",free,"));
        actions.collect::<Vec<bool>>()
    };
    let order = |evicted: [usize; 3]| {
        let steps = evicted.iter().flat_map(|&frees| {
            let frees = std::iter::repeat_n(true, 3 * frees);
            frees.chain(std::iter::repeat_n(false, 3))
        });
        steps.collect::<Vec<bool>>()
    };
    assert_eq!(frees(first + second + third), order([0, 0, 0]));
    assert_eq!(frees(first + second + third - 1), order([0, 0, 1]));
    assert_eq!(frees(second + third - 1), order([0, 0, 2]));
    // The third is larger than the whole cache.
    assert_eq!(frees(third - 1), order([0, 0, 0])[..6]);
    assert_eq!(frees(first + second - 1), order([0, 1, 0])[..9]);
}

#[test]
fn too_little_room_is_counted_and_not_hidden() {
    let path = trace("dataframe");
    let path = path.to_str().unwrap();
    let whole = json(&run(&[
        path,
        "--allocators",
        "best-fit",
        "--repeat",
        "1",
        "--json",
    ]));
    let capacity = format!("{}KiB", whole["peak"].as_u64().unwrap() >> 11);
    let args = [
        path,
        "--allocators",
        "best-fit",
        "--repeat",
        "1",
        "--capacity",
        &capacity,
    ];
    let half = json(&run(&[&args[..], &["--json"]].concat()));
    let result = &half["results"][0];
    assert!(result["failed"].as_u64().unwrap() > 0);
    let given = half["capacity"].as_u64().unwrap();
    let wanted = whole["peak"].as_u64().unwrap() >> 11 << 10;
    assert_eq!(given, wanted.next_multiple_of(2 << 20));
    assert!(result["peak_span"].as_u64().unwrap() <= given);
    let table = text(&run(&args).stdout);
    let line = table
        .lines()
        .find(|line| line.starts_with("best-fit"))
        .unwrap();
    assert!(line.contains(&format!(" {} ", result["failed"])), "{table}");
}

#[test]
fn what_is_left_out_of_a_log_is_told() {
    let log = "Thread,Time,Action,Pointer,Size,Stream\r\n\r\n\
               1,10:00:00.000001,free,0x100,64,0\r\n\
               1,10:00:00.000002,allocate,0x200,64,0\r\n\
               1,10:00:00.000003,allocate failure,(nil),9999999,0\r\n\
               1,10:00:00.000004,allocate,0x200,128,0\r\n\
               1,10:00:00.0000";
    let output = piped(log, &[]);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains("-: line 7: 2 columns"), "{error}");
    let output = piped(log, &["--skip-bad"]);
    assert!(output.status.success());
    let told = text(&output.stdout);
    for line in [
        "-: 7 lines, 2 allocations and 1 free by 1 thread; at most 128 B live in 1 block",
        "  1 header",
        "  1 empty line left out",
        "  1 allocation that had failed left out",
        "  1 free left out: unknown to the log, or freed twice",
        "  1 line left out that cannot be read",
        "  1 free put in, where an address came again without one",
        "  1 block never freed",
    ] {
        assert!(told.lines().any(|other| other == line), "{line}\n{told}");
    }
}

#[test]
fn a_snapshot_of_pytorch_is_a_trace_too() {
    let log = r#"{"device_traces": [[
        {"action": "alloc", "addr": 512, "size": 512, "stream": 0, "time_us": 1},
        {"action": "free_completed", "addr": 512, "size": 512, "stream": 0, "time_us": 2}]]}"#;
    let report = json(&piped(log, &["--json"]));
    assert_eq!(
        (&report["operations"], &report["peak"]),
        (&2.into(), &512.into())
    );
    let pickle = piped([0x80, 4, b'}'], &[]);
    assert_eq!(pickle.status.code(), Some(2));
    assert!(text(&pickle.stderr).contains("json.dump"));
}

#[test]
fn a_plot_shows_every_allocator() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plot.svg");
    let trace = trace("kv-cache");
    let (trace, plot) = (trace.to_str().unwrap(), path.to_str().unwrap());
    let args = [
        trace,
        "--allocators",
        "best-fit,glibc",
        "--repeat",
        "1",
        "--plot",
        plot,
    ];
    assert!(run(&args).status.success());
    let svg = std::fs::read_to_string(&path).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("; medians of 1 replay") && !svg.contains("1 replays"));
    assert!(svg.contains(">best-fit</text>") && svg.contains(">glibc</text>"));
    assert!(
        !svg.contains("NaN") && svg.len() < 100 << 10,
        "{} bytes",
        svg.len()
    );
}

#[test]
fn the_heap_is_drawn_at_its_peak() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("heap.svg");
    let trace = trace("training");
    let (trace, drawn) = (trace.to_str().unwrap(), path.to_str().unwrap());
    let args = [
        trace,
        "--sim",
        "gh200",
        "--allocators",
        "heap",
        "--repeat",
        "1",
        "--occupancy",
        drawn,
    ];
    let output = run(&args);
    let told = text(&output.stdout);
    assert!(told.contains("SIMULATED: the heap's memory"), "{told}");
    let svg = std::fs::read_to_string(&path).unwrap();
    assert!(svg.contains("training.csv, SIMULATED</title>"), "{svg}");
    // The trace's peak is in use, and little besides it.
    let report = json(&run(&[&args[..7], &["--json"]].concat()));
    let peak = report["peak"].as_u64().unwrap();
    let words = svg.split("in use by the program: ").nth(1).unwrap();
    let bytes = words.split('(').nth(1).unwrap();
    let used: u64 = bytes.split(' ').next().unwrap().parse().unwrap();
    assert!(used >= peak && used < peak + peak / 20, "{used} of {peak}");
}

#[test]
fn the_heap_says_why_it_has_no_room() {
    let path = trace("training");
    let path = path.to_str().unwrap();
    let few = [
        "--allocators",
        "heap",
        "--repeat",
        "1",
        "--capacity",
        "1000000000",
    ];
    let output = run(&[&[path, "--sim", "gh200"], &few[..]].concat());
    assert!(output.status.success());
    let told = text(&output.stdout);
    assert!(told.contains("heap failed first with: "), "{told}");
}

#[test]
fn a_capacity_that_no_address_space_has_is_refused() {
    let trace = trace("kv-cache");
    let most = u64::MAX.to_string();
    let which = ["--allocators", "heap", "--sim", "gh200", "--capacity"];
    let output = run(&[&[trace.to_str().unwrap()], &which[..], &[&most]].concat());
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("address space"), "{error}");
}

#[test]
fn a_small_capacity_is_told_as_it_counts() {
    let log = "1,0,allocate,0x100,64,0\n1,1,free,0x100,64,0\n";
    let output = piped(log, &["--capacity", "3"]);
    let told = text(&output.stdout);
    assert!(
        told.contains("Aligned to 256 B, of 2 MiB at most."),
        "{told}"
    );
}

#[test]
fn there_is_room_by_default_for_any_alignment() {
    let log: String = (1..=20)
        .map(|block| format!("1,0,allocate,{block:#x}00,64,0\n"))
        .collect();
    let report = json(&piped(log, &["--align", "16777216", "--json"]));
    assert_eq!(report["results"][0]["failed"], 0, "{report}");
}

#[test]
fn wrong_usage_is_refused() {
    let trace = trace("kv-cache");
    let trace = trace.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    for (args, word) in [
        (&[trace, "--allocators", "best-fit,slab"][..], "slab"),
        (&[trace, "--align", "3"], "alignment"),
        (&[trace, "--repeat", "0"], "repeat"),
        (&[trace, "--capacity", "0"], "capacity"),
        (&[trace, "--capacity", "18446744073709551615"], "capacity"),
        (&[trace, "--capacity", "1 stone"], "unit"),
        (&[trace, "--device", "7"], "kv-cache.csv: device 7: "),
        (&[trace, "--seed", "7"], "--seed"),
        (&[], "--generate"),
        (
            &["no/such/file.csv"],
            "no/such/file.csv: it cannot be read: ",
        ),
        (&[folder], "it cannot be read: "),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let error = text(&output.stderr);
        assert!(error.contains(word), "{args:?}: {error}");
    }
    let empty = piped("Thread,Time,Action,Pointer,Size,Stream\n", &[]);
    assert_eq!(empty.status.code(), Some(2));
}

#[test]
fn the_help_tells_the_exit_status_and_the_log() {
    let output = run(&["--help"]);
    assert!(output.status.success());
    let told = text(&output.stdout);
    assert!(told.contains("RUST_LOG"), "{told}");
    assert_eq!(told.matches("Exit status").count(), 1, "{told}");
}

#[test]
fn a_gpus_own_memory_is_no_host_node() {
    let log = "1,2,allocate,0x100,100,0\n1,3,free,0x100,100,0\n";
    let on = |node| {
        let args = ["--sim", "gh200x4", "--node", node];
        let output = given(log, "heap", &args);
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    let error = on("4");
    for words in ["node 4 is GPU 0's own memory", "0, 1, 2, 3"] {
        assert!(error.contains(words), "{error}");
    }
    let error = on("99");
    assert!(error.contains("there is no host NUMA node 99"), "{error}");
    assert!(!error.contains("own memory"), "{error}");
}

#[test]
fn a_short_line_says_how_many_columns_are_needed_for_what() {
    let log = "Thread,Time,Action,Pointer,Size,Stream\n1,2,allocate\n";
    let output = piped(log, &[]);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    let words = "line 2: 3 columns, at least 5 are needed for Action, Pointer and Size";
    assert!(error.contains(words), "{error}");
    assert!(!error.contains("correct the argument"), "{error}");
}
