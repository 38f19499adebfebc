//! How much memory a workload takes at most, in a process of its own: others would leave theirs to it.

use std::fs;
use std::io;
use std::process::Command;

use crate::entrant::Entrant;
use crate::workloads::Workload;

/// Runs this program once more for that, where it is of interest.
pub fn of_child(workload: &Workload, kind: Entrant) -> Option<u64> {
    if !workload.takes_memory() {
        return None;
    }
    child("peak", &workload.name, kind)?.parse().ok()
}

/// Runs this program once more to `measure` something of one contestant; what it prints, if it succeeds.
pub fn child(measure: &str, only: &str, kind: Entrant) -> Option<String> {
    let mut child = Command::new(std::env::current_exe().ok()?);
    child.args(["--table", "/dev/null", "--child", measure, "--only", only]);
    let output = child.args(["--among", kind.name()]).output().ok()?;
    let printed = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    output.status.success().then_some(printed)
}

/// Does the first workload once, and prints by how many bytes this process grew at most.
///
/// # Errors
/// If the contestant cannot be made, or the kernel does not tell.
pub fn print(workloads: &[Workload], kinds: &[Entrant]) -> io::Result<()> {
    let (Some(workload), Some(&kind)) = (workloads.first(), kinds.first()) else {
        return Err(io::Error::other("no such workload or contestant"));
    };
    let mut runner = workload.start(kind)?;
    let before = status("VmRSS:")?;
    runner.time();
    println!("{}", status("VmHWM:")?.saturating_sub(before));
    Ok(())
}

/// A number of bytes that the kernel tells of this process.
pub fn status(name: &str) -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| io::Error::other("the kernel does not tell this process's memory"))
}
