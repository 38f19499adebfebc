//! The Linux kernel's view of NUMA nodes, free memory and PCI locality, under `/sys` and `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::{CpuSet, NumaNode};
use crate::driver::NodeId;
use crate::host::status_field;

/// The kernel's files, from a root: `/`, or a test's folder.
#[derive(Clone, Debug)]
pub struct Kernel {
    root: PathBuf,
}

impl Kernel {
    /// Returns this machine's kernel.
    pub fn here() -> Self {
        Self::at("/")
    }

    /// Returns the kernel whose files lie under `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the text of a file, if it can be read.
    pub fn read(&self, path: &str) -> Option<String> {
        // As bytes first: a file of the kernel need not be UTF-8.
        Some(String::from_utf8_lossy(&self.read_bytes(path)?).into_owned())
    }

    /// Returns the number in a file, if it can be read and has nothing else.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.trim().parse().ok()
    }

    /// Returns the bytes of a file, if it can be read.
    pub(crate) fn read_bytes(&self, path: &str) -> Option<Vec<u8>> {
        std::fs::read(self.path(path)).ok()
    }

    /// Returns the location of a kernel path under the root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns the names in a folder, sorted; none if there is no folder.
    pub fn list(&self, path: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(path)) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// Returns the nodes that are memory of NVIDIA GPUs, even if CUDA does not show these GPUs.
    ///
    /// Source: the kernel module's `/proc/driver/nvidia/gpus/*/numa_status`, which hwloc reads too.
    pub fn gpu_memory_nodes(&self) -> BTreeSet<NodeId> {
        let gpus = "/proc/driver/nvidia/gpus";
        self.list(gpus)
            .iter()
            .filter_map(|gpu| self.read(&format!("{gpus}/{gpu}/numa_status")))
            .filter_map(|text| numa_status_node(&text))
            .collect()
    }

    /// Returns the host nodes: those with memory or CPUs, without the `gpu_memory` nodes.
    ///
    /// A kernel without NUMA has one memory, which every API calls node 0.
    pub(crate) fn nodes(&self, gpu_memory: &BTreeSet<NodeId>) -> Vec<NumaNode> {
        let online: Option<CpuSet> = self
            .read("/sys/devices/system/node/online")
            .and_then(|list| list.parse().ok());
        let Some(online) = online else {
            let only = NodeId(0);
            let node = self.node(only, &[], "/sys/devices/system/cpu/online");
            let node = NumaNode {
                distances: BTreeMap::from([(only, 10)]),
                ..node
            };
            return Vec::from_iter(Some(node).filter(|node| node.memory_total > 0));
        };
        // The columns of a node's distances are the online nodes, in order.
        let ids: Vec<NodeId> = online.iter().filter_map(node_id).collect();
        ids.iter()
            .filter(|id| !gpu_memory.contains(id))
            .map(|id| {
                let cpus = format!("/sys/devices/system/node/node{id}/cpulist");
                self.node(*id, &ids, &cpus)
            })
            .filter(|node| node.memory_total > 0 || !node.cpus.is_empty())
            .collect()
    }

    /// Returns a node whose CPUs are in the file `cpus`.
    fn node(&self, id: NodeId, columns: &[NodeId], cpus: &str) -> NumaNode {
        let distances = self.read(&format!("/sys/devices/system/node/node{id}/distance"));
        let distances: Vec<u32> = distances
            .iter()
            .flat_map(|text| text.split_ascii_whitespace())
            .filter_map(|word| word.parse().ok())
            .collect();
        let is_whole = distances.len() == columns.len();
        let columns = if is_whole { columns } else { &[] };
        let cpus = self.read(cpus).and_then(|list| list.parse().ok());
        NumaNode {
            cpus_known: cpus.is_some(),
            cpus: cpus.unwrap_or_default(),
            memory_total: self.counts(id).map_or(0, |counts| counts.total),
            memory_free: self.free_memory(id),
            distances: columns.iter().copied().zip(distances).collect(),
            ..NumaNode::new(id)
        }
    }

    /// Returns the nodes that this process may allocate on (`cpuset.mems`), if the kernel reports them.
    pub fn allowed_nodes(&self) -> Option<Vec<NodeId>> {
        let status = self.read("/proc/self/status")?;
        let nodes: CpuSet = status_field(&status, "Mems_allowed_list")?.parse().ok()?;
        Some(nodes.iter().filter_map(node_id).collect())
    }

    /// Returns the bytes that an allocation on `node` could get now.
    pub(crate) fn free_memory(&self, node: NodeId) -> Option<u64> {
        let whole = self.whole_machine_of(node).and_then(|all| all.available());
        let of_node = || self.node_meminfo(node)?.available();
        self.bound_by_cgroup(whole.or_else(of_node))
    }

    /// Returns the use of a node's memory, all of it from one file. Of a machine with one node it is the file of the whole
    /// machine, unless the node's has more.
    pub(crate) fn counts(&self, node: NodeId) -> Option<NodeCounts> {
        let files = [self.node_meminfo(node), self.whole_machine_of(node)];
        let largest = files.iter().flatten().max_by_key(|file| file.total())?;
        let huge_page = self
            .whole_machine()
            .map_or(0, |all| all.get("Hugepagesize"));
        largest.counts(huge_page)
    }

    fn node_meminfo(&self, node: NodeId) -> Option<MemInfo> {
        let path = format!("/sys/devices/system/node/node{node}/meminfo");
        Some(MemInfo::parse(&self.read(&path)?))
    }

    /// Returns the whole machine's file if `node` is its only node.
    fn whole_machine_of(&self, node: NodeId) -> Option<MemInfo> {
        let online = self.read("/sys/devices/system/node/online");
        let only = online.map_or(node.0 == 0, |list| list.trim() == node.to_string());
        only.then(|| self.whole_machine()).flatten()
    }

    /// Returns the estimate of a machine with one node, which beats the node's file: it includes the kernel's
    /// own estimate, and memory that a virtual machine's host adds on demand.
    fn whole_machine(&self) -> Option<MemInfo> {
        self.read("/proc/meminfo").map(|text| MemInfo::parse(&text))
    }

    fn bound_by_cgroup(&self, free: Option<u64>) -> Option<u64> {
        let room = self.memory_room();
        free.map(|free| room.map_or(free, |room| free.min(room)))
    }

    /// Returns the node of a PCI device, if the kernel knows it.
    pub(crate) fn pci_node(&self, bus_id: &str) -> Option<NodeId> {
        let address = sysfs_pci_address(bus_id)?;
        let text = self.read(&format!("/sys/bus/pci/devices/{address}/numa_node"))?;
        text.trim().parse().ok().filter(|id| *id >= 0).map(NodeId)
    }
}

fn node_id(number: u32) -> Option<NodeId> {
    i32::try_from(number).ok().map(NodeId)
}

/// Converts a CUDA PCI bus id (`0009:01:00.0`, `00000009:01:00.0` or `01:00.0`) to sysfs's form.
pub(crate) fn sysfs_pci_address(bus_id: &str) -> Option<String> {
    let (domain, bus, device, function) = crate::text::pci_address(bus_id)?;
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

/// Returns the node in a `numa_status` file, for example `Node: 4`.
fn numa_status_node(text: &str) -> Option<NodeId> {
    let (_, after) = text.split_once("Node:")?;
    let id: i32 = after.split_ascii_whitespace().next()?.parse().ok()?;
    (id >= 0).then_some(NodeId(id))
}

/// The use of a host node's memory in bytes, as the kernel counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeCounts {
    /// All of its memory: [`NumaNode::memory_total`].
    pub total: u64,
    /// The pages that nothing uses.
    pub free: u64,
    /// The sum of the fields below.
    pub ordinary: u64,
    /// Programs' plain memory.
    pub anonymous: u64,
    /// The page cache: files' contents, without shared memory.
    pub cache: u64,
    /// Shared memory: files of tmpfs, memfds, System V segments, shared pages without a file.
    pub shared: u64,
    /// The kernel's own: slab, page tables, kernel stacks.
    pub kernel: u64,
    /// The pool of huge pages, used or not.
    pub huge_pages: u64,
}

/// The lines of a `meminfo` file, in bytes, by name.
#[derive(Debug)]
struct MemInfo(BTreeMap<String, u64>);

impl MemInfo {
    /// Parses `/proc/meminfo` or a node's `meminfo`, whose lines begin with `Node 0`.
    fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(Self::line).collect())
    }

    fn line(line: &str) -> Option<(String, u64)> {
        let (name, value) = line.split_once(':')?;
        let name = name.split_ascii_whitespace().last()?;
        let mut words = value.split_ascii_whitespace();
        let number: u64 = words.next()?.parse().ok()?;
        let unit = if words.next() == Some("kB") { 1024 } else { 1 };
        Some((name.to_owned(), number.checked_mul(unit)?))
    }

    fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    fn total(&self) -> Option<u64> {
        self.0.get("MemTotal").copied()
    }

    /// Returns the bytes that the kernel accounts for. Only the whole machine's file divides `FilePages` up.
    fn counts(&self, huge_page: u64) -> Option<NodeCounts> {
        let sum = |names: &[&str]| {
            let all = names.iter().map(|name| self.get(name));
            all.fold(0, u64::saturating_add)
        };
        let files = self.0.get("FilePages").copied();
        let files = files.unwrap_or_else(|| sum(&["Cached", "Buffers", "SwapCached"]));
        let shared = self.get("Shmem");
        let (anonymous, cache) = (self.get("AnonPages"), files.saturating_sub(shared));
        let kernel = sum(&["Slab", "PageTables", "KernelStack"]);
        let huge_pages = self.get("HugePages_Total").saturating_mul(huge_page);
        let parts = [anonymous, cache, shared, kernel, huge_pages];
        Some(NodeCounts {
            total: self.total()?,
            free: self.get("MemFree"),
            ordinary: parts.into_iter().fold(0, u64::saturating_add),
            anonymous,
            cache,
            shared,
            kernel,
            huge_pages,
        })
    }

    /// Returns the bytes that an allocation could get without killing a process: the kernel's `MemAvailable`.
    /// Nodes have no such line; for them: free pages, clean page cache, and half of the reclaimable slab,
    /// because a slab page becomes free only with all its objects.
    fn available(&self) -> Option<u64> {
        if let Some(available) = self.0.get("MemAvailable") {
            return Some(*available);
        }
        let free = *self.0.get("MemFree")?;
        let cache = self.get("Active(file)") + self.get("Inactive(file)");
        let unwritten = self.get("Dirty") + self.get("Writeback");
        Some(free + cache.saturating_sub(unwritten) + self.get("SReclaimable") / 2)
    }
}

#[cfg(test)]
pub(crate) mod tests;
