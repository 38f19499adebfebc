//! The process that makes the calls.

use std::io::Write;

use egmem_trace::{Outcome, Recorded, Runner};

use super::{Args, Result, open, sequence};

/// Writes `@op` before each operation and a line per sequence. Ends after a sequence that lost the
/// GPU's context.
pub fn child(args: &Args) -> Result<()> {
    let first = args.seed.ok_or("--seed is missing")?;
    let mut runner = Runner::new(&open(args)?);
    let mut out = std::io::stdout().lock();
    for seed in first..first + args.seqs {
        let sequence = sequence(args, seed)?;
        // The parent may be gone: the error of the sequence's own line ends this process then.
        let record = runner.run(&sequence, |op| {
            let _ = writeln!(out, "@{op}").and_then(|()| out.flush());
        });
        let lost = record.outcomes.iter().any(Outcome::loses_context);
        serde_json::to_writer(&mut out, &Recorded::new(sequence, record))?;
        writeln!(out)?;
        out.flush()?;
        if lost {
            break;
        }
    }
    Ok(())
}
