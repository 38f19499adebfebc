//! The processes that may hold GPUs' memory or shared host memory, whether they offer a ledger or not: what the kernel and
//! NVML tell of them.

mod fds;
mod holder;
mod judge;
mod maps;
mod nvml;
mod patience;
#[cfg(test)]
mod tests;
mod tmpfs;
mod walk;
mod why;

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;

pub use holder::{Holder, OnGpu};
pub use nvml::{NvmlGpu, NvmlProcess};
use patience::{Late, Unanswered};
use tmpfs::Tmpfs;
use walk::Walk;
pub use why::Why;

/// The most processes in a report: those with the most memory.
pub const MAX_HOLDERS: usize = 256;

/// How long NVML has to answer.
const NVML_LIMIT: Duration = Duration::from_secs(30);

/// The processes that may hold memory, and what could not be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Holders {
    /// The processes, those with most memory first: at most [`MAX_HOLDERS`].
    pub processes: Vec<Holder>,
    /// How many more there are.
    pub omitted: u64,
    /// How many processes were not looked at, because too much or too many had been waited for already.
    #[serde(default)]
    pub not_looked_at: u64,
    /// How many processes did not permit this one to look at their files and mappings.
    pub unreadable: u64,
    /// Whether `/proc` does not show all processes of the PID namespace (`hidepid`).
    pub proc_hides: bool,
    /// Whether this process is in a PID namespace of its own, so that processes outside of it are not seen. `None`: unknown.
    pub in_namespace: Option<bool>,
    /// The GPUs, as NVML has them.
    pub gpus: Vec<NvmlGpu>,
    /// Why NVML did not tell something.
    pub nvml: Option<String>,
    /// The bytes of shared memory that the processes hold, each file once, without the files of the tmpfs that `tmpfs` counts.
    pub shared_found: u64,
    /// The bytes of the files in tmpfs, such as `/dev/shm`, that this process sees. `None`: unknown.
    pub tmpfs: Option<u64>,
}

impl Holders {
    /// Looks at all processes of this machine, and asks NVML. `ledgers` are those of processes that offer them.
    pub(crate) fn gather(ledgers: &[Ledger], several_nodes: bool) -> Self {
        let pids: Vec<u32> = ledgers.iter().map(|ledger| ledger.process.pid).collect();
        static LATE: Late<()> = Late::new();
        let nvml = LATE.within((), NVML_LIMIT, nvml::ask);
        let nvml = nvml.unwrap_or_else(|why| match why {
            Unanswered::Late => Err(format!("NVML did not answer within {NVML_LIMIT:?}")),
            Unanswered::NotAsked => Err("there is no thread to ask NVML".into()),
        });
        let tmpfs = Tmpfs::of_this_process();
        let bytes = tmpfs.bytes;
        let found = Walk::of(Path::new("/"), &first(&nvml, &pids), several_nodes, tmpfs);
        Self {
            tmpfs: bytes,
            ..Self::judged(found, nvml, &pids)
        }
    }

    /// Looks at the processes of the `/proc` below `root`: `/`, a place where that of another PID namespace is mounted, or a
    /// test's folder. `nvml` is what NVML tells, or why it does not. `with_ledgers` are processes that offer their ledgers;
    /// with `several_nodes` the kernel is asked for the node of each page, which takes it some nanoseconds a page.
    ///
    /// At most 65,536 processes are looked at, those that NVML or `with_ledgers` names first, and 16,384 file descriptors and 16 MiB
    /// of mappings of each. After 1,000,000 of them in all the other processes are [not looked at](Holders::not_looked_at). A
    /// process that ends meanwhile, or whose number is given out again, is left out.
    ///
    /// Each process is looked at on a thread of its own for at most 5 s. A process whose mappings the kernel does not show within
    /// that is in the result with [`Why::Waiting`]; its thread stays until the kernel answers, and until then further reports of this
    /// process do not wait for it. After 60 s in all, and while 64 such threads stay, the other processes are not looked at
    /// ([`Why::NotLookedAt`]).
    pub fn of(
        root: &Path,
        nvml: Result<Vec<NvmlGpu>, String>,
        with_ledgers: impl IntoIterator<Item = u32>,
        several_nodes: bool,
    ) -> Self {
        let ledgers: Vec<u32> = with_ledgers.into_iter().collect();
        let first = first(&nvml, &ledgers);
        let found = Walk::of(root, &first, several_nodes, Tmpfs::below(root));
        Self::judged(found, nvml, &ledgers)
    }

    /// Adds what NVML tells, and the reasons, and sorts.
    fn judged(mut found: Walk, nvml: Result<Vec<NvmlGpu>, String>, ledgers: &[u32]) -> Self {
        let (gpus, why_not) = match nvml {
            Ok(gpus) => (gpus, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        add_nvml(&mut found.seen, &gpus);
        let mut files = HashMap::new();
        for (&inode, &size) in found.seen.values().flat_map(|holder| &holder.files) {
            // A process that may measure a file tells more than one that maps it alone.
            let known = files.entry(inode).or_insert(size);
            *known = size.min(*known);
        }
        let mut processes: Vec<Holder> = found.seen.into_values().filter(Holder::counts).collect();
        for holder in &mut processes {
            judge::judge(holder, &found.asker, ledgers, &gpus);
        }
        processes.sort_by_key(|holder| (std::cmp::Reverse(holder.bytes()), holder.pid));
        let omitted = processes.len().saturating_sub(MAX_HOLDERS) as u64;
        processes.truncate(MAX_HOLDERS);
        let notes = gpus.iter().find_map(|gpu| gpu.why.clone());
        Self {
            processes,
            omitted,
            not_looked_at: found.not_looked_at,
            unreadable: found.unreadable,
            proc_hides: found.asker.proc_hides,
            in_namespace: found.asker.in_namespace,
            nvml: why_not.or(notes),
            gpus,
            shared_found: files
                .values()
                .fold(0, |sum, size| sum.saturating_add(size.bytes)),
            tmpfs: None,
        }
    }
}

/// Returns the processes that are known to have memory.
fn first(nvml: &Result<Vec<NvmlGpu>, String>, ledgers: &[u32]) -> Vec<u32> {
    let processes = nvml.iter().flatten().flat_map(|gpu| &gpu.processes);
    let pids = processes.map(|process| process.pid);
    pids.chain(ledgers.iter().copied()).collect()
}

/// Adds what NVML tells of processes, also of those that `/proc` does not show.
fn add_nvml(seen: &mut HashMap<u32, Holder>, gpus: &[NvmlGpu]) {
    for gpu in gpus {
        for process in &gpu.processes {
            let holder = seen.entry(process.pid).or_insert_with(|| Holder {
                pid: process.pid,
                ..Holder::default()
            });
            match holder.gpus.iter_mut().find(|on| on.index == gpu.index) {
                // A process may have contexts of several kinds: each list has the sum.
                Some(on) => on.bytes = on.bytes.max(process.bytes),
                None => holder.gpus.push(OnGpu {
                    index: gpu.index,
                    uuid: gpu.uuid.clone(),
                    bytes: process.bytes,
                }),
            }
        }
    }
}
