//! Host NUMA nodes, and sets of CPUs in the kernel's format: `0-71,144`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::driver::{Location, NodeId};
use crate::{Error, Result};

/// A host NUMA node: a CPU socket's memory, or memory without CPUs (CXL) that does not belong to a GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NumaNode {
    /// The operating system's id, which is also the id of [`Location::HostNuma`].
    pub id: NodeId,
    /// The CPUs of the node; none if [unknown](Self::cpus_known).
    pub cpus: CpuSet,
    /// Whether the node's CPUs are known. An XML of hwloc gives a node without CPUs those of its neighbour, and does
    /// not always say which of the two has them.
    #[serde(skip_serializing_if = "is_true")]
    pub cpus_known: bool,
    /// Whether this process may allocate on the node (`cpuset.mems`), when the topology was read; `true` if unknown, and
    /// on other machines. [`Placement::Spread`](super::Placement::Spread) leaves out nodes that are not allowed.
    ///
    /// Source: `Mems_allowed_list`.
    #[serde(skip_serializing_if = "is_true")]
    pub allowed: bool,
    /// The node's memory in bytes; 0 if unknown.
    pub memory_total: u64,
    /// Bytes that an allocation could get when the topology was read: free pages and page cache that can be
    /// dropped, limited by the control group. `None`: unknown.
    pub memory_free: Option<u64>,
    /// The distance to each host node, including this one: 10 is local, as firmware reports it. Empty if
    /// unknown.
    pub distances: BTreeMap<NodeId, u32>,
    /// The GPUs for which this node is the nearest, by ordinal.
    pub gpus: Vec<i32>,
}

impl NumaNode {
    pub(super) fn new(id: NodeId) -> Self {
        Self {
            id,
            cpus: CpuSet::default(),
            cpus_known: true,
            allowed: true,
            memory_total: 0,
            memory_free: None,
            distances: BTreeMap::new(),
            gpus: Vec::new(),
        }
    }

    /// Returns whether the node is known to have no CPUs.
    pub(crate) fn lacks_cpus(&self) -> bool {
        self.cpus_known && self.cpus.is_empty()
    }
}

const fn is_true(value: &bool) -> bool {
    *value
}

impl From<&NumaNode> for Location {
    fn from(node: &NumaNode) -> Self {
        node.id.into()
    }
}

/// Adds a value to an ascending list, unless the list has it. The compiler makes much less code of this than of a sort, and the
/// lists here are short.
pub(crate) fn add_once<T: Ord>(list: &mut Vec<T>, value: T) {
    if let Err(at) = list.binary_search(&value) {
        list.insert(at, value);
    }
}

/// The highest CPU number accepted from text: the kernel's own limit is 8192 CPUs.
const MAX_CPU: u32 = 65_535;

/// A set of logical CPUs, by the operating system's numbers.
///
/// Formatted and parsed in the kernel's list format: `0-71,144-215`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(Vec<u32>);

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
        self.0.binary_search(&cpu).is_ok()
    }

    /// Returns the CPUs that are in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        let both = self.iter().filter(|cpu| other.contains(*cpu));
        Self(both.collect())
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        let mut cpus = Vec::from_iter(cpus);
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = |run: &[u32]| match run {
            [first, .., last] => format!("{first}-{last}"),
            ids => ids.iter().map(u32::to_string).collect(),
        };
        let runs = self
            .0
            .chunk_by(|one, next| one.checked_add(1) == Some(*next));
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
        let mut cpus = Vec::new();
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
            // Each CPU once: a text may name the largest range many times.
            cpus.retain(|cpu| !(first..=last).contains(cpu));
            cpus.extend(first..=last);
        }
        Ok(cpus.into_iter().collect())
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
