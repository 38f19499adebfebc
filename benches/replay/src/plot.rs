//! A replay as an SVG picture: live bytes and each allocator's span over time, and times per operation.

use std::fmt::Write;

use egmem::size::Bytes;
use egmem::text::is_unsafe;

use super::play::Sample;
use super::report::{Outcome, Report, counted};
use super::trace::Trace;

const WIDTH: f64 = 920.0;
/// The drawing's left and right edge.
const LEFT: f64 = 96.0;
const RIGHT: f64 = 730.0;
/// Memory over time.
const TOP: f64 = 96.0;
const HEIGHT: f64 = 300.0;
/// From bar to bar.
const BAR: f64 = 26.0;

/// A colour that most eyes tell from the others, and a dash.
///
/// Source of the colours: Okabe and Ito, "Color Universal Design", 2008.
const LINES: [(&str, &str); 8] = [
    ("#0072b2", ""),
    ("#d55e00", "7 3"),
    ("#009e73", "2 3"),
    ("#cc79a7", "9 3 2 3"),
    ("#e69f00", "4 2"),
    ("#56b4e9", "12 4"),
    ("#7f6000", "1 2"),
    ("#555555", "6 2 1 2 1 2"),
];

/// The picture.
pub fn draw(report: &Report, trace: &Trace) -> String {
    let spans: Vec<(usize, &Outcome)> = report
        .results
        .iter()
        .enumerate()
        .filter(|(_, result)| result.bounded)
        .collect();
    let highest = |of: fn(&Sample) -> u64| {
        let samples = report
            .results
            .iter()
            .flat_map(|result| &result.facts.samples);
        samples.map(of).max().unwrap_or(0)
    };
    let top = spans.iter().map(|(_, result)| result.facts.peak_span).max();
    let most = top.unwrap_or(0).max(highest(|sample| sample.live));
    let axes = Axes::new(trace, most);
    let bars = TOP + HEIGHT + 96.0;
    let height = bars + report.results.len() as f64 * BAR + 60.0;
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="egmem-replay-t egmem-replay-s" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12" fill="#222">
<title id="egmem-replay-t">Replay of {name}</title>
<desc id="egmem-replay-s">{words}</desc>
<rect width="{WIDTH}" height="{height}" fill="#fff"/>
<text x="24" y="32" font-size="17" font-weight="bold">Replay of {name}</text>
<text x="24" y="52" fill="#555">{operations}, at most {peak} live in {blocks}; medians of {repeat}{threads}{simulated}{slow}</text>
<text x="24" y="{over}" font-weight="bold">Live bytes, and spans from the first live byte to the last</text>
"##,
        name = escape(&report.trace),
        words = escape(&words(report)),
        operations = counted(report.operations as u64, "operation", "operations"),
        peak = Bytes(report.peak),
        blocks = counted(report.peak_blocks.into(), "block", "blocks"),
        repeat = counted(report.repeat.into(), "replay", "replays"),
        threads = match report.threads {
            true => format!(
                " by {}",
                counted(report.log_threads as u64, "thread", "threads")
            ),
            false => String::new(),
        },
        simulated = match report.simulated {
            Some(true) => "; SIMULATED: the heap's memory",
            _ => "",
        },
        slow = match cfg!(debug_assertions) {
            true => "; built without optimisation",
            false => "",
        },
        over = TOP - 14.0,
    );
    axes.draw(&mut svg);
    if let Some(first) = report
        .results
        .iter()
        .find(|result| result.facts.failed == 0)
    {
        axes.area(&mut svg, &first.facts.samples);
    }
    let mut key = TOP + 10.0;
    let _ = writeln!(
        svg,
        r##"<rect x="{x}" y="{y}" width="28" height="10" fill="#d8d8d8"/><text x="{text}" y="{base}">live bytes</text>"##,
        x = RIGHT + 14.0,
        y = key - 6.0,
        text = RIGHT + 50.0,
        base = key + 4.0,
    );
    for &(index, result) in &spans {
        key += 20.0;
        let (colour, dash) = LINES[index % LINES.len()];
        axes.line(&mut svg, &result.facts.samples, colour, dash);
        let _ = writeln!(
            svg,
            r##"<path d="M{x} {key}h28" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/><text x="{text}" y="{base}">{name}</text>"##,
            x = RIGHT + 14.0,
            text = RIGHT + 50.0,
            base = key + 4.0,
            name = escape(&result.allocator),
        );
    }
    draw_bars(&mut svg, &report.results, bars);
    svg.push_str("</svg>\n");
    svg
}

/// The picture in words.
fn words(report: &Report) -> String {
    let mut text = String::new();
    for result in &report.results {
        let _ = write!(
            text,
            "{}: {:.1} ns per operation",
            result.allocator, result.ns
        );
        if let Some(ratio) = result.span_by_peak {
            let _ = write!(text, ", span {ratio:.3} of the peak");
        }
        let _ = write!(text, ", {} refused. ", result.facts.failed);
    }
    text
}

fn draw_bars(svg: &mut String, results: &[Outcome], top: f64) {
    let slowest = results
        .iter()
        .map(|result| result.ns)
        .fold(0.0, f64::max)
        .max(1e-9);
    let _ = writeln!(
        svg,
        r##"<text x="24" y="{}" font-weight="bold">Nanoseconds per allocation or free</text>"##,
        top - 14.0
    );
    for (index, result) in results.iter().enumerate() {
        let y = top + index as f64 * BAR;
        let width = (result.ns / slowest * (RIGHT - 220.0)).max(1.0);
        let failed = match result.facts.failed {
            0 => String::new(),
            failed => format!(", {failed} refused"),
        };
        let _ = writeln!(
            svg,
            r##"<text x="188" y="{base}" text-anchor="end">{name}</text><rect x="196" y="{y}" width="{width:.1}" height="18" fill="{colour}"/><text x="{after:.1}" y="{base}">{ns:.1}{failed}</text>"##,
            base = y + 13.0,
            name = escape(&result.allocator),
            colour = LINES[index % LINES.len()].0,
            after = 202.0 + width,
            ns = result.ns,
        );
    }
}

/// What goes from left to right: the log's time, or its events where it has none.
struct Axes<'a> {
    times: &'a [u64],
    /// The last time or event.
    end: f64,
    /// The bytes at the top, and from line to line.
    top: u64,
    step: u64,
}

impl<'a> Axes<'a> {
    fn new(trace: &'a Trace, most: u64) -> Self {
        // A power of two, so that there are four lines at least and eight at most.
        let step = 1 << (most / 4).max(1).ilog2();
        let times = match trace.times.last() {
            Some(&last) if last > 0 => &trace.times[..],
            _ => &[],
        };
        let end = times
            .last()
            .map_or(trace.events.len().max(1) as f64, |&last| last as f64);
        Self {
            times,
            end,
            top: most
                .max(1)
                .checked_next_multiple_of(step)
                .unwrap_or(u64::MAX),
            step,
        }
    }

    fn x(&self, event: usize) -> f64 {
        let at = match self.times.is_empty() {
            true => event as f64,
            false => self.times.get(event).map_or(self.end, |&time| time as f64),
        };
        LEFT + at / self.end * (RIGHT - LEFT)
    }

    fn y(&self, bytes: u64) -> f64 {
        TOP + HEIGHT - bytes.min(self.top) as f64 / self.top as f64 * HEIGHT
    }

    fn draw(&self, svg: &mut String) {
        let mut bytes = 0_u64;
        while bytes <= self.top {
            let y = self.y(bytes);
            let _ = writeln!(
                svg,
                r##"<path d="M{LEFT} {y:.1}H{RIGHT}" stroke="#ddd"/><text x="{x}" y="{base:.1}" text-anchor="end">{label}</text>"##,
                x = LEFT - 8.0,
                base = y + 4.0,
                label = Bytes(bytes),
            );
            match bytes.checked_add(self.step) {
                Some(next) => bytes = next,
                None => break,
            }
        }
        let unit = match self.times.is_empty() {
            true => "events",
            false => "the log's time",
        };
        for quarter in 0..=4 {
            let part = f64::from(quarter) / 4.0;
            let x = LEFT + part * (RIGHT - LEFT);
            let label = match self.times.is_empty() {
                true => format!("{:.0}", part * self.end),
                false => seconds(part * self.end, self.end),
            };
            let _ = writeln!(
                svg,
                r##"<path d="M{x:.1} {bottom}v5" stroke="#222"/><text x="{x:.1}" y="{base}" text-anchor="middle">{label}</text>"##,
                bottom = TOP + HEIGHT,
                base = TOP + HEIGHT + 19.0,
            );
        }
        let _ = writeln!(
            svg,
            r##"<text x="{x}" y="{y}" text-anchor="end" fill="#555">{unit}</text>"##,
            x = RIGHT,
            y = TOP + HEIGHT + 38.0,
        );
    }

    fn area(&self, svg: &mut String, samples: &[Sample]) {
        let _ = write!(svg, r##"<path fill="#d8d8d8" d="M{LEFT} {}"##, TOP + HEIGHT);
        for sample in samples {
            let (x, y) = (self.x(sample.event), self.y(sample.live));
            let _ = write!(svg, "V{y:.1}H{x:.1}");
        }
        let _ = writeln!(svg, r##"V{}H{LEFT}z"/>"##, TOP + HEIGHT);
    }

    fn line(&self, svg: &mut String, samples: &[Sample], colour: &str, dash: &str) {
        let _ = write!(
            svg,
            r##"<path fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}" d="M{LEFT} {:.1}"##,
            self.y(samples.first().map_or(0, |sample| sample.span)),
        );
        for sample in samples {
            let _ = write!(
                svg,
                "V{:.1}H{:.1}",
                self.y(sample.span),
                self.x(sample.event)
            );
        }
        svg.push_str("\"/>\n");
    }
}

/// `micros` in the unit that suits `end`.
fn seconds(micros: f64, end: f64) -> String {
    match end {
        end if end < 1e4 => format!("{micros:.0} µs"),
        end if end < 1e7 => format!("{:.1} ms", micros / 1e3),
        end if end < 6e8 => format!("{:.2} s", micros / 1e6),
        _ => format!("{:.1} min", micros / 6e7),
    }
}

/// For XML; controls, and characters that XML cannot hold, are replaced.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if is_unsafe(c) || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(trace: &Trace, most: u64) -> (u64, u64) {
        let axes = Axes::new(trace, most);
        (axes.top, axes.step)
    }

    #[test]
    fn lines_are_at_round_numbers_and_few() {
        let trace = Trace::default();
        assert_eq!(axes(&trace, 1 << 30), (1 << 30, 256 << 20));
        assert_eq!(axes(&trace, (1 << 30) + 1), (1280 << 20, 256 << 20));
        for most in [0, 1, 2, 3, 5, 1000, 12_345_678, u64::MAX / 2, u64::MAX] {
            let (top, step) = axes(&trace, most);
            assert!(top >= most, "{most}");
            assert!(top / step <= 8, "{most}: {top} in steps of {step}");
        }
    }

    #[test]
    fn events_go_from_edge_to_edge() {
        let mut trace = Trace {
            times: vec![0, 250, 1000],
            ..Trace::default()
        };
        let axes = Axes::new(&trace, 100);
        assert_eq!((axes.x(0), axes.x(2)), (LEFT, RIGHT));
        assert_eq!(axes.x(1), LEFT + (RIGHT - LEFT) / 4.0);
        assert_eq!((axes.y(0), axes.y(axes.top)), (TOP + HEIGHT, TOP));
        // A log whose times are all the same is drawn by its events.
        trace.times = vec![0, 0, 0];
        assert!(Axes::new(&trace, 100).times.is_empty());
    }

    #[test]
    fn names_cannot_break_the_picture() {
        assert_eq!(
            escape("a<b>&\"\u{7}\u{202e}"),
            "a&lt;b&gt;&amp;&quot;\u{fffd}\u{fffd}"
        );
    }
}
