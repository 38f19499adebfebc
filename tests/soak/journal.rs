//! The record of a soak: counts for the summary, and violations, which fail the soak.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

/// Shared by all threads of the soak.
#[derive(Debug, Default)]
pub struct Journal {
    counts: Mutex<BTreeMap<String, u64>>,
    violations: Mutex<Vec<String>>,
}

impl Journal {
    /// Counts something.
    pub fn count(&self, what: impl Into<String>) {
        self.add(what, 1);
    }

    /// Counts something several times.
    pub fn add(&self, what: impl Into<String>, times: u64) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(what.into()).or_default() += times;
    }

    /// How often something was counted, summed over all names with this beginning.
    pub fn counted(&self, prefix: &str) -> u64 {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let matching = counts.iter().filter(|(name, _)| name.starts_with(prefix));
        matching.map(|(_, count)| count).sum()
    }

    /// Notes a violation.
    pub fn violation(&self, text: impl Into<String>) {
        let text = text.into();
        say(&format!("VIOLATION: {text}"));
        let mut violations = self
            .violations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // One cause may show thousands of times.
        if violations.len() < 100 {
            violations.push(text);
        }
    }

    /// Returns the violations.
    pub fn violations(&self) -> Vec<String> {
        let violations = self.violations.lock();
        violations.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The counts as lines.
    pub fn summary(&self) -> String {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = counts
            .iter()
            .map(|(name, count)| format!("{count:>10}  {name}\n"));
        lines.collect()
    }
}

/// Prints a line that libtest does not capture: a long run shows how far it is.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
