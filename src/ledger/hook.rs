//! Starts the leak report and the ledger's socket that the environment asks for, once a process has its first allocation;
//! the report of what a process still has at its exit.

use std::fmt::Write as _;
use std::io::Write;
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32};

use crate::entries;
use crate::fork::Generation;
use crate::ledger::Ledger;
use crate::offer::{Offer, offer};
use crate::size::Bytes;
use crate::texts::{count, escape_lines};

/// The environment variable that makes a process offer its ledger: any value except an empty one and `0`.
pub const PS: &str = "EGMEM_PS";

/// The environment variable that makes a process report at its exit the memory that is still allocated.
pub const LEAKS: &str = "EGMEM_LEAKS";

/// The offer that lasts as long as the process: null, or a box that is never freed. A forked child replaces its
/// parent's, whose thread and socket it does not have. Without a lock, which a thread of the parent may have held.
static KEPT: AtomicPtr<Offer> = AtomicPtr::new(ptr::null_mut());

/// Sets the hook before `main`, so that a program need not call anything for the environment variables to work.
#[used]
// SAFETY: the section holds pointers to functions, which the C library calls with its own arguments before `main`;
// under the C calling convention a function may ignore them. This one stores a function pointer: it uses nothing of
// the standard library that needs to be set up before.
#[unsafe(link_section = ".init_array")]
static SET_HOOK: extern "C" fn() = set_hook;

extern "C" fn set_hook() {
    entries::on_first_entry(start);
}

fn is_on(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Called once in each process, after its first entry was made.
fn start() {
    if is_on(LEAKS) {
        report_leaks_at_exit();
    }
    if !is_on(PS) {
        return;
    }
    match offer() {
        Ok(offer) => {
            KEPT.store(Box::into_raw(Box::new(offer)), Release);
            at_exit(remove_socket);
        }
        Err(error) => tracing::warn!(%error, "this process's ledger is not offered"),
    }
}

extern "C" fn remove_socket() {
    // SAFETY: the pointer is null, or of a box that is never freed nor borrowed mutably.
    if let Some(offer) = unsafe { KEPT.load(Acquire).as_ref() } {
        offer.remove_file();
    }
}

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
fn at_exit(function: extern "C" fn()) {
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
