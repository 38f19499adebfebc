//! CPU sets in the kernel's format: `0-71,144`.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The highest CPU number accepted from text: the kernel's own limit is 8192 CPUs.
const MAX_CPU: u32 = 65_535;

/// A set of logical CPUs, by the operating system's numbers.
///
/// Formatted and parsed in the kernel's list format: `0-71,144-215`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// Iterates over the CPUs, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Returns the number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether `cpu` is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Returns the CPUs that are in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus: Vec<u32> = self.iter().collect();
        let range = |run: &[u32]| match run {
            [first, .., last] => format!("{first}-{last}"),
            ids => ids.iter().map(u32::to_string).collect(),
        };
        let runs = cpus.chunk_by(|one, next| one.checked_add(1) == Some(*next));
        f.pad(&runs.map(range).collect::<Vec<_>>().join(","))
    }
}

impl std::str::FromStr for CpuSet {
    type Err = Error;

    /// Parses the kernel's list format; an empty text is the empty set.
    fn from_str(text: &str) -> Result<Self> {
        let bad =
            |part: &str| Error::invalid("CPU list", format!("'{part}' is not a CPU or a range"));
        let number = |part: &str| match part.trim().parse::<u32>() {
            Ok(cpu) if cpu <= MAX_CPU => Ok(cpu),
            _ => Err(bad(part)),
        };
        let mut cpus = BTreeSet::new();
        for part in text
            .trim()
            .split(',')
            .filter(|part| !part.trim().is_empty())
        {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad(part));
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl TryFrom<String> for CpuSet {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<CpuSet> for String {
    fn from(cpus: CpuSet) -> Self {
        cpus.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_reads_back_from_its_text(cpus in proptest::collection::btree_set(0_u32..300, 0..80)) {
            let set: CpuSet = cpus.iter().copied().collect();
            prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set.clone());
            prop_assert_eq!(set.iter().collect::<Vec<_>>(), cpus.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[-0-9, a]{0,30}") {
            let _ = text.parse::<CpuSet>();
        }
    }

    #[test]
    fn lists_are_short() {
        assert_eq!(
            "0-2,3,7,9-9\n".parse::<CpuSet>().unwrap().to_string(),
            "0-3,7,9"
        );
        assert_eq!("".parse::<CpuSet>().unwrap(), CpuSet::default());
        assert_eq!("0-71".parse::<CpuSet>().unwrap().len(), 72);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["a", "3-1", "-1", "1--2", "99999999", "0-4294967295"] {
            assert!(text.parse::<CpuSet>().is_err(), "{text}");
        }
    }
}
