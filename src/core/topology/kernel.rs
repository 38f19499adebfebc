//! The Linux kernel's view of NUMA nodes, free memory, the memory limits of this process's control groups (versions 1 and 2)
//! and PCI locality, under `/sys` and `/proc`.

use std::path::PathBuf;

use super::{CpuSet, NumaNode, add_once};
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
        names.sort_unstable();
        names
    }

    /// Returns the nodes that are memory of NVIDIA GPUs, in ascending order, even if CUDA does not show these GPUs.
    ///
    /// Source: the kernel module's `/proc/driver/nvidia/gpus/*/numa_status`, which hwloc reads too.
    pub fn gpu_memory_nodes(&self) -> Vec<NodeId> {
        let gpus = "/proc/driver/nvidia/gpus";
        let mut nodes = Vec::new();
        for gpu in self.list(gpus) {
            let text = self.read(&format!("{gpus}/{gpu}/numa_status"));
            if let Some(node) = text.and_then(|text| numa_status_node(&text)) {
                add_once(&mut nodes, node);
            }
        }
        nodes
    }

    /// Returns the host nodes: those with memory or CPUs, without the `gpu_memory` nodes.
    ///
    /// A kernel without NUMA has one memory, which every API calls node 0.
    pub(crate) fn nodes(&self, gpu_memory: &[NodeId]) -> Vec<NumaNode> {
        let online = self.read("/sys/devices/system/node/online");
        let Some(online) = online.and_then(|list| list.parse::<CpuSet>().ok()) else {
            let mut node = self.node(NodeId(0), &[], "/sys/devices/system/cpu/online");
            node.distances.insert(node.id, 10);
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
        let distances = distances.unwrap_or_default();
        let distances = distances.split_ascii_whitespace();
        let distances = Vec::from_iter(distances.filter_map(|word| word.parse().ok()));
        let is_whole = distances.len() == columns.len();
        let columns = if is_whole { columns } else { &[] };
        let cpus = self.read(cpus).and_then(|list| list.parse().ok());
        let mut node = NumaNode {
            cpus_known: cpus.is_some(),
            cpus: cpus.unwrap_or_default(),
            memory_total: self.counts(id).map_or(0, |counts| counts.total),
            memory_free: self.free_memory(id),
            ..NumaNode::new(id)
        };
        node.distances
            .extend(columns.iter().copied().zip(distances));
        node
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
struct MemInfo(Vec<(String, u64)>);

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

    fn find(&self, name: &str) -> Option<u64> {
        let line = self.0.iter().find(|(known, _)| known == name);
        line.map(|(_, bytes)| *bytes)
    }

    fn get(&self, name: &str) -> u64 {
        self.find(name).unwrap_or(0)
    }

    fn total(&self) -> Option<u64> {
        self.find("MemTotal")
    }

    /// Returns the bytes that the kernel accounts for. Only the whole machine's file divides `FilePages` up.
    fn counts(&self, huge_page: u64) -> Option<NodeCounts> {
        let sum = |names: &[&str]| {
            let all = names.iter().map(|name| self.get(name));
            all.fold(0, u64::saturating_add)
        };
        let files = self.find("FilePages");
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
        if let Some(available) = self.find("MemAvailable") {
            return Some(available);
        }
        let free = self.find("MemFree")?;
        let cache = self.get("Active(file)") + self.get("Inactive(file)");
        let unwritten = self.get("Dirty") + self.get("Writeback");
        Some(free + cache.saturating_sub(unwritten) + self.get("SReclaimable") / 2)
    }
}

/// Version 1 writes "no limit" as the largest multiple of a page.
const NO_LIMIT_V1: u64 = 1 << 62;

impl Kernel {
    /// Returns the smallest memory limit over this process in bytes, if there is one.
    pub fn memory_limit(&self) -> Option<u64> {
        self.memories().map(|(limit, _)| limit).min()
    }

    /// Returns the bytes that this process's control groups leave to it, if any has a limit.
    ///
    /// Whether the driver's pages are charged to a group depends on the driver's version; respecting the limit is
    /// the safe choice.
    pub fn memory_room(&self) -> Option<u64> {
        self.memories()
            .map(|(limit, used)| limit.saturating_sub(used))
            .min()
    }

    /// Returns the limit and the use of the process's group and of its ancestors, as far as they are visible.
    fn memories(&self) -> impl Iterator<Item = (u64, u64)> {
        let text = |file| self.read(file).unwrap_or_default();
        let (groups, mounts) = (text("/proc/self/cgroup"), text("/proc/self/mountinfo"));
        [&V1, &V2].into_iter().flat_map(move |files| {
            let folders = folders(&groups, &mounts, files.controller);
            let memory = |folder: String| self.memory(&folder, files);
            folders
                .into_iter()
                .flatten()
                .filter_map(memory)
                .collect::<Vec<_>>()
        })
    }

    /// Returns a group's limit, and its use without page cache, which the kernel drops at the limit.
    fn memory(&self, folder: &str, files: &Files) -> Option<(u64, u64)> {
        let number = |name: &str| self.number(&format!("{folder}/{name}"));
        let limit = number(files.limit).filter(|limit| *limit < NO_LIMIT_V1)?; // "max" is not a number
        let stat = self.read(&format!("{folder}/memory.stat"));
        let cache = stat
            .iter()
            .flat_map(|stat| stat.lines())
            .filter_map(|line| line.split_once(' '))
            .filter(|(name, _)| files.cache.contains(name))
            .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
            .fold(0, u64::saturating_add);
        let used = number(files.used).unwrap_or(0);
        Some((limit, used.saturating_sub(cache)))
    }
}

/// The files of a version.
struct Files {
    /// `None`: version 2, which has one hierarchy.
    controller: Option<&'static str>,
    limit: &'static str,
    used: &'static str,
    cache: [&'static str; 2],
}

const V1: Files = Files {
    controller: Some("memory"),
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
};

const V2: Files = Files {
    controller: None,
    limit: "memory.max",
    used: "memory.current",
    cache: ["active_file", "inactive_file"],
};

/// Returns the folders of the process's group and of its ancestors, in the hierarchy of a version 1
/// `controller`, or in version 2's.
fn folders(groups: &str, mounts: &str, controller: Option<&str>) -> Option<Vec<String>> {
    let group = group_path(groups, controller)?;
    let (root, point) = mount(mounts, controller)?;
    // In a container without a control group namespace the mount shows a part of the tree, from `root`.
    let below = match group.strip_prefix(root.trim_end_matches('/')) {
        Some(below) if below.is_empty() || below.starts_with('/') => below,
        _ => "",
    };
    let mut below = below.trim_end_matches('/');
    let mut folders = vec![format!("{point}{below}")];
    while let Some((parent, _)) = below.rsplit_once('/') {
        below = parent;
        folders.push(format!("{point}{below}"));
    }
    Some(folders)
}

/// Returns the group's path in `/proc/self/cgroup`, whose lines are `id:controllers:path`.
fn group_path<'a>(groups: &'a str, controller: Option<&str>) -> Option<&'a str> {
    groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let found = match controller {
            Some(controller) => controllers.split(',').any(|name| name == controller),
            None => id == "0" && controllers.is_empty(),
        };
        found.then_some(path)
    })
}

/// Returns the root and mount point of a hierarchy in `/proc/self/mountinfo`.
fn mount<'a>(mounts: &'a str, controller: Option<&str>) -> Option<(&'a str, &'a str)> {
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let (root, point) = (before.next()?, before.next()?);
        let mut after = after.split(' ');
        let (kind, options) = (after.next()?, after.nth(1).unwrap_or(""));
        let found = match controller {
            Some(controller) => {
                kind == "cgroup" && options.split(',').any(|option| option == controller)
            }
            None => kind == "cgroup2",
        };
        found.then_some((root, point))
    })
}

#[cfg(test)]
pub(crate) mod tests;
