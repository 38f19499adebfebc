//! The kernel's files that tests change, as root: CPUs, huge pages, control groups.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the control groups are.
const GROUPS: &str = "/tmp/groups";

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

/// Puts this process into a control group with these CPUs and nodes: of version 1 if it is wanted and the kernel has it,
/// otherwise of version 2.
pub fn join_cpuset(version: u32, cpus: &str, nodes: &str) {
    let settings = [("cpuset.cpus", cpus), ("cpuset.mems", nodes)];
    if version == 1 && is_mounted(&["-t", "cgroup", "-o", "cpuset", "cgroup"]) {
        return join("cpuset", &settings);
    }
    join_2("cpuset", &settings);
}

/// Puts this process into a control group of version 2 that may use `bytes` of memory.
pub fn join_memory_limit(bytes: u64) {
    join_2("memory", &[("memory.max", &bytes.to_string())]);
}

fn join_2(controller: &str, settings: &[(&str, &str)]) {
    assert!(is_mounted(&["-t", "cgroup2", "cgroup2"]));
    write(
        format!("{GROUPS}/cgroup.subtree_control"),
        &format!("+{controller}"),
    );
    join(controller, settings);
}

/// Mounts the control groups, unless they are.
fn is_mounted(options: &[&str]) -> bool {
    fs::create_dir_all(GROUPS).unwrap();
    if Path::new(GROUPS).join("cgroup.procs").exists() {
        return true;
    }
    let mut mount = std::process::Command::new("mount");
    mount.args(options).arg(GROUPS).status().unwrap().success()
}

fn join(name: &str, settings: &[(&str, &str)]) {
    let group = Path::new(GROUPS).join(name);
    if !group.exists() {
        fs::create_dir(&group).unwrap();
    }
    for (file, text) in settings {
        write(group.join(file), text);
    }
    write(group.join("cgroup.procs"), &std::process::id().to_string());
}
