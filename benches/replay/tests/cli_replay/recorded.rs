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
