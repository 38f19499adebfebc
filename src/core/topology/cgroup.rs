//! Memory limits of this process's control groups, versions 1 and 2.

use super::kernel::Kernel;

/// Version 1 writes "no limit" as the largest multiple of a page.
const NO_LIMIT_V1: u64 = 1 << 62;

/// A control group's memory limit and use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    limit: u64,
    used: u64,
    /// The part of `used` that is page cache, which the kernel drops at the limit.
    cache: u64,
}

impl Memory {
    fn room(self) -> u64 {
        self.limit
            .saturating_sub(self.used.saturating_sub(self.cache))
    }
}

/// Returns the smallest memory limit over this process in bytes, if there is one.
pub(crate) fn memory_limit(kernel: &Kernel) -> Option<u64> {
    memories(kernel).iter().map(|memory| memory.limit).min()
}

/// Returns the bytes that this process's control groups leave to it, if any has a limit.
///
/// Whether the driver's pages are charged to a group depends on the driver's version; respecting the limit is
/// the safe choice.
pub(crate) fn memory_room(kernel: &Kernel) -> Option<u64> {
    memories(kernel).into_iter().map(Memory::room).min()
}

/// Returns the limits of the process's group and of its ancestors, as far as they are visible.
fn memories(kernel: &Kernel) -> Vec<Memory> {
    let (Some(groups), Some(mounts)) = (
        kernel.read("/proc/self/cgroup"),
        kernel.read("/proc/self/mountinfo"),
    ) else {
        return Vec::new();
    };
    let v1 = folders(&groups, &mounts, Some("memory"))
        .into_iter()
        .filter_map(|folder| memory(kernel, &folder, &V1));
    let v2 = folders(&groups, &mounts, None)
        .into_iter()
        .filter_map(|folder| memory(kernel, &folder, &V2));
    v1.chain(v2).collect()
}

struct Files {
    limit: &'static str,
    used: &'static str,
    cache: [&'static str; 2],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
};

const V2: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    cache: ["active_file", "inactive_file"],
};

fn memory(kernel: &Kernel, folder: &str, files: &Files) -> Option<Memory> {
    let number = |name: &str| kernel.number(&format!("{folder}/{name}"));
    let limit = number(files.limit).filter(|limit| *limit < NO_LIMIT_V1)?; // "max" is not a number
    let stat = kernel
        .read(&format!("{folder}/memory.stat"))
        .unwrap_or_default();
    let cache = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| files.cache.contains(name))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add);
    Some(Memory {
        limit,
        used: number(files.used).unwrap_or(0),
        cache,
    })
}

/// Returns the folders of the process's group and of its ancestors, in the hierarchy of a version 1
/// `controller`, or in version 2's.
fn folders(groups: &str, mounts: &str, controller: Option<&str>) -> Vec<String> {
    let Some(group) = group_path(groups, controller) else {
        return Vec::new();
    };
    let Some((root, point)) = mount(mounts, controller) else {
        return Vec::new();
    };
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
    folders
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
mod tests {
    use super::*;
    use crate::topology::test_tree::Tree;

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
        assert_eq!(memory_limit(&tree.kernel()), Some(1000));
        assert_eq!(memory_room(&tree.kernel()), Some(150));
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
        assert_eq!(memory_limit(&tree.kernel()), Some(5000));
        assert_eq!(memory_room(&tree.kernel()), Some(1500));
    }

    #[test]
    fn no_group_no_limit() {
        assert_eq!(memory_room(&Tree::new().kernel()), None);
        assert_eq!(
            folders(
                "0::/../elsewhere\n",
                "30 20 0:26 /mine /cg rw - cgroup2 c rw\n",
                None
            ),
            ["/cg"]
        );
    }

    proptest::proptest! {
        #[test]
        fn damaged_files_never_panic(groups in "([0-9]:[a-z,]{0,9}:/?[a-z/.]{0,9}\n?){0,3}",
                                     mounts in "([0-9a-z:/ ]{0,30}( - cgroup2? c rw,memory)?\n){0,3}") {
            let _ = folders(&groups, &mounts, None);
            let _ = folders(&groups, &mounts, Some("memory"));
        }
    }
}
