//! Lines over axes, as an SVG.

use std::fmt::Write;

/// A picture's part with axes of its own.
pub struct Panel {
    pub title: String,
    pub across: &'static str,
    pub up: &'static str,
    /// Whether the axis across and the axis up are logarithmic.
    pub logarithmic: (bool, bool),
    pub lines: Vec<Line>,
}

/// A contestant's points, by rising x.
pub struct Line {
    pub name: &'static str,
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const HEAD: f64 = 64.0;
const PANEL_HEAD: f64 = 34.0;
const FOOT: f64 = 48.0;
/// What the names at the ends of lines need.
const NAMES: f64 = 124.0;
const COLOURS: [&str; 6] = [
    "#2f7a35", "#c0504d", "#4f6db3", "#b8860b", "#777777", "#7b4fa3",
];

/// An axis: what is at its ends, in its own terms.
struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64>, logarithmic: bool) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|&value| !logarithmic || value > 0.0) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (1.0, 1.0);
        }
        if logarithmic {
            (low, high) = (low.log10(), high.log10());
        } else {
            low = low.min(0.0);
        }
        if high - low < 1e-9 {
            high = low + 1.0;
        }
        Self {
            low,
            high,
            logarithmic,
        }
    }

    /// Whole decades around the values, where it is logarithmic; some room above, where not.
    fn widened(mut self) -> Self {
        if self.logarithmic {
            (self.low, self.high) = (self.low.floor(), self.high.ceil());
        } else {
            self.high += (self.high - self.low) * 0.08;
        }
        self
    }

    /// Where a value is, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let value = match self.logarithmic {
            true => value.max(f64::MIN_POSITIVE).log10(),
            false => value,
        };
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let (low, high) = (self.low.floor() as i32, self.high.ceil() as i32);
            return (low..=high).map(|power| 10_f64.powi(power)).collect();
        }
        let steps = 5.0;
        let step = (self.high - self.low) / steps;
        (0..=steps as i32)
            .map(|i| self.low + step * f64::from(i))
            .collect()
    }
}

/// The picture: `about` names what was measured on.
pub fn draw(title: &str, about: &str, panels: &[Panel]) -> String {
    let panel_width = LEFT + WIDTH + NAMES;
    let width = panel_width * panels.len().max(1) as f64;
    let height = HEAD + PANEL_HEAD + HEIGHT + FOOT;
    let mut svg = String::new();
    let (title, about) = (escape(title), escape(about));
    // Writing to a String cannot fail.
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11" fill="#222">
<title>{title}</title>
<rect width="{width}" height="{height}" fill="#fff"/>
<text x="20" y="26" font-size="16" font-weight="bold">{title}</text>
<text x="20" y="46" fill="#555">{about}; medians</text>
"##
    );
    for (index, panel) in panels.iter().enumerate() {
        panel.draw(&mut svg, panel_width * index as f64 + LEFT);
    }
    svg.push_str("</svg>\n");
    svg
}

impl Panel {
    fn draw(&self, svg: &mut String, left: f64) {
        let top = HEAD + PANEL_HEAD;
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let across = Axis::of(points().map(|point| point.0), self.logarithmic.0);
        let up = Axis::of(points().map(|point| point.1), self.logarithmic.1).widened();
        let x = |value: f64| left + across.place(value) * WIDTH;
        let y = |value: f64| top + (1.0 - up.place(value)) * HEIGHT;
        let _ = writeln!(
            svg,
            r##"<text x="{left}" y="{:.1}" font-size="12" font-weight="bold">{}</text><rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/><text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text><text x="{left}" y="{:.1}" fill="#555">{}</text>"##,
            top - 20.0,
            escape(&self.title),
            left + WIDTH / 2.0,
            top + HEIGHT + 34.0,
            escape(self.across),
            top - 6.0,
            escape(self.up),
        );
        for tick in up.ticks() {
            let _ = writeln!(
                svg,
                r##"<line x1="{left}" x2="{:.1}" y1="{at:.1}" y2="{at:.1}" stroke="#e4e4e4"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"##,
                left + WIDTH,
                left - 6.0,
                y(tick) + 4.0,
                figure(tick),
                at = y(tick),
            );
        }
        // What was measured, rather than round numbers.
        let mut measured: Vec<f64> = points().map(|point| point.0).collect();
        measured.sort_by(f64::total_cmp);
        measured.dedup();
        for value in measured {
            let _ = writeln!(
                svg,
                r##"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"##,
                x(value),
                top + HEIGHT + 16.0,
                figure(value),
            );
        }
        // Names at the ends of lines, apart from each other.
        let mut ends: Vec<(f64, usize)> = Vec::new();
        for (index, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let path: Vec<String> = line
                .points
                .iter()
                .map(|&(px, py)| format!("{:.1},{:.1}", x(px), y(py)))
                .collect();
            let _ = writeln!(
                svg,
                r##"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"##,
                path.join(" ")
            );
            for point in &path {
                let (px, py) = point.split_once(',').unwrap_or_default();
                let _ = writeln!(
                    svg,
                    r##"<circle cx="{px}" cy="{py}" r="3" fill="{colour}"/>"##
                );
            }
            if let Some(&(_, last)) = line.points.last() {
                ends.push((y(last), index));
            }
        }
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut below = f64::NEG_INFINITY;
        for (at, index) in ends {
            let at = at.max(below + 14.0);
            below = at;
            let _ = writeln!(
                svg,
                r##"<text x="{:.1}" y="{:.1}" fill="{}">{}</text>"##,
                left + WIDTH + 8.0,
                at + 4.0,
                COLOURS[index % COLOURS.len()],
                escape(self.lines[index].name),
            );
        }
    }
}

/// Short, with the unit's prefix where it is large.
fn figure(value: f64) -> String {
    match value {
        _ if value >= 1e9 => format!("{} G", value / 1e9),
        _ if value >= 1e6 => format!("{} M", value / 1e6),
        _ if value >= 1e4 => format!("{} k", value / 1e3),
        _ if value == value.trunc() => format!("{value}"),
        _ if value >= 0.1 => format!("{value:.1}"),
        _ => format!("{value}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
