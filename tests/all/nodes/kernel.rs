//! The kernel's files that tests change, as root: CPUs, huge pages, control groups.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the text of a file without the white space around it.
pub fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    let text = fs::read_to_string(path);
    text.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        .trim()
        .to_owned()
}

pub fn write(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    fs::write(path, text).unwrap_or_else(|error| panic!("{} = {text}: {error}", path.display()));
}

/// A setting that is as it was again when this is dropped.
pub struct Setting {
    path: PathBuf,
    before: String,
}

impl Setting {
    pub fn set(path: impl Into<PathBuf>, text: &str) -> Self {
        let path = path.into();
        let before = read(&path);
        write(&path, text);
        Self { path, before }
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.path, &self.before) {
            println!("{} stays as it is: {error}", self.path.display());
        }
    }
}

/// Takes a CPU offline until the answer is dropped.
pub fn offline(cpu: u32) -> Setting {
    Setting::set(format!("/sys/devices/system/cpu/cpu{cpu}/online"), "0")
}

/// Reserves huge pages of 2 MiB on a node until the answer is dropped.
pub fn reserve(node: i32, pages: u64) -> Setting {
    let setting = Setting::set(huge(node, "nr"), &pages.to_string());
    assert_eq!(
        read(huge(node, "nr")),
        pages.to_string(),
        "node {node} has no room"
    );
    setting
}

/// Returns how many huge pages of 2 MiB a node has left.
pub fn free_huge_pages(node: i32) -> u64 {
    read(huge(node, "free")).parse().unwrap()
}

fn huge(node: i32, what: &str) -> String {
    format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/{what}_hugepages")
}

/// Puts this process into a control group with these CPUs and nodes, of version 1 or 2.
pub fn join_cpuset(version: u32, cpus: &str, nodes: &str) {
    let root = Path::new("/tmp/cgroup");
    let group = root.join("limited");
    fs::create_dir_all(root).unwrap();
    let options: &[&str] = match version {
        1 => &["-t", "cgroup", "-o", "cpuset", "cgroup"],
        _ => &["-t", "cgroup2", "cgroup2"],
    };
    if !root.join("cgroup.procs").exists() {
        let mut mount = std::process::Command::new("mount");
        let status = mount.args(options).arg(root).status().unwrap();
        assert!(status.success(), "mount {options:?}: {status}");
    }
    if version == 2 {
        write(root.join("cgroup.subtree_control"), "+cpuset");
    }
    if !group.exists() {
        fs::create_dir(&group).unwrap();
    }
    write(group.join("cpuset.cpus"), cpus);
    write(group.join("cpuset.mems"), nodes);
    write(group.join("cgroup.procs"), &std::process::id().to_string());
}
