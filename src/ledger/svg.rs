//! Ledgers as a drawing: a bar for each location, with a part for each allocation.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::drawing::Drawing;
use crate::driver::Location;
use crate::entries::{AllocPath, Allocation};
use crate::ledger::{Ledger, drawn_once};
use crate::report::Report;
use crate::size::Bytes;

const MARGIN: f64 = 24.0;
const TOP: f64 = 86.0;
/// Where bars begin, and how long they are.
const LEFT: f64 = MARGIN + 150.0;
const BAR: f64 = 720.0;
const HEIGHT: f64 = 34.0;
const PITCH: f64 = 62.0;
const WIDTH: f64 = LEFT + BAR + 170.0;
/// The most parts of a bar; the smallest share the last.
const PARTS: usize = 400;

impl Ledger {
    /// Returns a drawing: a bar for each location, with a part for each allocation. It is a complete SVG file without
    /// external fonts or style sheets.
    pub fn to_svg(&self) -> String {
        draw(
            self.process.title(),
            std::slice::from_ref(self),
            BTreeMap::new(),
        )
    }
}

impl Report {
    /// Returns a drawing: a bar for each node and GPU, to the scale of its memory, with a part for each allocation. It is a
    /// complete SVG file without external fonts or style sheets.
    pub fn to_svg(&self) -> String {
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|node| (node.node.into(), Some(node.total), Some(node.used)));
        let gpus = self.gpus.iter();
        let gpus = gpus.map(|gpu| (Location::Device(gpu.gpu), gpu.total, gpu.used));
        let bar = |(location, total, used)| {
            let parts = Vec::new();
            ((false, location), Bar { parts, total, used })
        };
        let bars = nodes.chain(gpus).map(bar).collect();
        draw("Whose memory it is", &self.processes, bars)
    }
}

/// The classes of the paths' parts, and their names.
const KINDS: [(&str, &str); 7] = [
    ("c0", "vmm"),
    ("c4", "heap"),
    ("c5", "shapes"),
    ("c2", "pool"),
    ("c1", "imported"),
    ("c6", "pinned, device"),
    ("c3", "not accounted for"),
];

const fn class(path: AllocPath) -> &'static str {
    match path {
        AllocPath::Vmm => "c0",
        AllocPath::HeapChunk => "c4",
        AllocPath::ShapeChunk => "c5",
        AllocPath::Pool => "c2",
        AllocPath::Import | AllocPath::ImportedPool => "c1",
        _ => "c6",
    }
}

/// The allocations at one location, the bytes that it has, and how many of them are in use by all processes. `None`: unknown.
#[derive(Default)]
struct Bar<'a> {
    parts: Vec<(&'a Ledger, &'a Allocation)>,
    total: Option<u64>,
    used: Option<u64>,
}

/// Bars by whether they have managed memory, which takes no certain room at its location, and by the location.
type Bars<'a> = BTreeMap<(bool, Location), Bar<'a>>;

fn sum(parts: &[(&Ledger, &Allocation)]) -> u64 {
    let bytes = parts.iter().map(|(_, entry)| entry.bytes);
    bytes.fold(0, u64::saturating_add)
}

/// Draws the ledgers under a heading. Bars of locations with a capacity are to that scale, others to the largest.
fn draw<'a>(title: &str, ledgers: &'a [Ledger], mut bars: Bars<'a>) -> String {
    for (ledger, entry) in drawn_once(ledgers) {
        let place = (entry.path == AllocPath::Managed, entry.location);
        bars.entry(place).or_default().parts.push((ledger, entry));
    }
    let largest = bars.values().map(|bar| sum(&bar.parts)).max();
    let mut svg = Drawing::default();
    svg.text((MARGIN, 34.0), "head", title);
    let mut x = MARGIN;
    for (class, name) in KINDS {
        svg.rect((x, 50.0), (12.0, 12.0), &format!("class=\"{class}\""), "");
        svg.text((x + 18.0, 60.0), "soft", name);
        x += 34.0 + 8.0 * name.len() as f64;
    }
    if bars.is_empty() {
        svg.text((MARGIN, TOP), "", "No allocations.");
    }
    let mut y = TOP;
    for ((is_managed, location), bar) in &mut bars {
        let managed = if *is_managed { "managed, " } else { "" };
        svg.text((MARGIN, y + 22.0), "name", &format!("{managed}{location}"));
        draw_bar(&mut svg, bar, largest.unwrap_or(0), y);
        y += PITCH;
    }
    svg.file((WIDTH as u64, y as u64 + 40), title)
}

fn draw_bar(svg: &mut Drawing, bar: &mut Bar<'_>, largest: u64, y: f64) {
    let bytes = sum(&bar.parts);
    let scale = bar.total.unwrap_or(largest).max(bytes).max(1);
    let size = |bytes: u64| (bytes as f64 / scale as f64 * BAR, HEIGHT);
    let total = bar.total.map(|total| format!(" of {}", Bytes(total)));
    let known = format!("{}{}", Bytes(bytes), total.unwrap_or_default());
    svg.text((LEFT + BAR + 10.0, y + 22.0), "soft", &known);
    svg.rect((LEFT, y), (BAR, HEIGHT), r#"class="box""#, "");
    if let Some(used) = bar.used {
        let (all, known) = (Bytes(used), Bytes(bytes));
        let title = format!("{all} in use, of which {known} are accounted for");
        svg.rect((LEFT, y), size(used.min(scale)), r#"class="c3""#, &title);
    }
    bar.parts.sort_by_key(|(_, entry)| Reverse(entry.bytes));
    let (shown, rest) = bar.parts.split_at(bar.parts.len().min(PARTS));
    let mut x = LEFT;
    for (ledger, entry) in shown {
        let class = format!("class=\"part {}\"", class(entry.path));
        let size = size(entry.bytes);
        svg.rect((x, y), size, &class, &words(ledger, entry));
        x += size.0;
    }
    if !rest.is_empty() {
        let title = format!("{} smaller allocations: {}", rest.len(), Bytes(sum(rest)));
        svg.rect((x, y), size(sum(rest)), r#"class="part c6""#, &title);
    }
}

/// Describes an allocation in a line.
fn words(ledger: &Ledger, entry: &Allocation) -> String {
    let label = entry.label.as_deref().unwrap_or("no label");
    let (bytes, path, process) = (Bytes(entry.bytes), entry.path, &ledger.process);
    let (pid, title) = (process.pid, process.title());
    format!("{bytes}: {label} ({path}), process {pid} ({title})")
}
