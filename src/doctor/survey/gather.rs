//! Makes a survey: the doctor's findings, then each part in a child process with its share of the time.

use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::page::page;
use super::private::Private;
use super::rows::{Fabric, Figure, Part, Pinned, Placed, Problem, Section};
use crate::measure::{BandwidthRow, Proof};
use crate::part::{Ask, Said};
use crate::text::to_text;
use crate::{Children, Error, Reason, Report, Result};

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
    pub(super) findings: String,
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
        let mut doctor = as_json(report)?;
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
        let mut said = Vec::new();
        if let Err(reason) = self.try_run(part, &mut said) {
            said.push(Said::Problem(Problem::of_part(reason)));
        }
        let mut section = Section {
            seconds: match self.report.simulated {
                Some(_) => Figure::Simulated,
                None => Figure::Measured(began.elapsed().as_secs_f64()),
            },
            rows: Vec::new(),
            problems: Vec::new(),
        };
        for said in said {
            self.take(said, &mut section);
        }
        section
    }

    fn try_run(&mut self, part: Part, said: &mut Vec<Said>) -> std::result::Result<(), Reason> {
        if let Some(problem) = &self.report.driver.problem {
            return Err(problem.clone());
        }
        if self.gpus.is_empty() {
            return Err(Error::NoSuchGpu { gpu: 0, count: 0 }.into());
        }
        let limit = limit(part, self.until.saturating_duration_since(Instant::now()));
        let gpus = self.gpus.clone();
        let ask = Ask { part, gpus };
        self.children
            .run_part(&ask, limit, |heard| said.push(heard))
    }

    /// Adds what a child said, cleaned. A row of another form is a problem.
    fn take<R: DeserializeOwned>(&self, said: Said, section: &mut Section<R>) {
        let row = match said {
            Said::Row(mut row) => {
                self.private.clean_json(&mut row);
                serde_json::from_value(row)
            }
            Said::Problem(problem) => {
                let mut problem = problem;
                for text in [
                    &mut problem.what,
                    &mut problem.reason.message,
                    &mut problem.reason.remedy,
                ] {
                    *text = self.private.clean(text);
                }
                return section.problems.push(problem);
            }
            Said::End => return,
        };
        match row {
            Ok(row) => section.rows.push(row),
            Err(error) => {
                let error = Error::invalid("row", error.to_string());
                section.problems.push(Problem::of_part(error.into()));
            }
        }
    }
}

/// Returns a part's share of the time that is left.
fn limit(part: Part, left: Duration) -> Duration {
    let rest = SHARES.iter().skip_while(|(other, _)| *other != part);
    let (own, all) = rest.fold((None, 0), |(own, all), &(_, share)| {
        (own.or(Some(share)), all + share)
    });
    left * own.unwrap_or(1) / all.max(1)
}

fn as_json(report: &Report) -> Result<Value> {
    serde_json::to_value(report).map_err(|error| Error::invalid("report", error.to_string()))
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
    }
}
