//! Replays every recorded trace on the simulated machine that resembles the one where it was recorded.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;

use egmem::{Driver, Machine};
use egmem_tests::data;
use egmem_tests::drivers::half_of_the_addresses;
use egmem_trace::{Line, Outcome, Report, Runner, compare};
use flate2::read::GzDecoder;

#[test]
#[cfg_attr(egmem_slow, ignore = "makes 130 000 calls of the simulator")]
fn the_h200x8_preset_answers_as_the_recorded_machines_did() {
    let mut files: Vec<_> = fs::read_dir(data(""))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| is_recording(path))
        .collect();
    files.sort();
    let recorded: usize = files.iter().map(|file| replay(file)).sum();
    assert!(!files.is_empty(), "no recording in {}", data("").display());
    assert!(
        recorded >= 2000,
        "only {recorded} sequences of 50 operations or more are from a real driver"
    );
}

fn is_recording(path: &Path) -> bool {
    let name = path.to_string_lossy();
    name.ends_with(".jsonl") || name.ends_with(".jsonl.gz")
}

/// The lines of a recording, which may be packed by gzip.
fn lines(path: &Path) -> Box<dyn Iterator<Item = String>> {
    let file = File::open(path).unwrap();
    match path.extension().is_some_and(|extension| extension == "gz") {
        true => Box::new(
            BufReader::new(GzDecoder::new(file))
                .lines()
                .map(Result::unwrap),
        ),
        false => Box::new(BufReader::new(file).lines().map(Result::unwrap)),
    }
}

/// How many sequences of 50 operations or more are from a real driver.
fn replay(file: &Path) -> usize {
    let _room = half_of_the_addresses();
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let mut runner = Runner::new(&driver);
    let mut report = Report::default();
    let (mut sequences, mut called, mut operations) = (0, 0, 0);
    let (mut real, mut long) = (false, 0);
    for line in lines(file) {
        match serde_json::from_str(&line).unwrap() {
            Line::Header(header) => {
                assert_eq!(header.format, 1);
                real = header.backend == "cuda";
            }
            Line::Crash(_) => {}
            Line::Sequence(recorded) => {
                let (sequence, expected) = recorded.split();
                let found = runner.run(&sequence, |_| {});
                assert_eq!(found.left, expected.left, "sequence {}", sequence.seed);
                sequences += 1;
                long += usize::from(sequence.ops.len() >= 50);
                operations += sequence.ops.len();
                let skipped = |outcome: &&Outcome| **outcome != Outcome::Skipped;
                called += expected.outcomes.iter().filter(skipped).count();
                report.add(sequence.ops.len(), compare(&sequence, &expected, &found));
            }
        }
    }
    assert!(report.is_clean(), "{}: {report}", file.display());
    println!(
        "{}: {sequences} sequences, {operations} operations, {called} of them called",
        file.display()
    );
    drop(runner);
    let held = driver.sim().unwrap().held();
    assert!(held.is_empty(), "not given back: {held:?}");
    if real { long } else { 0 }
}
