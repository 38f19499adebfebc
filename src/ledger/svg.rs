//! Ledgers as a drawing: a bar for each location, with a part for each allocation.

use std::collections::BTreeMap;

use crate::drawing::Drawing;
use crate::driver::Location;
use crate::entries::{AllocPath, Allocation};
use crate::ledger::Ledger;
use crate::ledger::drawn_once;
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
    let height = TOP + bars.len() as f64 * PITCH + 40.0;
    let mut svg = Drawing::default();
    svg.text((MARGIN, 34.0), "head", title);
    legend(&mut svg);
    if bars.is_empty() {
        svg.text((MARGIN, TOP), "", "No allocations.");
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
    svg.file((WIDTH as u64, height as u64), title, STYLE, DARK)
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
        svg.rect((x, 50.0), (12.0, 12.0), &format!("class=\"{class}\""), "");
        svg.text((x + 18.0, 60.0), "soft", name);
        x += 34.0 + 8.0 * name.len() as f64;
    }
}

fn draw_bar(svg: &mut Drawing, name: &str, bar: &Bar<'_>, largest: u64, y: f64) {
    let bytes = bar.bytes();
    let total = bar.capacity.and_then(|capacity| capacity.total);
    let used = bar.capacity.and_then(|capacity| capacity.used);
    let scale = total.unwrap_or(largest).max(bytes).max(1);
    let size = |bytes: u64| (bytes as f64 / scale as f64 * BAR, HEIGHT);
    let known = match total {
        Some(total) => format!("{} of {}", Bytes(bytes), Bytes(total)),
        None => Bytes(bytes).to_string(),
    };
    svg.text((MARGIN, y + 22.0), "name", name);
    svg.text((LEFT + BAR + 10.0, y + 22.0), "soft", &known);
    svg.rect((LEFT, y), (BAR, HEIGHT), r#"class="box""#, "");
    if let Some(used) = used {
        let (all, known) = (Bytes(used), Bytes(bytes));
        let title = format!("{all} in use, of which {known} are accounted for");
        let size = size(used.min(scale));
        svg.rect((LEFT, y), size, r#"class="other""#, &title);
    }
    let mut x = LEFT;
    for (ledger, entry) in bar.parts.iter().take(PARTS) {
        let class = format!("class=\"part {}\"", class(entry.path));
        let size = size(entry.bytes);
        svg.rect((x, y), size, &class, &words(ledger, entry));
        x += size.0;
    }
    let rest = bar.parts.iter().skip(PARTS);
    let rest = rest.fold(0_u64, |sum, (_, entry)| sum.saturating_add(entry.bytes));
    if rest > 0 {
        let count = bar.parts.len() - PARTS;
        let title = format!("{count} smaller allocations: {}", Bytes(rest));
        svg.rect((x, y), size(rest), r#"class="part o""#, &title);
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
