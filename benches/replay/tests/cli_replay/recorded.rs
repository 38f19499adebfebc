//! Logs of benches/data/recorded, and how they are made.

use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use super::{data, json, piped, run, text};

#[test]
fn a_log_may_be_packed_by_gzip() {
    let log = "1,2,allocate,0x100,100,0\n1,3,free,0x100,100,0\n";
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(log.as_bytes()).unwrap();
    let packed = packed.finish().unwrap();
    let report = json(&piped(&packed, &["--json"]));
    assert_eq!(report["operations"], 2);
    let torn = piped(&packed[..packed.len() - 1], &[]);
    assert_eq!(torn.status.code(), Some(2));
    assert!(text(&torn.stderr).contains("-: it cannot be read: "));
}

#[test]
fn a_recorded_snapshot_becomes_a_packed_log() {
    let program = r#"
import record, sys
log = record.Log()
log.about = {"gpu": "none, by hand", "seed": 7}
def entry(action, addr, size, us, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": us}
log.add_snapshot({"device_traces": [[], [
    entry("segment_alloc", 4096, 2 << 20, 1000000), entry("alloc", 4096, 700, 1000001),
    entry("alloc", 8192, 300, 1000002, 7), entry("free_requested", 4096, 700, 1000003),
    entry("alloc", 16384, 100, 1000004), entry("free_completed", 4096, 700, 1000009),
    {"action": "oom", "size": 5, "device_free": 1, "stream": 0, "time_us": 1000010}]]}, 1)
log.write(sys.argv[1])
"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.csv.gz");
    let mut record = Command::new("python3");
    record.args(["-B", "-c", program]).arg(&path);
    record.env("PYTHONPATH", data("recorded"));
    let output = record.output().expect("python3 in the PATH");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut log = String::new();
    let mut packed = GzDecoder::new(File::open(&path).unwrap());
    packed.read_to_string(&mut log).unwrap();
    assert_eq!(
        log,
        "Thread,Time,Action,Pointer,Size,Stream,recorded: gpu=none by hand; seed=7\n\
         1,0.000001,allocate,0x1000,700,0x0\n\
         1,0.000002,allocate,0x2000,300,0x7\n\
         1,0.000004,allocate,0x4000,100,0x0\n\
         1,0.000009,free,0x1000,700,0x0\n"
    );
    let args = ["--allocators", "best-fit", "--repeat", "1", "--json"];
    let report = json(&run(&[&[path.to_str().unwrap()], &args[..]].concat()));
    // As requested: a block's memory is its own until its free is complete.
    assert_eq!(
        (&report["operations"], &report["peak"]),
        (&4.into(), &1100.into())
    );
}

#[test]
fn every_recording_is_replayed() {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(data("recorded")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gz") {
            continue;
        }
        let name = path.file_name().unwrap().to_string_lossy();
        let name = name.strip_suffix(".csv.gz").unwrap();
        let bytes = std::fs::metadata(&path).unwrap().len();
        assert!(bytes <= 300 << 10, "{name}: {bytes} bytes");
        let mut log = String::new();
        let mut packed = GzDecoder::new(File::open(&path).unwrap());
        packed.read_to_string(&mut log).unwrap();
        let header = log.lines().next().unwrap();
        for words in [
            &format!("recorded: program={name}; ")[..],
            "; gpu=",
            "; seed=",
            "; date=",
        ] {
            assert!(header.contains(words), "{name}: {header}");
        }
        let few = ["--allocators", "best-fit,heap", "--repeat", "1", "--json"];
        let args = [&[path.to_str().unwrap(), "--sim", "gh200"], &few[..]];
        let report = json(&run(&args.concat()));
        let count = |name: &str| report["log"][name].as_u64().unwrap();
        assert!(count("lines") > 10_000, "{name}: {}", count("lines"));
        assert_eq!(count("lines"), count("allocations") + count("frees") + 1);
        assert_eq!(
            count("implied_frees") + count("other_sizes") + count("times_back"),
            0,
            "{name}"
        );
        // The library's own count of the most bytes in use, where it keeps one: the log has each block.
        if let Some(most) = header.split("; requested at most=").nth(1) {
            let most = most.split(';').next().unwrap();
            assert_eq!(report["peak"].to_string(), most, "{name}");
        }
        for result in report["results"].as_array().unwrap() {
            assert_eq!(result["peak_live"], report["peak"], "{name}: {result}");
            assert_eq!(
                (&result["failed"], &result["overlaps"]),
                (&0.into(), &0.into()),
                "{name}"
            );
            let span = result["span_by_peak"].as_f64().unwrap();
            assert!((1.0..1.5).contains(&span), "{name}: {span}");
        }
        names.push(name.to_owned());
    }
    names.sort();
    assert_eq!(names, ["dataframe", "generation", "offload", "training"]);
}
