//! Ledgers as a drawing: a bar for each location, with a part for each allocation.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::drawing::Drawing;
use crate::driver::Location;
use crate::entries::{AllocPath, Allocation};
use crate::ledger::Ledger;
use crate::once::drawn_once;
use crate::report::Report;
use crate::size::Bytes;
use crate::texts::escape_xml;

const MARGIN: u64 = 24;
const TOP: u64 = 86;
const LABEL: u64 = 150;
const BAR: u64 = 720;
const HEIGHT: u64 = 34;
const PITCH: u64 = 62;
const WIDTH: u64 = MARGIN + LABEL + BAR + 170;
/// The most parts of a bar; the smallest share the last.
const PARTS: usize = 400;

impl Ledger {
    /// Returns a drawing: a bar for each location, with a part for each allocation. It is a complete SVG file without
    /// external fonts or style sheets.
    pub fn to_svg(&self) -> String {
        draw(self.process.title(), std::slice::from_ref(self), &[])
    }
}

impl Report {
    /// Returns a drawing: a bar for each node and GPU, to the scale of its memory, with a part for each allocation. It is a
    /// complete SVG file without external fonts or style sheets.
    pub fn to_svg(&self) -> String {
        let gpus = self.gpus.iter().map(|gpu| Capacity {
            location: Location::Device(gpu.gpu),
            total: gpu.total,
            used: gpu.used,
        });
        let nodes = self.nodes.iter().map(|node| Capacity {
            location: node.node.into(),
            total: Some(node.total),
            used: Some(node.used),
        });
        let capacities: Vec<_> = nodes.chain(gpus).collect();
        draw("Whose memory it is", &self.processes, &capacities)
    }
}

const STYLE: &str = "\
.name{font-size:14px;font-weight:600}.box{fill:#eef3f9;stroke:#9db0c6}.part{stroke:#fff;stroke-width:.5}\
.v{fill:#1f5fa8}.h{fill:#3d9a5f}.s{fill:#8a63b8}.i{fill:#e8a33d}.p{fill:#2f9fb0}.o{fill:#8a97a8}.other{fill:#c9d3de}";
const DARK: &str = ".box{fill:#1d2631;stroke:#48607a}.part{stroke:#12161c}.other{fill:#3a4552}";

/// The bytes that a location has, and how many of them are in use by all processes. `None`: unknown.
#[derive(Clone, Debug)]
struct Capacity {
    location: Location,
    total: Option<u64>,
    used: Option<u64>,
}

const fn class(path: AllocPath) -> &'static str {
    match path {
        AllocPath::Vmm => "v",
        AllocPath::HeapChunk => "h",
        AllocPath::ShapeChunk => "s",
        AllocPath::Import | AllocPath::ImportedPool => "i",
        AllocPath::Pool => "p",
        _ => "o",
    }
}

/// The allocations at one location.
struct Bar<'a> {
    parts: Vec<(&'a Ledger, &'a Allocation)>,
    capacity: Option<&'a Capacity>,
}

impl Bar<'_> {
    /// Returns the bytes of all parts.
    fn bytes(&self) -> u64 {
        let bytes = self.parts.iter().map(|(_, entry)| entry.bytes);
        bytes.fold(0, u64::saturating_add)
    }
}

/// The key of a bar: whether it has managed memory, which takes no certain room at its location, and the location.
type Place = (bool, Location);

fn bars<'a>(ledgers: &'a [Ledger], capacities: &'a [Capacity]) -> BTreeMap<Place, Bar<'a>> {
    let mut bars: BTreeMap<Place, Bar<'a>> = BTreeMap::new();
    for capacity in capacities {
        let bar = Bar {
            parts: Vec::new(),
            capacity: Some(capacity),
        };
        bars.insert((false, capacity.location), bar);
    }
    let entries = ledgers
        .iter()
        .flat_map(|ledger| ledger.allocations.iter().map(move |entry| (ledger, entry)));
    for (ledger, entry) in drawn_once(entries) {
        let place = (entry.path == AllocPath::Managed, entry.location);
        let bar = bars.entry(place).or_insert_with(|| Bar {
            parts: Vec::new(),
            capacity: None,
        });
        bar.parts.push((ledger, entry));
    }
    for bar in bars.values_mut() {
        bar.parts
            .sort_by_key(|(_, entry)| std::cmp::Reverse(entry.bytes));
    }
    bars
}

/// Draws the ledgers under a heading. Bars of locations with a capacity are to that scale, others to the largest.
fn draw(title: &str, ledgers: &[Ledger], capacities: &[Capacity]) -> String {
    let bars = bars(ledgers, capacities);
    let largest = bars.values().map(Bar::bytes).max().unwrap_or(0).max(1);
    let height = TOP + bars.len() as u64 * PITCH + 40;
    let mut svg = Drawing::default();
    svg.text((MARGIN as f64, 34.0), "head", title);
    legend(&mut svg);
    if bars.is_empty() {
        svg.text((MARGIN as f64, TOP as f64), "", "No allocations.");
    }
    let mut y = TOP;
    for (&(is_managed, location), bar) in &bars {
        let name = match is_managed {
            true => format!("managed, {location}"),
            false => location.to_string(),
        };
        draw_bar(&mut svg, &name, bar, largest, y);
        y += PITCH;
    }
    svg.file((WIDTH, height), title, STYLE, DARK)
}

fn legend(svg: &mut Drawing) {
    let kinds = [
        ("v", "vmm"),
        ("h", "heap"),
        ("s", "shapes"),
        ("p", "pool"),
        ("i", "imported"),
        ("o", "pinned, device"),
        ("other", "not accounted for"),
    ];
    let mut x = MARGIN;
    for (class, name) in kinds {
        let (text, next) = (x + 18, x + 34 + 8 * name.len() as u64);
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{x}\" y=\"50\" width=\"12\" height=\"12\"/>\
             <text class=\"soft\" x=\"{text}\" y=\"60\">{name}</text>"
        );
        x = next;
    }
}

fn draw_bar(svg: &mut Drawing, name: &str, bar: &Bar<'_>, largest: u64, y: u64) {
    let bytes = bar.bytes();
    let total = bar.capacity.and_then(|capacity| capacity.total);
    let used = bar.capacity.and_then(|capacity| capacity.used);
    let scale = total.unwrap_or(largest).max(bytes).max(1);
    let width = |bytes: u64| bytes as f64 / scale as f64 * BAR as f64;
    let left = (MARGIN + LABEL) as f64;
    let (middle, right) = (y + 22, MARGIN + LABEL + BAR + 10);
    let known = match total {
        Some(total) => format!("{} of {}", Bytes(bytes), Bytes(total)),
        None => Bytes(bytes).to_string(),
    };
    let _ = writeln!(
        svg,
        "<text class=\"name\" x=\"{MARGIN}\" y=\"{middle}\">{name}</text>\
         <text class=\"soft\" x=\"{right}\" y=\"{middle}\">{known}</text>\n\
         <rect class=\"box\" x=\"{left}\" y=\"{y}\" width=\"{BAR}\" height=\"{HEIGHT}\"/>"
    );
    if let Some(used) = used {
        let other = width(used.min(scale));
        let _ = writeln!(
            svg,
            "<rect class=\"other\" x=\"{left}\" y=\"{y}\" width=\"{other:.1}\" height=\"{HEIGHT}\">\
             <title>{} in use, of which {} are accounted for</title></rect>",
            Bytes(used),
            Bytes(bytes),
        );
    }
    let mut x = left;
    for (ledger, entry) in bar.parts.iter().take(PARTS) {
        let (class, wide) = (class(entry.path), width(entry.bytes));
        let _ = writeln!(
            svg,
            "<rect class=\"part {class}\" x=\"{x:.2}\" y=\"{y}\" width=\"{wide:.2}\" height=\"{HEIGHT}\">\
             <title>{}</title></rect>",
            escape_xml(&words(ledger, entry))
        );
        x += wide;
    }
    let rest = bar.parts.iter().skip(PARTS);
    let rest = rest.fold(0_u64, |sum, (_, entry)| sum.saturating_add(entry.bytes));
    if rest > 0 {
        let (wide, count) = (width(rest), bar.parts.len() - PARTS);
        let _ = writeln!(
            svg,
            "<rect class=\"part o\" x=\"{x:.2}\" y=\"{y}\" width=\"{wide:.2}\" height=\"{HEIGHT}\">\
             <title>{count} smaller allocations: {}</title></rect>",
            Bytes(rest)
        );
    }
}

/// Describes an allocation in a line.
fn words(ledger: &Ledger, entry: &Allocation) -> String {
    let label = entry.label.as_deref().unwrap_or("no label");
    let process = &ledger.process;
    format!(
        "{}: {} ({}), process {} ({})",
        Bytes(entry.bytes),
        label,
        entry.path,
        process.pid,
        process.title()
    )
}
