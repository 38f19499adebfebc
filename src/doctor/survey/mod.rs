//! A survey of a machine: what the doctor finds, and what proofs and measurements find, without anything that identifies the
//! machine, its users or its processes.
//!
//! `egmem report` shows it. It is made to be posted in a public issue.

mod private;

use std::time::{Duration, Instant};

use egmem_core::report::Table;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::measure::{BandwidthRow, Kind, Proof, Rate};
use crate::part::{Ask, Said};
use crate::size::Bytes;
use crate::text::{hanging, indented, to_text};
use crate::texts::{grouped, ranges};
use crate::{Children, Error, Report, Result};
use private::Private;

pub use crate::measure::{Fabric, Figure, Part, Pinned, Placed, Problem, Section, Taken};

/// The version of a survey's JSON. Another one has other fields, or other meanings.
pub const VERSION: u32 = 1;

/// The parts, and their shares of the time that is left when they begin: of what they and all after them get.
const SHARES: [(Part, u32); 6] = [
    (Part::Proofs, 5),
    (Part::Bandwidth, 5),
    (Part::Latency, 2),
    (Part::Pinning, 4),
    (Part::Placement, 3),
    (Part::Fabric, 1),
];

/// Everything that `egmem report` shows. It names no host, user, process, address or UUID.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Survey {
    /// [`VERSION`].
    pub version: u32,
    /// The version of this library.
    pub egmem: String,
    /// The simulated machine's name; then nothing here is about real hardware.
    pub simulated: Option<String>,
    /// The doctor's [`Report`], without its topology and without what identifies the machine.
    pub doctor: Value,
    /// The report's topology.
    pub topology: Value,
    /// For each node, GPU and path, whether the CPU and the GPU see the same bytes.
    pub proofs: Section<Proof>,
    /// In GB/s, for each node and GPU and kind of memory.
    #[serde(rename = "bandwidth_gb_s")]
    pub bandwidth: Section<BandwidthRow<Figure>>,
    /// In µs, of operations on 8 bytes, by the GPU's clock.
    #[serde(rename = "latency_us")]
    pub latency: Section<BandwidthRow<Figure>>,
    /// How long cold memory takes to pin.
    pub pinning: Section<Pinned>,
    /// On which node memory lies.
    pub placement: Section<Placed>,
    /// Where memory could be exported and imported by a fabric handle.
    pub fabric: Section<Fabric>,
    /// The doctor's report as text.
    #[serde(skip)]
    findings: String,
}

impl Survey {
    /// Adds proofs and measurements to a doctor's report of the machine that `children` run on, until the given moment.
    ///
    /// A part that crashes, hangs or meets its share of the time has the rows that it had made and a problem. `gpus` are
    /// ordinals; empty: all.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`] for a GPU that the report does not have, unless it has none.
    pub fn gather(
        report: &Report,
        children: &mut Children,
        gpus: &[i32],
        until: Instant,
    ) -> Result<Self> {
        let topology = &report.topology;
        let gpus = match (gpus, topology.gpus()) {
            ([], all) => all.iter().map(|gpu| gpu.ordinal).collect(),
            (_, []) => Vec::new(),
            (some, _) => {
                some.iter()
                    .try_for_each(|&gpu| topology.gpu(gpu).map(drop))?;
                some.to_vec()
            }
        };
        let private = Private::of_this_process();
        let doctor = serde_json::to_value(report);
        let mut doctor = doctor.map_err(|error| Error::invalid("report", error.to_string()))?;
        private.clean_json(&mut doctor);
        let topology = doctor
            .as_object_mut()
            .and_then(|all| all.remove("topology"));
        let mut parts = Parts {
            report,
            children,
            private: &private,
            gpus,
            until,
        };
        Ok(Self {
            version: VERSION,
            egmem: env!("CARGO_PKG_VERSION").to_owned(),
            simulated: report.simulated.as_deref().map(|name| private.clean(name)),
            topology: topology.unwrap_or_default(),
            doctor,
            proofs: parts.run(Part::Proofs),
            bandwidth: parts.run(Part::Bandwidth),
            latency: parts.run(Part::Latency),
            pinning: parts.run(Part::Pinning),
            placement: parts.run(Part::Placement),
            fabric: parts.run(Part::Fabric),
            findings: private.clean(&to_text(report, false, false)),
        })
    }

    /// Formats it for people, 80 columns wide: a page for a machine with few GPUs.
    pub fn to_text(&self) -> String {
        page(self)
    }
}

/// Runs the parts, in the order of [`SHARES`].
struct Parts<'a> {
    report: &'a Report,
    children: &'a mut Children,
    private: &'a Private,
    gpus: Vec<i32>,
    until: Instant,
}

impl Parts<'_> {
    fn run<R: DeserializeOwned>(&mut self, part: Part) -> Section<R> {
        let began = Instant::now();
        let mut section = Section {
            seconds: Figure::Simulated,
            rows: Vec::new(),
            problems: Vec::new(),
        };
        let done = match &self.report.driver.problem {
            Some(problem) => Err(problem.clone()),
            None if self.gpus.is_empty() => Err(Error::NoSuchGpu { gpu: 0, count: 0 }.into()),
            None => {
                let limit = limit(part, self.until.saturating_duration_since(began));
                let gpus = self.gpus.clone();
                let take = |said| section.take(said, self.private);
                self.children.run_part(&Ask { part, gpus }, limit, take)
            }
        };
        if let Err(reason) = done {
            let problem = Said::Problem(Problem::new((None, None), "", reason));
            section.take(problem, self.private);
        }
        if self.report.simulated.is_none() {
            section.seconds = Figure::Measured(began.elapsed().as_secs_f64());
        }
        section
    }
}

impl<R: DeserializeOwned> Section<R> {
    /// Adds what a child said, cleaned. A row of another form is a problem.
    fn take(&mut self, said: Said, private: &Private) {
        match said {
            Said::Row(mut row) => {
                private.clean_json(&mut row);
                match serde_json::from_value(row) {
                    Ok(row) => self.rows.push(row),
                    Err(error) => {
                        let error = Error::invalid("row", error.to_string());
                        self.problems.push(Problem::new((None, None), "", error));
                    }
                }
            }
            Said::Problem(mut problem) => {
                let reason = &mut problem.reason;
                for text in [&mut problem.what, &mut reason.message, &mut reason.remedy] {
                    *text = private.clean(text);
                }
                self.problems.push(problem);
            }
            Said::End => {}
        }
    }
}

/// Returns a part's share of the time that is left.
fn limit(part: Part, left: Duration) -> Duration {
    let at = SHARES.iter().position(|(other, _)| *other == part);
    let (_, rest) = SHARES.split_at(at.unwrap_or(0));
    left / rest.iter().map(|(_, share)| share).sum::<u32>() * rest[0].1
}

/// The most rows of a table that shows all kinds of memory.
const MANY: usize = 20;

fn page(survey: &Survey) -> String {
    let findings = survey.findings.trim_end();
    let text = format!(
        "egmem {} report, version {}\n\n{findings}\n\n",
        survey.egmem, survey.version
    );
    if !survey.doctor["driver"]["problem"].is_null() {
        return text + "Nothing is proved and measured without a driver.\n";
    }
    let latency = "Latency of 8 bytes in µs, medians";
    [
        text + "Proofs: the CPU writes, the GPU checks and rewrites, the CPU checks\n",
        proofs(survey),
        section("Bandwidth in GB/s, medians", &survey.bandwidth, |rows| {
            rates(rows, 1)
        }),
        section(latency, &survey.latency, |rows| rates(rows, 2)),
        section("Pinning cold memory", &survey.pinning, |rows| {
            rows.iter().map(pinned).collect()
        }),
        section("Placement", &survey.placement, |rows| {
            rows.iter().map(placed).collect()
        }),
        section("Fabric handles", &survey.fabric, fabric),
    ]
    .concat()
}

fn section<R>(title: &str, section: &Section<R>, rows: impl FnOnce(&[R]) -> String) -> String {
    let rows = (!section.rows.is_empty()).then(|| rows(&section.rows));
    let rows = rows.unwrap_or_default();
    format!("\n{title}\n{rows}{}", problems(&section.problems))
}

fn proofs(survey: &Survey) -> String {
    let proofs = &survey.proofs.rows;
    let held = proofs.iter().filter(|proof| proof.verified).count();
    let mut text = format!("  {held} of {} held\n", proofs.len());
    let failed = proofs.iter().filter(|proof| !proof.verified);
    text += &counted(failed.map(|proof| {
        let parts = [&proof.reason, &proof.remedy].map(|part| part.as_deref().unwrap_or_default());
        let [path, api] = [proof.path.name(), &proof.api];
        format!("{path} ({api}): {} → {}", parts[0], parts[1])
    }));
    text + &problems(&survey.proofs.problems)
}

/// Formats each problem once, with the number of nodes and GPUs that have it.
fn problems(problems: &[Problem]) -> String {
    counted(problems.iter().map(|problem| {
        let what = match problem.what.as_str() {
            "" => String::new(),
            what => format!("{what}: "),
        };
        let reason = &problem.reason;
        format!("{what}{} → {}", reason.message, reason.remedy)
    }))
}

/// Formats each reason once, with the number of times that it comes.
fn counted(reasons: impl Iterator<Item = String>) -> String {
    let reasons = grouped(reasons.map(|reason| (reason, ()))).into_iter();
    let line = |(reason, times): (String, Vec<()>)| match times.len() {
        1 => hanging("  ✗ ", &reason),
        count => hanging("  ✗ ", &format!("{count} × {reason}")),
    };
    reasons.map(line).collect()
}

/// Formats figures as a table; of many rows, those of the library's buffers.
fn rates(rows: &[BandwidthRow<Figure>], digits: usize) -> String {
    let is_simulated = |row: &BandwidthRow<Figure>| row.rates().contains(&Some(Figure::Simulated));
    if rows.iter().any(is_simulated) {
        return format!(
            "  simulated: all {} rows ran, without figures\n",
            rows.len()
        );
    }
    let mut table =
        Table::with(" node, GPU, memory, >to GPU, >to host, >kernel reads, >kernel writes");
    for row in rows {
        let buffer = matches!(row.memory, Kind::Vmm | Kind::Registered);
        if rows.len() > MANY && !buffer {
            continue;
        }
        let figures = row.rates().map(|figure| median(figure, digits));
        let place = [
            format!(" {}", row.node),
            row.gpu.to_string(),
            row.memory.name().to_owned(),
        ];
        table.row(place.into_iter().chain(figures));
    }
    indented(&table)
}

fn median(figure: Option<Figure>, digits: usize) -> String {
    match figure {
        Some(Figure::Measured(Rate { median, .. })) => format!("{median:.digits$}"),
        Some(Figure::Simulated) => "simulated".to_owned(),
        None => "–".to_owned(),
    }
}

fn pinned(row: &Pinned) -> String {
    let (node, kind, bytes) = (row.node, row.backing.name(), Bytes(row.bytes));
    let figures = match (row.allocate_s, row.release_s) {
        (Figure::Measured(allocate), Figure::Measured(release)) => {
            let rate = row.bytes as f64 / allocate / 1e9;
            format!("{allocate:.3} s ({rate:.1} GB/s), released in {release:.3} s")
        }
        _ => "simulated".into(),
    };
    format!("  node {node}, {kind}, {bytes}: {figures}\n")
}

fn placed(row: &Placed) -> String {
    let verdict = match row.on_node {
        Some(true) => "on the node",
        Some(false) => "NOT on the node",
        None => "unclear",
    };
    let taken = row.taken.iter().filter(|of| of.bytes > 0);
    let taken = taken.map(|of| format!("{} less on node {}", Bytes(of.bytes), of.node));
    let taken = match taken.collect::<Vec<_>>() {
        none if none.is_empty() => "no node has less".into(),
        taken => taken.join(", "),
    };
    let (node, kind, bytes) = (row.node, row.backing.name(), Bytes(row.bytes));
    let text = format!("node {node}, {kind}, {bytes}: {verdict} ({taken})");
    hanging("  ", &text)
}

/// Formats one line for each node.
fn fabric(rows: &[Fabric]) -> String {
    let nodes = grouped(rows.iter().map(|row| (row.node, row.gpu)));
    let line = |(node, gpus): &(i32, Vec<i32>)| {
        format!(
            "  node {node}, GPU {}: exported, imported, proved\n",
            ranges(gpus)
        )
    };
    nodes.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_share_all_of_the_time() {
        let mut left = Duration::from_secs(100);
        let limits = SHARES.map(|(part, _)| {
            let limit = limit(part, left);
            left -= limit;
            limit.as_secs()
        });
        assert_eq!(limits, [25, 25, 10, 20, 15, 5]);
        assert_eq!(left, Duration::ZERO);
        let unlimited = SHARES.map(|(part, _)| limit(part, Duration::MAX));
        assert!(unlimited.iter().all(|limit| *limit > Duration::ZERO));
    }
}
