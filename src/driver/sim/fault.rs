//! How calls inside the simulator fail: their answers, call counts and injected faults.

use std::collections::BTreeMap;
use std::io;

use crate::{Call, Code, DriverError, Error};

/// The result of a call inside the simulator.
pub(super) type Answer<T = ()> = Result<T, Fail>;

/// Why a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fail {
    /// With this code.
    Code(Code),
    /// The device's context is lost.
    Lost { device: i32, code: Code },
}

impl Fail {
    /// Returns the error that `call` fails with.
    pub fn of(self, call: Call) -> Error {
        match self {
            Self::Code(code) => Error::driver(call, code),
            Self::Lost { device, code } => {
                let source = DriverError { call, code };
                Error::ContextLost { device, source }
            }
        }
    }
}

/// Returns the result of a call.
pub(super) fn answered<T>(call: Call, answer: Answer<T>) -> crate::Result<T> {
    answer.map_err(|fail| fail.of(call))
}

impl From<Code> for Fail {
    fn from(code: Code) -> Self {
        Self::Code(code)
    }
}

pub fn fail<T>(code: Code) -> Answer<T> {
    Err(Fail::Code(code))
}

/// The operating system has run out of a resource: of memory, or of file descriptors, of which each physical memory takes one.
impl From<io::Error> for Fail {
    fn from(error: io::Error) -> Self {
        Self::Code(match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Code::OPERATING_SYSTEM,
            _ => Code::OUT_OF_MEMORY,
        })
    }
}

/// Counts every call of the simulator and injects faults.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pub counts: BTreeMap<Call, u64>,
    rules: Vec<Rule>,
}

#[derive(Debug)]
struct Rule {
    call: Call,
    /// Uses until the fault happens; 1: at the next.
    left: u64,
    code: Code,
}

impl Faults {
    /// Counts a call, and returns the fault that was injected into it.
    pub fn enter(&mut self, call: Call) -> Result<(), Code> {
        *self.counts.entry(call).or_default() += 1;
        let mut hit = None;
        self.rules.retain_mut(|rule| {
            // One use fails in one way; a second fault for the same use waits for the next.
            if rule.call == call && !(rule.left == 1 && hit.is_some()) {
                rule.left -= 1;
                if rule.left == 0 {
                    hit = Some(rule.code);
                }
            }
            rule.left > 0
        });
        hit.map_or(Ok(()), Err)
    }

    pub fn add(&mut self, call: Call, nth: u64, code: Code) {
        let left = nth.max(1);
        self.rules.push(Rule { call, left, code });
    }

    /// Removes the faults that have not happened; returns their number.
    pub fn clear(&mut self) -> usize {
        std::mem::take(&mut self.rules).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_happens_once_at_its_use() {
        let mut faults = Faults::default();
        faults.add(Call::MemMap, 2, Code(4242));
        assert_eq!(faults.enter(Call::MemMap), Ok(()));
        assert_eq!(faults.enter(Call::MemCreate), Ok(()));
        assert_eq!(faults.enter(Call::MemMap), Err(Code(4242)));
        assert_eq!(faults.enter(Call::MemMap), Ok(()));
        assert_eq!(faults.counts[&Call::MemMap], 3);
        assert_eq!(faults.counts.len(), 2);
    }

    #[test]
    fn faults_of_one_use_follow_each_other_and_can_be_taken_back() {
        let mut faults = Faults::default();
        faults.add(Call::MemMap, 1, Code::NOT_PERMITTED);
        faults.add(Call::MemMap, 1, Code::NOT_SUPPORTED);
        faults.add(Call::MemMap, 3, Code::OUT_OF_MEMORY);
        assert_eq!(faults.enter(Call::MemMap), Err(Code::NOT_PERMITTED));
        assert_eq!(faults.enter(Call::MemMap), Err(Code::NOT_SUPPORTED));
        assert_eq!((faults.clear(), faults.clear()), (1, 0));
        assert_eq!(faults.enter(Call::MemMap), Ok(()));
    }
}
