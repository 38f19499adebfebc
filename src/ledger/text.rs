//! Ledgers as tables.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::driver::{AccessDesc, Location};
use crate::entries::{Allocation, TierUse};
use crate::size::Bytes;
use crate::texts::{count, escape, ranges};
use crate::writers::{Table, end_cut};
use crate::{Ledger, Total};
use egmem_core::GrowthState;

/// The most characters of a line of tables that are not wide.
pub(crate) const COLUMNS: usize = 100;

impl Ledger {
    /// Returns a table of the allocations, those that take most memory first, one of the KV-cache tiers, if there are any, and
    /// one of the sums: lines of at most 100 characters, in which long names are cut.
    pub fn to_text(&self) -> String {
        ledger(self, Some(COLUMNS))
    }

    /// Returns the tables with all that is known, in lines of any length.
    pub fn to_wide_text(&self) -> String {
        ledger(self, None)
    }
}

/// Text of programs and other processes, in one line.
pub(crate) fn escaped(text: &str) -> String {
    escape(text).into_owned()
}

/// Formats a place in few characters: `node 0`, `GPU 1`.
pub(crate) fn place(location: Location) -> String {
    match location {
        Location::HostNuma(node) => format!("node {node}"),
        Location::Host => "host".into(),
        other => other.to_string(),
    }
}

/// Formats the processors that have access: `CPU, GPUs 0–3`.
fn access(granted: &[AccessDesc]) -> String {
    let mut words = Vec::new();
    if granted.iter().any(|desc| desc.location.is_host()) {
        words.push("CPU".to_owned());
    }
    let gpus = granted.iter().filter_map(|desc| match desc.location {
        Location::Device(gpu) => Some(gpu),
        _ => None,
    });
    let mut gpus: Vec<i32> = gpus.collect();
    gpus.sort_unstable();
    match gpus.as_slice() {
        [] => {}
        [one] => words.push(format!("GPU {one}")),
        all => words.push(format!("GPUs {}", ranges(all))),
    }
    words.join(", ")
}

/// Formats an age: `850 ms`, `12 s`, `5 min`, `3 h`, `2 d`.
fn age(ms: u64) -> String {
    match ms / 1000 {
        0 => format!("{ms} ms"),
        s @ 1..120 => format!("{s} s"),
        s @ 120..7200 => format!("{} min", s / 60),
        s @ 7200..172_800 => format!("{} h", s / 3600),
        s => format!("{} d", s / 86_400),
    }
}

/// Formats the other processes that have an allocation: `to process 7 of user 0`, `from …`.
fn others(entry: &Allocation) -> String {
    let mut words = Vec::new();
    if let Some(imported) = &entry.imported {
        let from = imported.from.as_ref();
        let from = from.map_or("unknown", |party| party.name.as_str());
        words.push(format!("from {from}"));
    }
    match entry.exported_to.as_slice() {
        [] if entry.exports > 0 => words.push(format!("exported {}×", entry.exports)),
        [] => {}
        [party] => words.push(format!("to {}", party.name)),
        [.., last] => {
            let more = entry.exported_to.len() - 1;
            words.push(format!("to {} and {more} more", last.name));
        }
    }
    escaped(&words.join(", "))
}

/// Returns groups of allocations that differ in size, age and address alone, one for each line of a table, the largest first,
/// with the cells that they share.
fn alike(entries: &[Allocation]) -> Vec<([String; 6], Vec<&Allocation>)> {
    let mut groups: HashMap<_, Vec<&Allocation>> = HashMap::new();
    for entry in entries {
        let key = (cells(entry), entry.mapped.is_empty());
        groups.entry(key).or_default().push(entry);
    }
    let groups = groups.into_iter().map(|((cells, _), all)| (cells, all));
    let mut groups: Vec<_> = groups.collect();
    let number = |all: &[&Allocation]| all.first().map(|first| first.number);
    groups.sort_by_cached_key(|(_, all)| (Reverse(sum(all)), number(all)));
    groups
}

fn sum(entries: &[&Allocation]) -> u64 {
    let bytes = entries.iter().map(|entry| entry.bytes);
    bytes.fold(0, u64::saturating_add)
}

/// Returns the cells from the place to the line, but for the age and the address.
fn cells(entry: &Allocation) -> [String; 6] {
    let granted = entry.mapped.first();
    let lost = if entry.lost { " LOST" } else { "" };
    let label = entry.label.as_deref().unwrap_or("");
    let site = entry.site.as_ref().map(ToString::to_string);
    [
        place(entry.location),
        format!("{}{lost}", entry.path),
        escaped(label),
        granted.map_or_else(String::new, |at| access(&at.access)),
        others(entry),
        escaped(&site.unwrap_or_default()),
    ]
}

/// Returns all cells of a group; number and address only if the table is `wide`, the count if it has `counts`.
fn row(shared: [String; 6], all: &[&Allocation], wide: bool, counts: bool) -> Vec<String> {
    let number = all.first().map(|first| first.number.to_string());
    let at = all.first().and_then(|first| first.mapped.first());
    let address = at.map_or("not mapped".into(), |at| format!("{:#x}", at.start));
    let oldest = all.iter().map(|entry| entry.age_ms).max();
    let [location, path, label, access, others, site] = shared;
    vec![
        only_if(wide, number.unwrap_or_default()),
        only_if(counts, all.len().to_string()),
        Bytes(sum(all)).to_string(),
        location,
        path,
        age(oldest.unwrap_or(0)),
        label,
        only_if(wide, address),
        access,
        others,
        site,
    ]
}

/// Returns a text, or none, so that a column without any is left out.
fn only_if(is_shown: bool, text: String) -> String {
    if is_shown { text } else { String::new() }
}

/// Formats a sum; none is no text, so that a column without any is left out.
pub(crate) fn some_bytes(bytes: u64) -> String {
    only_if(bytes > 0, Bytes(bytes).to_string())
}

/// Formats sums by location.
fn totals(totals: &[Total], most: Option<usize>) -> String {
    let mut table = Table::with("WHERE, DRIVER, >COUNT, >ALLOCATED, >MANAGED, >IMPORTED, ~BY KIND");
    for total in totals {
        let paths = total.by_path.iter();
        let paths: Vec<String> = paths
            .map(|(path, bytes)| format!("{path} {}", Bytes(*bytes)))
            .collect();
        table.row([
            place(total.location),
            end_cut(&escaped(&total.driver), 16),
            total.allocations.to_string(),
            some_bytes(total.own),
            some_bytes(total.managed),
            some_bytes(total.imported),
            paths.join(", "),
        ]);
    }
    table.lines(most)
}

/// Returns the cells of a tier. What is not there is no text, so that a column without any is left out; address and counts
/// only if the table is `wide`.
fn tier_cells(tier: &TierUse, wide: bool) -> [String; 15] {
    let some = |number: u64| only_if(number > 0, number.to_string());
    let stats = &tier.stats;
    let asked = u128::from(stats.hits) + u128::from(stats.misses);
    let rate = (u128::from(stats.hits) * 100).checked_div(asked);
    let growth = match stats.growth {
        GrowthState::Growing => "growing",
        GrowthState::Stopped => "stopped",
        _ => "",
    };
    [
        escaped(tier.label.as_deref().unwrap_or("")),
        place(tier.location),
        only_if(wide, format!("{:#x}", tier.address)),
        Bytes(stats.page_bytes).to_string(),
        stats.pages.to_string(),
        only_if(stats.usable != stats.pages, stats.usable.to_string()),
        growth.to_owned(),
        stats.free.to_string(),
        some(stats.writing),
        stats.ready.to_string(),
        some(stats.pinned),
        rate.map_or_else(String::new, |rate| format!("{rate} %")),
        only_if(wide, stats.hits.to_string()),
        only_if(wide, stats.misses.to_string()),
        some(stats.evictions),
    ]
}

/// Formats the tiers that a process has open; nothing for none.
fn tiers(tiers: &[TierUse], most: Option<usize>) -> String {
    if tiers.is_empty() {
        return String::new();
    }
    let mut table = Table::with(
        "~LABEL, WHERE, ADDRESS, >PAGE, >PAGES, >USABLE, GROWTH, >FREE, >WRITING, >READY, >PINNED, >HIT RATE, \
         >HITS, >MISSES, >EVICTED",
    );
    for tier in tiers {
        table.row(tier_cells(tier, most.is_none()));
    }
    format!("\nKV-cache tiers:\n{}", table.lines(most))
}

/// Formats a process's allocations, its tiers and the sums.
pub(crate) fn ledger(ledger: &Ledger, most: Option<usize>) -> String {
    let process = &ledger.process;
    let number = (ledger.allocations.len() as u64).saturating_add(ledger.omitted);
    let [before, after] = [
        format!("process {} (", process.pid),
        format!("): {}", count(number, "allocation")),
    ];
    let room = most.unwrap_or(usize::MAX);
    let room = room.saturating_sub(before.len() + after.len());
    let title = end_cut(&escaped(process.title()), room);
    let mut text = format!("{before}{title}{after}\n");
    if number == 0 {
        // Memory of a type of the program's own is no entry.
        return text + &tiers(&ledger.tiers, most);
    }
    let mut table = Table::with(
        ">NUMBER, >COUNT, >SIZE, WHERE, KIND, >AGE, ~LABEL, ADDRESS, ~ACCESS, ~SHARED, /ALLOCATED AT",
    );
    let groups = alike(&ledger.allocations);
    let any_of_several = groups.iter().any(|(_, all)| all.len() > 1);
    for (cells, all) in groups {
        table.row(row(cells, &all, most.is_none(), any_of_several));
    }
    text += &table.lines(most);
    if ledger.omitted > 0 {
        text += &format!("and {} smaller\n", ledger.omitted);
    }
    text += &tiers(&ledger.tiers, most);
    text.push('\n');
    text += &totals(&ledger.totals, most);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Access;

    #[test]
    fn ages_have_one_unit() {
        for (ms, text) in [
            (0, "0 ms"),
            (999, "999 ms"),
            (1000, "1 s"),
            (119_999, "119 s"),
            (120_000, "2 min"),
            (7_200_000, "2 h"),
            (172_800_000, "2 d"),
        ] {
            assert_eq!(age(ms), text);
        }
    }
    #[test]
    fn access_names_processors_once() {
        let text = |host: bool, gpus: &[i32]| {
            let gpus = gpus.iter().map(|&gpu| Location::Device(gpu));
            let all = host.then_some(Location::Host).into_iter().chain(gpus);
            let all: Vec<_> = all.map(|at| AccessDesc::new(at, Access::Read)).collect();
            access(&all)
        };
        assert_eq!(text(true, &[0, 1, 2, 3]), "CPU, GPUs 0–3");
        assert_eq!(text(false, &[3, 1, 0, 7, 5, 6]), "GPUs 0, 1, 3, 5–7");
        assert_eq!(text(true, &[2]), "CPU, GPU 2");
        assert_eq!(text(true, &[i32::MAX, 0]), "CPU, GPUs 0, 2147483647");
        assert_eq!(text(true, &[]), "CPU");
        assert_eq!(text(false, &[]), "");
    }
}
