//! The kernel's files, in a folder.

use std::fs;

use super::*;

/// A folder that stands for `/sys` and `/proc`.
pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn kernel(&self) -> Kernel {
        Kernel::at(self.0.path())
    }
}

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
    assert_eq!(gpu_memory, [NodeId(4)]);
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
    let nodes = tree.kernel().nodes(&[]);
    assert_eq!(nodes.len(), 1);
    assert_eq!((nodes[0].id, nodes[0].memory_total), (NodeId(0), 800 * KB));
    assert_eq!(nodes[0].memory_free, Some(700 * KB));
    assert_eq!(tree.kernel().free_memory(NodeId(0)), Some(700 * KB));
    assert_eq!(nodes[0].cpus.len(), 4);
    assert!(Tree::new().kernel().nodes(&[]).is_empty());
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
        let nodes = kernel.nodes(&[]);
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

#[test]
fn version_2_takes_the_tightest_group_above() {
    let tree = Tree::new();
    tree.file("proc/self/cgroup", "0::/job/step\n");
    tree.file(
        "proc/self/mountinfo",
        "30 20 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n",
    );
    tree.file("sys/fs/cgroup/job/step/memory.max", "max\n");
    tree.file("sys/fs/cgroup/job/step/memory.current", "900\n");
    tree.file("sys/fs/cgroup/job/memory.max", "1000\n");
    tree.file("sys/fs/cgroup/job/memory.current", "900\n");
    tree.file(
        "sys/fs/cgroup/job/memory.stat",
        "anon 1\nactive_file 30\ninactive_file 20\n",
    );
    assert_eq!(tree.kernel().memory_limit(), Some(1000));
    assert_eq!(tree.kernel().memory_room(), Some(150));
}

#[test]
fn version_1_in_a_container_that_sees_a_part_of_the_tree() {
    let tree = Tree::new();
    tree.file(
        "proc/self/cgroup",
        "5:cpuset:/docker/abc\n4:memory:/docker/abc/x\n0::/\n",
    );
    tree.file(
        "proc/self/mountinfo",
        "31 20 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
         32 20 0:28 /docker/abc /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset\n",
    );
    tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
    tree.file("sys/fs/cgroup/memory/memory.usage_in_bytes", "4000\n");
    tree.file(
        "sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file 500\ninactive_file 9\n",
    );
    tree.file(
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes",
        "9223372036854771712\n",
    );
    assert_eq!(tree.kernel().memory_limit(), Some(5000));
    assert_eq!(tree.kernel().memory_room(), Some(1500));
}

#[test]
fn no_group_no_limit() {
    assert_eq!(Tree::new().kernel().memory_room(), None);
    assert_eq!(
        folders(
            "0::/../elsewhere\n",
            "30 20 0:26 /mine /cg rw - cgroup2 c rw\n",
            None
        ),
        Some(vec!["/cg".into()])
    );
}

proptest::proptest! {
    #[test]
    fn damaged_groups_never_panic(groups in "([0-9]:[a-z,]{0,9}:/?[a-z/.]{0,9}\n?){0,3}",
                                 mounts in "([0-9a-z:/ ]{0,30}( - cgroup2? c rw,memory)?\n){0,3}") {
        let _ = folders(&groups, &mounts, None);
        let _ = folders(&groups, &mounts, Some("memory"));
    }
}
