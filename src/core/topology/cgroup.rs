//! Memory limits of this process's control groups, versions 1 and 2.

use super::kernel::Kernel;

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
            folders.into_iter().filter_map(memory).collect::<Vec<_>>()
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
    use crate::topology::kernel::tests::Tree;

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
