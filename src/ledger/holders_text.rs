//! The processes that may hold memory, and the memory in use by cause, as tables.

use std::collections::BTreeSet;

use crate::driver::Location;
use crate::holders::{Holder, Holders};
use crate::parts::{Cause, possible_causes};
use crate::report::Report;
use crate::size::Bytes;
use crate::table::{Table, end_cut};
use crate::text::{escaped, place, some_bytes};
use crate::texts::count;

/// The most processes of a table that is not wide.
const ROWS: usize = 20;

/// The unexplained memory from which on possible causes are named: a kernel without GPUs has some, too.
const WORTH_A_WORD: u64 = 64 << 20;

/// Formats the processes and the parts of the memory in use; nothing for a simulated machine.
pub(crate) fn holders(report: &Report, most: Option<usize>) -> String {
    let Some(holders) = &report.holders else {
        return String::new();
    };
    let mut text = processes(holders, most);
    text += &parts(report, most);
    let unknown = report
        .parts
        .iter()
        .filter(|part| part.cause == Cause::NotKnown);
    if unknown.map(|part| part.bytes).max() >= Some(WORTH_A_WORD) {
        text += "\nWhat is not known can be:\n";
        for cause in possible_causes(holders) {
            text += &wrapped(&escaped(&cause), most);
        }
    }
    text
}

/// Formats the processes that may hold memory, and commands that show more of each reason.
fn processes(holders: &Holders, most: Option<usize>) -> String {
    let mut table = Table::new(&[
        ">PID",
        "~PROCESS",
        "~USER",
        "~ON GPUS",
        ">DRIVER'S",
        ">MANAGED",
        ">SHARED",
        "~WHY",
    ]);
    let shown = if most.is_some() { ROWS } else { usize::MAX };
    let rows = holders.processes.iter().take(shown);
    let reasons: BTreeSet<_> = rows.clone().flat_map(|holder| &holder.why).collect();
    for holder in rows {
        table.row(cells(holder, most.is_some()));
    }
    let mut text = String::new();
    if !holders.processes.is_empty() {
        text += "\nProcesses with GPUs, the driver's memory, or shared memory:\n";
        text += &table.lines(most);
    }
    let more = holders.processes.len().saturating_sub(shown) as u64 + holders.omitted;
    if more > 0 {
        text += &format!("and {more} more\n");
    }
    if holders.not_looked_at > 0 {
        text += &format!(
            "not looked at: {}\n",
            count(holders.not_looked_at, "process")
        );
    }
    let mut lines = String::new();
    for why in reasons {
        if let Some(command) = why.command() {
            lines += &wrapped(&format!("{}: {command}", why.words()), most);
        }
    }
    if !lines.is_empty() {
        text += &format!("\nReasons, and what shows more:\n{lines}");
    }
    text
}

fn cells(holder: &Holder, is_narrow: bool) -> [String; 8] {
    let title = escaped(holder.title());
    let gpus = holder.gpus.iter().map(|on| {
        let bytes = on
            .bytes
            .map_or("unknown".into(), |bytes| Bytes(bytes).to_string());
        format!("{}: {bytes}", on.index)
    });
    let gpus: Vec<String> = gpus.collect();
    let mut why: Vec<String> = holder
        .why
        .iter()
        .map(|why| why.words().to_owned())
        .collect();
    if let Some(pid) = holder.inner_pid {
        why.push(format!("pid {pid} there"));
    }
    why.extend(holder.container.as_deref().map(escaped));
    let user = holder.user.as_deref().map(escaped);
    let user = user.or_else(|| holder.uid.map(|uid| uid.to_string()));
    [
        holder.pid.to_string(),
        if is_narrow {
            end_cut(&title, 20)
        } else {
            title
        },
        user.unwrap_or_default(),
        gpus.join(", "),
        some_bytes(holder.driver_mapped.unwrap_or(0)),
        some_bytes(holder.managed_mapped.unwrap_or(0)),
        some_bytes(holder.shared_mapped.saturating_add(holder.shared_unmapped)),
        why.join(", "),
    ]
}

/// Formats the memory in use by cause.
fn parts(report: &Report, most: Option<usize>) -> String {
    if report.parts.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&["WHERE", ">IN USE", "CAUSE", "~SHOWN BY"]);
    for part in &report.parts {
        let is_gpu = matches!(part.location, Location::Device(_));
        table.row([
            place(part.location),
            Bytes(part.bytes).to_string(),
            part.cause.words().to_owned(),
            part.cause.command(is_gpu).unwrap_or_default().to_owned(),
        ]);
    }
    format!("\n{}", table.lines(most))
}

/// Breaks a text into lines of at most `most` characters, the first with a mark of a list.
fn wrapped(text: &str, most: Option<usize>) -> String {
    let most = most.unwrap_or(usize::MAX);
    let (mut lines, mut line) = (String::new(), String::from("-"));
    for word in text.split(' ') {
        if line.chars().count() + 1 + word.chars().count() > most {
            lines += &line;
            lines.push('\n');
            line = " ".into();
        }
        line.push(' ');
        line += word;
    }
    lines + &line + "\n"
}
