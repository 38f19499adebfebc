//! The peak memory of a workload, in a process of its own, so that no earlier workload's memory counts.

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

/// Runs this program once more to `measure` one contestant; returns its output if it succeeds.
pub fn child(measure: &str, only: &str, kind: Entrant) -> Option<String> {
    let mut child = Command::new(std::env::current_exe().ok()?);
    child.args(["--table", "/dev/null", "--child", measure, "--only", only]);
    let output = child.args(["--among", kind.name()]).output().ok()?;
    let printed = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    output.status.success().then_some(printed)
}

/// Does the first workload once, and prints this process's peak growth in bytes.
///
/// # Errors
/// If the contestant cannot be made, or the kernel does not report the memory.
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

/// A number of bytes that the kernel reports for this process.
pub fn status(name: &str) -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| io::Error::other("the kernel does not tell this process's memory"))
}
