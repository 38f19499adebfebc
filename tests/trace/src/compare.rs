//! Where two records of one sequence differ.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use super::addr::Memory;
use super::slots::SlotRef;
use super::{Op, Outcome, Record, Sequence, Value};
use egmem::driver::Code;

/// An operation that was answered differently. Its `Display` shows the operations before it that
/// touched the same slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The sequence's seed.
    pub seed: u64,
    /// The operation's index.
    pub index: usize,
    /// The operation.
    pub op: Op,
    /// The answer in the first record.
    pub expected: Outcome,
    /// The answer in the second record.
    pub found: Outcome,
    /// The operations before it that it may depend on, with the answers of the first record.
    pub history: Vec<(usize, Op, Outcome)>,
}

/// The differences between two records of `sequence`, in order; those after the first are often
/// its consequences.
///
/// Records that are too short count as having skipped the rest.
pub fn compare(sequence: &Sequence, expected: &Record, found: &Record) -> Vec<Difference> {
    let answer = |record: &Record, i: usize| match record.outcomes.get(i) {
        Some(outcome) => outcome.clone(),
        None => Outcome::Skipped,
    };
    sequence
        .ops
        .iter()
        .enumerate()
        .filter_map(|(index, op)| {
            let (expected_here, found_here) = (answer(expected, index), answer(found, index));
            if agree(op, &expected_here, &found_here) {
                return None;
            }
            Some(Difference {
                seed: sequence.seed,
                index,
                op: op.clone(),
                expected: expected_here,
                found: found_here,
                history: history(sequence, index)
                    .into_iter()
                    .map(|i| (i, sequence.ops[i].clone(), answer(expected, i)))
                    .collect(),
            })
        })
        .collect()
}

fn agree(op: &Op, expected: &Outcome, found: &Outcome) -> bool {
    match (expected, found) {
        (Outcome::Done(_), Outcome::Done(_)) if op.output_is_informational() => true,
        _ => expected == found,
    }
}

/// The indices of the operations before `index` that the one there may depend on: those that touch
/// the same slots, and in turn those that these depend on.
///
/// # Panics
/// If `index` is out of range.
pub fn history(sequence: &Sequence, index: usize) -> Vec<usize> {
    let carries = |slot: &SlotRef| {
        // Streams and null addresses tie everything to everything.
        !matches!(slot, SlotRef::Stream(_) | SlotRef::Memory(Memory::Nowhere))
    };
    let mut slots: HashSet<SlotRef> = sequence.ops[index].slots().into_iter().collect();
    let mut found = Vec::new();
    for (i, op) in sequence.ops[..index].iter().enumerate().rev() {
        let touched = op.slots();
        if touched.iter().any(|slot| slots.contains(slot)) {
            slots.extend(touched.into_iter().filter(carries));
            found.push(i);
        }
    }
    found.reverse();
    found
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(values) => {
                f.write_str("success")?;
                values.iter().try_for_each(|value| write!(f, " {value}"))
            }
            Self::Failed(code) => fmt::Display::fmt(&Code(*code), f),
            Self::Refused(error) => write!(f, "refused: {error}"),
            Self::Skipped => f.write_str("skipped"),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => fmt::Display::fmt(number, f),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "sequence {}, operation {}:", self.seed, self.index)?;
        for (index, op, outcome) in &self.history {
            writeln!(f, "  {index:>4} {op:?} -> {outcome}")?;
        }
        writeln!(f, "  {:>4} {:?}", self.index, self.op)?;
        writeln!(f, "       expected: {}", self.expected)?;
        write!(f, "       found:    {}", self.found)
    }
}

/// The differences of many sequences, gathered by how they differ.
#[derive(Clone, Debug, Default)]
pub struct Report {
    sequences: usize,
    operations: usize,
    /// Each sequence's first difference.
    first: Vec<Difference>,
    later: usize,
}

impl Report {
    /// Adds what [`compare`] found in one sequence of `operations` operations.
    pub fn add(&mut self, operations: usize, differences: Vec<Difference>) {
        self.sequences += 1;
        self.operations += operations;
        self.later += differences.len().saturating_sub(1);
        self.first.extend(differences.into_iter().next());
    }

    /// Whether nothing differs.
    pub fn is_clean(&self) -> bool {
        self.first.is_empty()
    }
}

impl fmt::Display for Report {
    /// Counts by operation and answers, the most frequent first, each with the example that has
    /// the shortest history.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} sequences, {} operations: {} sequences differ",
            self.sequences,
            self.operations,
            self.first.len()
        )?;
        let mut groups: BTreeMap<_, Vec<&Difference>> = BTreeMap::new();
        for difference in &self.first {
            let short = |outcome: &Outcome| match outcome {
                // Outputs vary: one group for all of them unless only they differ.
                Outcome::Done(_)
                    if !(difference.expected.is_done() && difference.found.is_done()) =>
                {
                    "success".to_string()
                }
                other => other.to_string(),
            };
            groups
                .entry((
                    difference.op.kind(),
                    short(&difference.expected),
                    short(&difference.found),
                ))
                .or_default()
                .push(difference);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(_, members)| std::cmp::Reverse(members.len()));
        for ((kind, expected, found), members) in &groups {
            write!(
                f,
                "\n{:>5} × {kind}: expected {expected}, found {found}",
                members.len()
            )?;
        }
        for (_, members) in &groups {
            if let Some(example) = members.iter().min_by_key(|d| d.history.len()) {
                write!(f, "\n\n{example}")?;
            }
        }
        if self.later > 0 {
            write!(f, "\n\n({} later differences not shown)", self.later)?;
        }
        Ok(())
    }
}
