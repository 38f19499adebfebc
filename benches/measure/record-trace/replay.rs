//! Replaying a recording.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use egmem_trace::{Crash, Line, Report, Runner, compare};
use flate2::read::GzDecoder;

use super::{Args, Result, open};

/// Prints where the driver answers differently. Returns whether it answers everything the same.
pub fn replay(args: &Args, path: &Path) -> Result<bool> {
    let mut runner = Runner::new(&open(args)?);
    let mut report = Report::default();
    for line in lines(path)? {
        match serde_json::from_str(&line?)? {
            Line::Header(header) => {
                println!(
                    "recorded {} on {} × {}, driver {}, CUDA {}",
                    header.date, header.gpus, header.gpu, header.driver, header.cuda
                );
                if header.format != 1 {
                    return Err(format!("format {} is unknown", header.format).into());
                }
            }
            Line::Sequence(_) if args.crashes => {}
            Line::Crash(crash) if args.crashes => run_crash(&mut runner, &crash),
            Line::Sequence(recorded) => {
                let (sequence, expected) = recorded.split();
                let found = runner.run(&sequence, |_| {});
                for left in &found.left {
                    println!("sequence {}: not given back: {left}", sequence.seed);
                }
                report.add(sequence.ops.len(), compare(&sequence, &expected, &found));
            }
            Line::Crash(crash) => println!(
                "sequence {} killed the process at operation {}: {}; left out",
                crash.sequence.seed, crash.op, crash.how
            ),
        }
    }
    println!("{report}");
    Ok(report.is_clean())
}

fn run_crash(runner: &mut Runner, crash: &Crash) {
    println!("sequence {}: {}", crash.sequence.seed, crash.how);
    let ops = &crash.sequence.ops;
    let found = runner.run(&crash.sequence, |op| println!("{op:>4} {:?}", ops[op]));
    for (op, outcome) in found.outcomes.iter().enumerate() {
        println!("{op:>4} {outcome}");
    }
}

/// The lines of a file, unpacked where its name ends in `.gz`.
fn lines(path: &Path) -> Result<impl Iterator<Item = std::io::Result<String>>> {
    let file = File::open(path)?;
    let plain: Box<dyn Read> = match path.extension().is_some_and(|end| end == "gz") {
        true => Box::new(GzDecoder::new(file)),
        false => Box::new(file),
    };
    Ok(BufReader::new(plain).lines())
}
