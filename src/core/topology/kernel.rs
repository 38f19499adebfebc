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
            return self.single_node().into_iter().collect();
        };
        // The columns of a node's distances are the online nodes, in order.
        let ids: Vec<NodeId> = online.iter().filter_map(node_id).collect();
        ids.iter()
            .filter(|id| !gpu_memory.contains(id))
            .map(|id| self.node(*id, &ids))
            .filter(|node| node.memory_total > 0 || !node.cpus.is_empty())
            .collect()
    }

    fn node(&self, id: NodeId, columns: &[NodeId]) -> NumaNode {
        let folder = format!("/sys/devices/system/node/node{id}");
        let file = |name: &str| self.read(&format!("{folder}/{name}")).unwrap_or_default();
        let distances: Vec<u32> = file("distance")
            .split_ascii_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let cpus = self.read(&format!("{folder}/cpulist"));
        let cpus = cpus.and_then(|list| list.parse().ok());
        NumaNode {
            cpus_known: cpus.is_some(),
            cpus: cpus.unwrap_or_default(),
            memory_total: self.counts(id).map_or(0, |counts| counts.total),
            memory_free: self.free_memory(id),
            distances: if distances.len() == columns.len() {
                columns.iter().copied().zip(distances).collect()
            } else {
                BTreeMap::new()
            },
            ..NumaNode::new(id)
        }
    }

    fn single_node(&self) -> Option<NumaNode> {
        let meminfo = self.whole_machine()?;
        let cpus = self.read("/sys/devices/system/cpu/online");
        let cpus = cpus.and_then(|list| list.parse().ok());
        Some(NumaNode {
            cpus_known: cpus.is_some(),
            cpus: cpus.unwrap_or_default(),
            memory_total: meminfo.total()?,
            memory_free: self.bound_by_cgroup(meminfo.available()),
            distances: BTreeMap::from([(NodeId(0), 10)]),
            ..NumaNode::new(NodeId(0))
        })
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
        let mut counts = NodeCounts {
            total: self.total()?,
            free: self.get("MemFree"),
            ordinary: 0,
            anonymous: self.get("AnonPages"),
            cache: files.saturating_sub(shared),
            shared,
            kernel: sum(&["Slab", "PageTables", "KernelStack"]),
            huge_pages: self.get("HugePages_Total").saturating_mul(huge_page),
        };
        let NodeCounts {
            anonymous,
            cache,
            shared,
            kernel,
            huge_pages,
            ..
        } = counts;
        counts.ordinary = [anonymous, cache, shared, kernel, huge_pages]
            .into_iter()
            .fold(0, u64::saturating_add);
        Some(counts)
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
mod tests {
    use super::*;
    use crate::topology::test_tree::Tree;

    const KB: u64 = 1024;

    fn meminfo(node: i32, total_kb: u64, free_kb: u64) -> String {
        format!(
            "Node {node} MemTotal:       {total_kb} kB\nNode {node} MemFree:  {free_kb} kB\n\
             Node {node} Active(file):  300 kB\nNode {node} Inactive(file): 200 kB\n\
             Node {node} Dirty:  100 kB\nNode {node} SReclaimable:   60 kB\n\
             Node {node} HugePages_Total:     0\n"
        )
    }

    /// Two sockets, a GPU's memory as node 4, an empty node for a MIG slice, memory without CPUs.
    fn grace() -> Tree {
        let tree = Tree::new();
        let node = "sys/devices/system/node";
        tree.file(&format!("{node}/online"), "0-1,4-5,8\n");
        for (id, cpus, total, distance) in [
            (0, "0-71\n", 1000, "10 40 80 80 20"),
            (1, "72-143\n", 2000, "40 10 80 80 20"),
            (4, "\n", 3000, "80 80 10 80 80"),
            (5, "\n", 0, "80 80 80 10 80"),
            (8, "\n", 4000, "20 20 80 80 10"),
        ] {
            tree.file(&format!("{node}/node{id}/cpulist"), cpus);
            tree.file(
                &format!("{node}/node{id}/meminfo"),
                &meminfo(id, total, total / 2),
            );
            tree.file(&format!("{node}/node{id}/distance"), distance);
        }
        tree.file(
            "proc/driver/nvidia/gpus/0009:01:00.0/numa_status",
            "NUMA Info:\n  Node:  4\n  Status: online\n",
        );
        tree.file("sys/bus/pci/devices/0009:01:00.0/numa_node", "1\n");
        tree.file("sys/bus/pci/devices/0019:01:00.0/numa_node", "-1\n");
        tree
    }

    #[test]
    fn host_nodes_are_those_that_are_no_gpus_memory() {
        let tree = grace();
        let kernel = tree.kernel();
        let gpu_memory = kernel.gpu_memory_nodes();
        assert_eq!(gpu_memory, BTreeSet::from([NodeId(4)]));
        let nodes = kernel.nodes(&gpu_memory);
        assert_eq!(nodes.iter().map(|n| n.id.0).collect::<Vec<_>>(), [0, 1, 8]);
        assert_eq!(nodes[1].cpus.to_string(), "72-143");
        assert_eq!(nodes[1].memory_total, 2000 * KB);
        assert_eq!(nodes[1].memory_free, Some((1000 + 400 + 30) * KB));
        let distances: Vec<_> = nodes[0]
            .distances
            .iter()
            .map(|(id, d)| (id.0, *d))
            .collect();
        assert_eq!(distances, [(0, 10), (1, 40), (4, 80), (5, 80), (8, 20)]);
        assert_eq!(kernel.free_memory(NodeId(8)), Some((2000 + 400 + 30) * KB));
        assert_eq!(kernel.free_memory(NodeId(77)), None);
    }

    #[test]
    fn a_control_groups_limit_bounds_what_is_free() {
        let tree = grace();
        tree.file("proc/self/cgroup", "0::/\n");
        tree.file(
            "proc/self/mountinfo",
            "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        );
        tree.file("sys/fs/cgroup/memory.max", "1048576\n");
        tree.file("sys/fs/cgroup/memory.current", "0\n");
        assert_eq!(tree.kernel().free_memory(NodeId(1)), Some(1 << 20));
        assert_eq!(
            tree.kernel().free_memory(NodeId(0)),
            Some((500 + 400 + 30) * KB)
        );
    }

    #[test]
    fn a_kernel_without_numa_has_node_0() {
        let tree = Tree::new();
        tree.file(
            "proc/meminfo",
            "MemTotal: 800 kB\nMemFree: 500 kB\nMemAvailable: 700 kB\n",
        );
        tree.file("sys/devices/system/cpu/online", "0-3\n");
        let nodes = tree.kernel().nodes(&BTreeSet::new());
        assert_eq!(nodes.len(), 1);
        assert_eq!((nodes[0].id, nodes[0].memory_total), (NodeId(0), 800 * KB));
        assert_eq!(nodes[0].memory_free, Some(700 * KB));
        assert_eq!(tree.kernel().free_memory(NodeId(0)), Some(700 * KB));
        assert_eq!(nodes[0].cpus.len(), 4);
        assert!(Tree::new().kernel().nodes(&BTreeSet::new()).is_empty());
    }

    /// Where a virtual machine's host adds memory on demand, the node's file lacks it.
    #[test]
    fn the_counts_of_an_only_node_are_those_of_its_total() {
        let tree = Tree::new();
        let folder = "sys/devices/system/node";
        tree.file(&format!("{folder}/online"), "0\n");
        tree.file(
            &format!("{folder}/node0/meminfo"),
            "Node 0 MemTotal: 1000 kB\nNode 0 MemFree: 100 kB\nNode 0 FilePages: 200 kB\nNode 0 AnonPages: 50 kB\n\
             Node 0 Mapped: 30 kB\nNode 0 HugePages_Total: 2\nnonsense\n",
        );
        let machine = |total: u64| {
            format!(
                "MemTotal: {total} kB\nMemFree: 600 kB\nBuffers: 1 kB\nCached: 20 kB\nSwapCached: 4 kB\n\
                 Slab: 3 kB\nHugePages_Total: 1\nHugepagesize: 16 kB\n"
            )
        };
        for (whole, expected) in [(1400, [1400, 600, 44]), (900, [1000, 100, 282])] {
            tree.file("proc/meminfo", &machine(whole));
            let kernel = tree.kernel();
            let counts = kernel.counts(NodeId(0)).unwrap();
            let found = [counts.total, counts.free, counts.ordinary];
            assert_eq!(found, expected.map(|kb: u64| kb * KB));
            let parts = [counts.anonymous, counts.cache, counts.shared];
            let kernels = counts.kernel + counts.huge_pages;
            assert_eq!(parts.iter().sum::<u64>() + kernels, counts.ordinary);
            let nodes = kernel.nodes(&BTreeSet::new());
            assert_eq!(nodes[0].memory_total, counts.total);
        }
        assert_eq!(tree.kernel().counts(NodeId(1)), None);
    }

    #[test]
    fn pci_locality_is_known_or_unknown_and_never_guessed() {
        let tree = grace();
        let node = |bus_id| tree.kernel().pci_node(bus_id);
        assert_eq!(node("0009:01:00.0"), Some(NodeId(1)));
        assert_eq!(node("00000009:01:00.0"), Some(NodeId(1)));
        assert_eq!(node("0019:01:00.0"), None);
        assert_eq!(node("0029:01:00.0"), None);
        assert_eq!(node("nonsense"), None);
        assert_eq!(
            sysfs_pci_address("C1:00.0").as_deref(),
            Some("0000:c1:00.0")
        );
    }

    proptest::proptest! {
        #[test]
        fn damaged_files_never_panic(text in "(Node [0-9]? ?)?[A-Za-z()]{0,8}:? *[0-9]{0,25} ?(kB)?\n?") {
            let info = MemInfo::parse(&text);
            let _ = (info.total(), info.available());
            let _ = numa_status_node(&text);
            let _ = sysfs_pci_address(&text);
        }
    }
}
