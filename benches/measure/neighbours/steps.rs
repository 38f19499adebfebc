//! When each driver call of a growth began and ended, and which of them the neighbours' long calls coincide with.

use std::time::Duration;

use serde::Serialize;

use crate::neighbour::Waits;

/// A kind of driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `cuMemCreate`
    Create,
    /// `cuMemMap`
    Map,
    /// `cuMemSetAccess`
    Grant,
    /// `cuMemUnmap`
    Unmap,
    /// `cuMemRelease`
    Release,
    /// Pauses.
    Rest,
}

pub const KINDS: [Kind; 6] = [
    Kind::Create,
    Kind::Map,
    Kind::Grant,
    Kind::Unmap,
    Kind::Release,
    Kind::Rest,
];

impl Kind {
    /// Returns the name that the table shows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Map => "map",
            Self::Grant => "set access",
            Self::Unmap => "unmap",
            Self::Release => "release",
            Self::Rest => "rest",
        }
    }
}

/// The machine's monotonic clock in nanoseconds: the same for all processes.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// All calls of one growth, in order.
#[derive(Default)]
pub struct Steps(Vec<(Kind, u64, u64)>);

impl Steps {
    /// Makes a call and notes when.
    pub fn time<R>(&mut self, kind: Kind, call: impl FnOnce() -> R) -> R {
        let began = now();
        let result = call();
        self.0.push((kind, began, now()));
        result
    }

    /// Returns the calls that began since `since`.
    pub fn since(&self, since: u64) -> impl Iterator<Item = &(Kind, u64, u64)> {
        self.0.iter().filter(move |&&(_, began, _)| began >= since)
    }

    /// Returns the latency of each kind of call and the delays that it caused, for the calls that began since
    /// `since`.
    pub fn blame(&self, since: u64, waits: &[Waits]) -> Vec<Blame> {
        let blame = |kind| {
            let of_kind = || self.since(since).filter(move |&&(of, ..)| of == kind);
            let mut ms: Vec<f64> = of_kind()
                .map(|&(_, began, ended)| (ended - began) as f64 / 1e6)
                .collect();
            ms.sort_by(f64::total_cmp);
            let held = |waits: &Waits| {
                let long = waits.long.iter();
                let held = long.map(|&(began, ended)| {
                    let parts = of_kind().map(|&(_, from, to)| overlap((began, ended), (from, to)));
                    parts.sum::<u64>()
                });
                Duration::from_nanos(held.sum()).as_secs_f64() * 1e3
            };
            Blame {
                kind,
                calls: ms.len(),
                p50: ms.get(ms.len() / 2).copied().unwrap_or(0.0),
                max: ms.last().copied().unwrap_or(0.0),
                all: ms.iter().sum(),
                held: waits.iter().map(held).collect(),
            }
        };
        let all = KINDS.into_iter().map(blame);
        all.filter(|blame| blame.calls > 0).collect()
    }
}

fn overlap(a: (u64, u64), b: (u64, u64)) -> u64 {
    a.1.min(b.1).saturating_sub(a.0.max(b.0))
}

/// The latency of one kind of call, in milliseconds, and how long it delayed the neighbours.
#[derive(Clone, Debug, Serialize)]
pub struct Blame {
    pub kind: Kind,
    pub calls: usize,
    pub p50: f64,
    pub max: f64,
    pub all: f64,
    /// Of each neighbour, the milliseconds of its [long](Waits::long) calls during calls of this kind.
    pub held: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_calls_are_laid_to_the_steps_that_they_overlap() {
        let steps = Steps(vec![
            (Kind::Create, 0, 10_000_000),
            (Kind::Create, 20_000_000, 50_000_000),
            (Kind::Grant, 50_000_000, 60_000_000),
            (Kind::Unmap, 70_000_000, 80_000_000),
        ]);
        let waits = Waits {
            long: vec![(45_000_000, 58_000_000), (75_000_000, 90_000_000)],
            ..Waits::default()
        };
        let blame = steps.blame(15_000_000, &[waits]);
        let seen: Vec<_> = blame
            .iter()
            .map(|b| (b.kind, b.calls, b.max, b.held[0]))
            .collect();
        assert_eq!(
            seen,
            [
                (Kind::Create, 1, 30.0, 5.0),
                (Kind::Grant, 1, 10.0, 8.0),
                (Kind::Unmap, 1, 10.0, 5.0)
            ]
        );
    }
}
