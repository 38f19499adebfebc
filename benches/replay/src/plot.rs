//! A replay as an SVG picture: live bytes and each allocator's span over time, and times per operation.

use std::fmt::Write;

use egmem::size::Bytes;
use egmem_chart::{Area, Axis, Bar, Bars, Chart, Line, Picture, Shape};

use super::play::Sample;
use super::report::{Outcome, Report, counted};
use super::trace::Trace;

const WIDTH: f64 = 920.0;
/// Memory over time.
const AREA: Area = Area {
    left: 96.0,
    top: 104.0,
    width: 634.0,
    height: 300.0,
};
const BARS: f64 = AREA.top + AREA.height + 56.0;

/// The picture.
pub fn draw(report: &Report, trace: &Trace) -> String {
    let bars = Bars {
        title: "Nanoseconds per allocation or free".to_owned(),
        logarithmic: false,
        bars: report.results.iter().enumerate().map(bar).collect(),
    };
    let height = BARS + bars.height() + 24.0;
    let title = format!("Replay of {}", report.trace);
    let mut picture = Picture::new(WIDTH, height, &title, &about(report), &words(report));
    chart(report, trace).draw(&mut picture, AREA);
    bars.draw(&mut picture, 24.0, BARS, AREA.left + AREA.width);
    picture.finish()
}

/// Returns the subtitle: the log, its size, and how it was replayed.
fn about(report: &Report) -> String {
    let by = match report.threads {
        true => format!(
            " by {}",
            counted(report.log_threads as u64, "thread", "threads")
        ),
        false => String::new(),
    };
    format!(
        "{}, at most {} live in {}; medians of {}{by}{}{}",
        counted(report.operations as u64, "operation", "operations"),
        Bytes(report.peak),
        counted(report.peak_blocks.into(), "block", "blocks"),
        counted(report.repeat.into(), "replay", "replays"),
        match report.simulated {
            Some(true) => "; SIMULATED: the heap's memory",
            _ => "",
        },
        match cfg!(debug_assertions) {
            true => "; built without optimisation",
            false => "",
        },
    )
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

fn bar((index, result): (usize, &Outcome)) -> Bar {
    let failed = match result.facts.failed {
        0 => String::new(),
        failed => format!(", {failed} refused"),
    };
    Bar {
        name: result.allocator.clone(),
        value: result.ns,
        text: format!("{:.1}{failed}", result.ns),
        index,
    }
}

/// Live bytes and the spans of the allocators that manage a range, over the log.
fn chart(report: &Report, trace: &Trace) -> Chart {
    let results = || report.results.iter();
    let live = results()
        .flat_map(|result| &result.facts.samples)
        .map(|sample| sample.live);
    let bounded = || results().enumerate().filter(|(_, result)| result.bounded);
    let spans = bounded().map(|(_, result)| result.facts.peak_span);
    let times = Times::of(trace);
    let line = |name: &str, samples: &[Sample], value: fn(&Sample) -> u64| Line {
        name: name.to_owned(),
        points: samples
            .iter()
            .map(|sample| (times.at(sample.event), value(sample) as f64))
            .collect(),
    };
    Chart {
        title: "Live bytes, and spans from the first live byte to the last".to_owned(),
        up: bytes(live.chain(spans).max().unwrap_or(0)),
        shape: Shape::Steps,
        filled: results()
            .find(|result| result.facts.failed == 0)
            .map(|result| line("live bytes", &result.facts.samples, |sample| sample.live)),
        lines: bounded()
            .map(|(index, result)| {
                let samples = &result.facts.samples;
                (
                    index,
                    line(&result.allocator, samples, |sample| sample.span),
                )
            })
            .collect(),
        across: times.axis(),
    }
}

/// An axis from 0 to `most` bytes or a little more.
fn bytes(most: u64) -> Axis {
    // A power of two, so that there are four lines at least and eight at most.
    let step = 1_u64 << (most / 4).max(1).ilog2();
    let top = most
        .max(1)
        .checked_next_multiple_of(step)
        .unwrap_or(u64::MAX);
    let ticks = std::iter::successors(Some(0_u64), |bytes| bytes.checked_add(step));
    Axis {
        label: String::new(),
        low: 0.0,
        high: top as f64,
        logarithmic: false,
        ticks: ticks
            .take_while(|&bytes| bytes <= top)
            .map(|bytes| (bytes as f64, Bytes(bytes).to_string()))
            .collect(),
    }
}

/// The horizontal axis: the log's time, or its events where it has none.
struct Times<'a> {
    times: &'a [u64],
    /// The last time or event.
    end: f64,
}

impl<'a> Times<'a> {
    fn of(trace: &'a Trace) -> Self {
        match trace.times.last() {
            Some(&last) if last > 0 => Self {
                times: &trace.times,
                end: last as f64,
            },
            _ => Self {
                times: &[],
                end: trace.events.len().max(1) as f64,
            },
        }
    }

    fn at(&self, event: usize) -> f64 {
        match self.times.is_empty() {
            true => event as f64,
            false => self.times.get(event).map_or(self.end, |&time| time as f64),
        }
    }

    fn axis(&self) -> Axis {
        let ticks = [0.0, 0.25, 0.5, 0.75, 1.0].map(|part| {
            let value = part * self.end;
            match self.times.is_empty() {
                true => (value, format!("{value:.0}")),
                false => (value, seconds(value, self.end)),
            }
        });
        Axis {
            label: match self.times.is_empty() {
                true => "events".to_owned(),
                false => "the log's time".to_owned(),
            },
            low: 0.0,
            high: self.end,
            logarithmic: false,
            ticks: ticks.into(),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_at_round_numbers_and_few() {
        for (most, top, step) in [
            (1 << 30, 1 << 30, 256 << 20),
            ((1 << 30) + 1, 1280 << 20, 256 << 20),
        ] {
            let axis = bytes(most);
            assert_eq!(
                (axis.high, axis.ticks[1].0),
                (f64::from(top), f64::from(step))
            );
            assert_eq!(axis.ticks[1].1, "256 MiB");
        }
        for most in [0, 1, 2, 3, 5, 1000, 12_345_678, u64::MAX / 2, u64::MAX] {
            let axis = bytes(most);
            assert!(axis.high >= most as f64, "{most}");
            assert!(
                (2..=9).contains(&axis.ticks.len()),
                "{most}: {:?}",
                axis.ticks
            );
        }
    }

    #[test]
    fn events_go_from_edge_to_edge() {
        let mut trace = Trace {
            times: vec![0, 250, 1000],
            ..Trace::default()
        };
        let place = |trace: &Trace, event| {
            let times = Times::of(trace);
            times.axis().place(times.at(event))
        };
        assert_eq!(
            [0, 1, 2].map(|event| place(&trace, event)),
            [0.0, 0.25, 1.0]
        );
        // A log whose times are all the same is drawn by its events.
        trace.times = vec![0, 0, 0];
        assert_eq!(Times::of(&trace).axis().label, "events");
    }
}
