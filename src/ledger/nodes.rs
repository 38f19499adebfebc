//! The use of a host node's memory, as far as the kernel reports it.

use serde::{Deserialize, Serialize};

use crate::driver::NodeId;

/// A host node's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeUse {
    /// The node.
    pub node: NodeId,
    /// All of its memory in bytes.
    pub total: u64,
    /// The bytes in use.
    pub used: u64,
    /// The bytes that the kernel accounts for: page cache, programs' plain memory, the kernel's own, huge pages. `None`: it
    /// does not say.
    pub kernel: Option<u64>,
    /// The bytes in the ledgers.
    pub accounted: u64,
    /// The bytes in use that neither the kernel nor a ledger accounts for: memory that drivers hold for other programs.
    pub unaccounted: Option<u64>,
}

/// The values of `/sys/devices/system/node/node<N>/meminfo`, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Meminfo {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) kernel: u64,
}

impl Meminfo {
    /// Reads a node's file.
    pub(crate) fn read(node: NodeId) -> Option<Self> {
        let path = format!("/sys/devices/system/node/node{}/meminfo", node.0);
        let huge = std::fs::read_to_string("/proc/meminfo").ok()?;
        Self::parse(&std::fs::read_to_string(path).ok()?, huge_page(&huge))
    }

    /// Parses lines of the form `Node 0 MemFree: 1234 kB`, where huge pages are a count.
    fn parse(text: &str, huge_page: u64) -> Option<Self> {
        let (mut found, mut total) = (Self::default(), None);
        for line in text.lines() {
            let mut words = line.split_whitespace().skip(2);
            let (Some(name), Some(number)) = (words.next(), words.next()) else {
                continue;
            };
            let Ok(number) = number.parse::<u64>() else {
                continue;
            };
            let bytes = number.saturating_mul(1024);
            match name.trim_end_matches(':') {
                "MemTotal" => total = Some(bytes),
                "MemFree" => found.free = bytes,
                "FilePages" | "AnonPages" | "Slab" | "PageTables" | "KernelStack" => {
                    found.kernel = found.kernel.saturating_add(bytes);
                }
                "HugePages_Total" => {
                    found.kernel = found
                        .kernel
                        .saturating_add(number.saturating_mul(huge_page));
                }
                _ => {}
            }
        }
        found.total = total?;
        Some(found)
    }
}

/// Returns the size of the pages that `HugePages_Total` counts, in bytes.
fn huge_page(meminfo: &str) -> u64 {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"));
    let size = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    size.map_or(0, |kib| kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nodes_memory_is_read() {
        let text = "\nNode 0 MemTotal:       1000 kB\nNode 0 MemFree:         100 kB\n\
                    Node 0 FilePages:       200 kB\nNode 0 AnonPages:       50 kB\n\
                    Node 0 Mapped:          30 kB\nNode 0 HugePages_Total:     2\nnonsense\n";
        let found = Meminfo::parse(text, huge_page("x\nHugepagesize:       16 kB\n")).unwrap();
        let kib = |count: u64| count * 1024;
        let expected = Meminfo {
            total: kib(1000),
            free: kib(100),
            kernel: kib(282),
        };
        assert_eq!(found, expected);
        assert_eq!(Meminfo::parse("Node 0 MemFree: 1 kB", 0), None);
    }
}
