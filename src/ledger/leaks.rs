//! Reports the allocations that a process still has at its exit.

use std::fmt::Write as _;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::fork::Generation;
use crate::ledger::Ledger;
use crate::size::Bytes;
use crate::texts::count;
use crate::texts::escape_lines;

/// Which process has registered the report: one more than [`Generation::forks`], 0 for none.
static REGISTERED: AtomicU32 = AtomicU32::new(0);

/// Writes to standard error, when this process ends by `exit` or by returning from `main`, which allocations it has
/// not given back: their entries, with the lines that made them, and their frames where
/// [`capture_backtraces`](egmem_core::ledger::capture_backtraces) was on. Nothing is written if there are none.
///
/// Without a call, the environment variable `EGMEM_LEAKS=1` does the same. The kernel takes all memory of a process
/// back; a report names the memory that a program that runs for longer would accumulate.
pub fn report_leaks_at_exit() {
    let this = Generation::current().forks() + 1;
    if REGISTERED.swap(this, Relaxed) != this {
        at_exit(report);
    }
}

/// Calls `function` when the process ends by `exit`.
pub(crate) fn at_exit(function: extern "C" fn()) {
    // SAFETY: the function lives as long as the program; it does not unwind, and calls neither `exit` nor `longjmp`.
    if unsafe { libc::atexit(function) } != 0 {
        tracing::warn!("the C library has no room for a function at exit");
    }
}

extern "C" fn report() {
    // A forked child inherits the registration, and none of the memory.
    if REGISTERED.load(Relaxed) != Generation::current().forks() + 1 {
        return;
    }
    let text = text(&Ledger::without_tiers());
    // If standard error is closed, the report is lost.
    let _ = std::io::stderr().write_all(escape_lines(&text).as_bytes());
}

/// Returns the report, or an empty text if nothing is left.
fn text(ledger: &Ledger) -> String {
    let entries = &ledger.allocations;
    if entries.is_empty() {
        return String::new();
    }
    let bytes = entries
        .iter()
        .fold(0_u64, |sum, entry| sum.saturating_add(entry.bytes));
    let mut text = format!(
        "egmem: still allocated at exit: {}, {}\n{}",
        count(entries.len() as u64, "allocation"),
        Bytes(bytes),
        ledger.to_text()
    );
    for entry in entries {
        let site = entry.site.as_ref();
        if let Some(frames) = site.and_then(|site| site.backtrace.as_ref()) {
            // To a String it cannot fail.
            let _ = writeln!(
                text,
                "\n{} of {}, allocated at {}:\n{}",
                Bytes(entry.bytes),
                entry.label.as_deref().unwrap_or("no label"),
                site.map(ToString::to_string).unwrap_or_default(),
                frames.to_string().trim_end()
            );
        }
    }
    text
}
