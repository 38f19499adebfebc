//! The report of an end, for people and for programs.

use std::io::Write;

use egmem::memory::{CpuView, Memory};
use egmem::proof::{self, Prover};
use egmem::share::Identity;
use egmem::size::Bytes;
use egmem::{Error, Result};
use serde::Serialize;

/// The report of an end.
#[derive(Debug, Serialize)]
pub struct Report {
    pub role: &'static str,
    pub backend: String,
    pub simulated: bool,
    pub address: String,
    /// How the two ends know each other: the other's name, and this end's.
    pub other: String,
    pub security: &'static str,
    pub name: String,
    pub bytes: u64,
    pub location: String,
    pub identity: String,
    /// The lease, from the end that granted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// The type of handle, or the available types.
    pub handles: String,
    pub why: String,
    /// The probe's word, to and fro.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe: Option<String>,
    pub steps: Vec<Step>,
    #[serde(skip)]
    pub json: bool,
}

/// A write or a check.
#[derive(Debug, Serialize)]
pub struct Step {
    pub what: String,
    pub by: String,
    pub verified: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Report {
    /// Whether there was something to verify, and all of it was.
    pub fn verified(&self) -> bool {
        !self.steps.is_empty() && self.steps.iter().all(|step| step.verified)
    }

    /// Prints it on standard output.
    pub fn print(&self) -> Result<()> {
        let text = if self.json {
            serde_json::to_string_pretty(self)
                .map_err(|error| Error::invalid("report", error.to_string()))?
        } else {
            self.text()
        };
        // In one piece: the other end may write to the same pipe meanwhile.
        let written = std::io::stdout().write_all((text + "\n").as_bytes());
        written.map_err(|error| Error::system("writing to standard output", &error))
    }

    fn text(&self) -> String {
        let simulated = if self.simulated { "SIMULATED " } else { "" };
        let mut text = format!(
            "{simulated}{}: {} of '{}' at {}, {}, {}\n",
            self.role,
            Bytes(self.bytes),
            self.name,
            self.location,
            self.address,
            self.security
        );
        let mut row = |label: &str, value: &str| text.push_str(&format!("  {label:<9} {value}\n"));
        row("backend", &self.backend);
        row("other end", &self.other);
        row("identity", &self.identity);
        if let Some(lease) = self.lease {
            row("lease", &lease.to_string());
        }
        row("handles", &format!("{}: {}", self.handles, self.why));
        if let Some(probe) = &self.probe {
            row("probe", probe);
        }
        for step in &self.steps {
            let outcome = match (&step.reason, step.verified) {
                (Some(reason), _) => reason.as_str(),
                (None, true) => "right",
                (None, false) => "WRONG",
            };
            row(&step.by, &format!("{}: {outcome}", step.what));
        }
        let verdict = if self.verified() {
            "verified"
        } else {
            "NOT verified"
        };
        text + "  " + verdict
    }
}

/// The pattern that is in the memory at a point of the play. The memory's identity is in it, so that
/// bytes which an earlier run left are wrong.
pub fn seed(identity: &Identity, point: u64) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&identity.instance.as_bytes()[..8]);
    u64::from_be_bytes(first)
        ^ identity.allocation.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ point.rotate_right(8)
}

/// One end's checks and writes of a memory, in order.
pub struct Play<'a, M> {
    pub memory: &'a M,
    /// The CPU's window; an importer's CPU may have none on another node's memory.
    pub cpu: Option<CpuView<'a>>,
    pub prover: Prover,
    pub identity: Identity,
    pub steps: Vec<Step>,
}

impl<M: Memory> Play<'_, M> {
    /// The CPU checks the pattern of a point.
    pub fn cpu_checks(&mut self, whose: &str, point: u64) {
        let seed = seed(&self.identity, point);
        let outcome = self.cpu.as_ref().map(|cpu| proof::check_pattern(cpu, seed));
        self.note(format!("read {whose}"), "CPU".into(), outcome);
    }

    /// Returns whether the CPU sees the pattern of a point now.
    pub fn has_pattern(&self, point: u64) -> bool {
        let seed = seed(&self.identity, point);
        let check = |cpu| proof::check_pattern(cpu, seed).is_ok();
        self.cpu.as_ref().is_some_and(check)
    }

    /// The CPU writes the pattern of a point.
    pub fn cpu_writes(&mut self, point: u64) {
        let seed = seed(&self.identity, point);
        let outcome = match &self.cpu {
            Some(cpu) => proof::write_pattern(cpu, seed),
            // The play must go on, and the GPU can.
            None => self.prover.write(self.memory, seed),
        };
        let by = if self.cpu.is_some() {
            "CPU".into()
        } else {
            self.gpu()
        };
        self.note("wrote a pattern".into(), by, Some(outcome));
    }

    /// The GPU checks the pattern of a point and writes that of the next.
    pub fn gpu_rewrites(&mut self, whose: &str, point: u64) {
        let (expected, next) = (seed(&self.identity, point), seed(&self.identity, point + 1));
        let outcome = self.prover.check_rewrite(self.memory, expected, next);
        let by = self.gpu();
        self.note(format!("read {whose} and wrote another"), by, Some(outcome));
    }

    fn gpu(&self) -> String {
        format!("GPU {}", self.prover.stream().device())
    }

    fn note(&mut self, what: String, by: String, outcome: Option<Result<()>>) {
        let (verified, reason) = match outcome {
            Some(Ok(())) => (true, None),
            Some(Err(error)) => (false, Some(error.to_string())),
            None => (
                true,
                Some("out of this CPU's reach, left to the GPU".into()),
            ),
        };
        self.steps.push(Step {
            what,
            by,
            verified,
            reason,
        });
    }
}
