//! Call counts and injected faults.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::{Call, Code, lock};

/// Identifies an injected fault, to cancel it. A fault is removed once it has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FaultId(u64);

/// Counts every call of the simulator and injects faults.
#[derive(Debug)]
pub(super) struct Faults {
    counts: Box<[AtomicU64]>,
    /// The number of rules, readable without the lock.
    armed: AtomicUsize,
    next: AtomicU64,
    rules: Mutex<Vec<Rule>>,
}

#[derive(Debug)]
struct Rule {
    id: FaultId,
    call: Call,
    /// Uses until the fault happens; 1: at the next.
    left: u64,
    code: Code,
}

impl Faults {
    pub(super) fn new() -> Self {
        Self {
            counts: Call::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            armed: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            rules: Mutex::default(),
        }
    }

    /// Counts a call, and returns the fault that was injected into it.
    pub(super) fn enter(&self, call: Call) -> Result<(), Code> {
        self.counts[call as usize].fetch_add(1, Ordering::Relaxed);
        if self.armed.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let mut rules = self.rules();
        let mut hit = None;
        rules.retain_mut(|rule| {
            // One use fails in one way; a second fault for the same use waits for the next.
            if rule.call == call && !(rule.left == 1 && hit.is_some()) {
                rule.left -= 1;
                if rule.left == 0 {
                    hit = Some(rule.code);
                }
            }
            rule.left > 0
        });
        self.armed.store(rules.len(), Ordering::Release);
        hit.map_or(Ok(()), Err)
    }

    pub(super) fn add(&self, call: Call, nth: u64, code: Code) -> FaultId {
        let id = FaultId(self.next.fetch_add(1, Ordering::Relaxed));
        let mut rules = self.rules();
        rules.push(Rule {
            id,
            call,
            left: nth.max(1),
            code,
        });
        self.armed.store(rules.len(), Ordering::Release);
        id
    }

    /// Removes the faults that `which` selects; returns their number.
    pub(super) fn remove(&self, which: impl Fn(FaultId) -> bool) -> usize {
        let mut rules = self.rules();
        let before = rules.len();
        rules.retain(|rule| !which(rule.id));
        self.armed.store(rules.len(), Ordering::Release);
        before - rules.len()
    }

    pub(super) fn counts(&self) -> BTreeMap<Call, u64> {
        let counts = self.counts.iter().map(|n| n.load(Ordering::Relaxed));
        Call::ALL
            .iter()
            .copied()
            .zip(counts)
            .filter(|&(_, count)| count > 0)
            .collect()
    }

    pub(super) fn count(&self, call: Call) -> u64 {
        self.counts[call as usize].load(Ordering::Relaxed)
    }

    pub(super) fn reset_counts(&self) {
        for count in &self.counts {
            count.store(0, Ordering::Relaxed);
        }
    }

    fn rules(&self) -> std::sync::MutexGuard<'_, Vec<Rule>> {
        lock(&self.rules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_happens_once_at_its_use() {
        let faults = Faults::new();
        faults.add(Call::MemMap, 2, Code(4242));
        assert_eq!(faults.enter(Call::MemMap), Ok(()));
        assert_eq!(faults.enter(Call::MemCreate), Ok(()));
        assert_eq!(faults.enter(Call::MemMap), Err(Code(4242)));
        assert_eq!(faults.enter(Call::MemMap), Ok(()));
        assert_eq!(faults.count(Call::MemMap), 3);
        assert_eq!(faults.counts().len(), 2);
        faults.reset_counts();
        assert!(faults.counts().is_empty());
    }

    #[test]
    fn a_fault_can_be_taken_back() {
        let faults = Faults::new();
        let first = faults.add(Call::MemMap, 1, Code::OUT_OF_MEMORY);
        faults.add(Call::MemMap, 1, Code::NOT_PERMITTED);
        assert_eq!(faults.remove(|id| id == first), 1);
        assert_eq!(faults.remove(|id| id == first), 0);
        faults.add(Call::MemMap, 1, Code::NOT_SUPPORTED);
        assert_eq!(faults.enter(Call::MemMap), Err(Code::NOT_PERMITTED));
        assert_eq!(faults.enter(Call::MemMap), Err(Code::NOT_SUPPORTED));
        assert_eq!(faults.enter(Call::MemMap), Ok(()));
    }
}
