//! Memory in use, by cause.

use serde::{Deserialize, Serialize};

use crate::Ledger;
use crate::driver::{Location, NodeId};
use crate::entries::AllocPath;
use crate::holders::{Holders, Why};
use crate::report::GpuUse;
use crate::texts::count;
use crate::topology::NodeCounts;

/// What memory is in use for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// Programs' plain memory.
    Programs,
    /// The page cache.
    PageCache,
    /// Shared memory: memfds, tmpfs, System V segments.
    Shared,
    /// Shared memory without a name that processes map or have open: memfds, what `cuMemHostAlloc` pins, System V segments.
    SharedHeld,
    /// Files in tmpfs, such as `/dev/shm`.
    Tmpfs,
    /// Shared memory that is neither: its fds are on their way, or its processes are not seen.
    SharedNotFound,
    /// The kernel's slab, page tables and stacks.
    Kernel,
    /// The pool of huge pages.
    HugePages,
    /// Allocations in the ledgers.
    Ledgers,
    /// The driver's host memory that processes map for the CPU, beyond their ledgers. At most: memory that several processes
    /// map counts once for each.
    DriverMapped,
    /// GPU memory of the processes that NVML names, beyond the ledgers.
    Processes,
    /// Nothing tells.
    NotKnown,
    /// A cause that only a newer version of this library knows.
    #[serde(other)]
    Other,
}

impl Cause {
    /// Returns the cause in a few words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Programs => "programs' plain memory",
            Self::PageCache => "page cache",
            Self::Shared => "shared memory: memfds, tmpfs",
            Self::SharedHeld => "memfds, cudaHostAlloc, shared pages",
            Self::Tmpfs => "files in tmpfs",
            Self::SharedNotFound => "shared memory of nobody seen",
            Self::Kernel => "kernel: slab, page tables, stacks",
            Self::HugePages => "huge pages that are reserved",
            Self::Ledgers => "allocations in the ledgers above",
            Self::DriverMapped => "driver's memory, mapped by processes",
            Self::Processes => "processes above, by NVML",
            Self::NotKnown => "not known",
            Self::Other => "other",
        }
    }

    /// Returns a command that shows more. `None`: the report says it all.
    pub const fn command(self, is_gpu: bool) -> Option<&'static str> {
        Some(match self {
            Self::Programs => "ps -eo pid,rss,comm --sort -rss | head",
            Self::PageCache => "grep -E '^(Buffers|Cached)' /proc/meminfo",
            Self::Shared | Self::SharedHeld => "sudo lsof | grep memfd; ipcs -m",
            Self::Tmpfs => "df -t tmpfs",
            Self::SharedNotFound => "sudo grep scm_fds: /proc/[0-9]*/fdinfo/*",
            Self::Kernel => "sudo slabtop -o | head -20",
            Self::HugePages => "grep Huge /proc/meminfo",
            Self::DriverMapped => "sudo grep -l nvidiactl /proc/[0-9]*/maps",
            Self::NotKnown if is_gpu => "nvidia-smi, outside of containers",
            Self::NotKnown => "sudo fuser -v /dev/nvidia*",
            Self::Ledgers | Self::Processes | Self::Other => return None,
        })
    }
}

/// A part of the memory in use at a location.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Part {
    /// The node or GPU.
    pub location: Location,
    /// What it is in use for.
    pub cause: Cause,
    /// The bytes.
    pub bytes: u64,
}

/// Divides the memory in use on a node up. `only` says that the machine has no other.
pub(crate) fn of_node(
    node: &NodeUse,
    counts: &NodeCounts,
    only: bool,
    holders: &Holders,
    ledgers: &[Ledger],
) -> Vec<Part> {
    let unaccounted = node.unaccounted.unwrap_or(0);
    let mapped = mapped(node, only, holders, ledgers).min(unaccounted);
    // The kernel does not tell the nodes of shared memory's files.
    let [shared, held, tmpfs, not_found] = match (only, holders.tmpfs) {
        (true, Some(tmpfs)) => {
            let held = holders.shared_found.min(counts.shared);
            let tmpfs = tmpfs.min(counts.shared - held);
            [0, held, tmpfs, counts.shared - held - tmpfs]
        }
        _ => [counts.shared, 0, 0, 0],
    };
    let parts = [
        (Cause::Programs, counts.anonymous),
        (Cause::PageCache, counts.cache),
        (Cause::Shared, shared),
        (Cause::SharedHeld, held),
        (Cause::Tmpfs, tmpfs),
        (Cause::SharedNotFound, not_found),
        (Cause::Kernel, counts.kernel),
        (Cause::HugePages, counts.huge_pages),
        (Cause::Ledgers, node.accounted),
        (Cause::DriverMapped, mapped),
        (Cause::NotKnown, unaccounted - mapped),
    ];
    some(node.node.into(), &parts)
}

/// Returns the driver's memory on a node that processes map, beyond what their ledgers have.
fn mapped(node: &NodeUse, only: bool, holders: &Holders, ledgers: &[Ledger]) -> u64 {
    let is_here = |location: Location| match location {
        Location::HostNuma(id) => id == node.node.0,
        Location::Host => only,
        _ => false,
    };
    let of_holder = |holder: &crate::Holder| {
        let pages = holder.by_node.get(&node.node).copied().unwrap_or(0);
        // The kernel tells the pages of some processes alone.
        let mapped = holder.driver_mapped.filter(|_| only);
        let bytes = pages.max(mapped.unwrap_or(0));
        let mut ledgers = ledgers.iter();
        let ledger = ledgers.find(|ledger| ledger.process.pid == holder.pid);
        let totals = ledger.into_iter().flat_map(|ledger| &ledger.totals);
        let paths = totals
            .filter(|total| is_here(total.location))
            .flat_map(|total| &total.by_path);
        let known = paths.filter(|(path, _)| path.takes_room() || **path == AllocPath::Import);
        bytes.saturating_sub(known.fold(0, |sum, (_, &bytes)| sum.saturating_add(bytes)))
    };
    let all = holders.processes.iter().map(of_holder);
    all.fold(0, u64::saturating_add)
}

/// Divides the memory in use on a GPU up; `uuid` is its own.
pub(crate) fn of_gpu(gpu: &GpuUse, uuid: Option<&str>, holders: &Holders) -> Vec<Part> {
    let Some(used) = gpu.used else {
        return Vec::new();
    };
    let found = holders
        .gpus
        .iter()
        .find(|found| uuid.is_some() && found.uuid.as_deref() == uuid);
    let processes = found.into_iter().flat_map(|gpu| &gpu.processes);
    let named = processes.filter_map(|process| process.bytes);
    let named = named.fold(0, u64::saturating_add).min(used);
    let accounted = gpu.accounted.min(used);
    let parts = [
        (Cause::Ledgers, accounted),
        (Cause::Processes, named.saturating_sub(accounted)),
        (Cause::NotKnown, used - named.max(accounted)),
    ];
    some(Location::Device(gpu.gpu), &parts)
}

fn some(location: Location, parts: &[(Cause, u64)]) -> Vec<Part> {
    let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
    let part = |&(cause, bytes)| Part {
        location,
        cause,
        bytes,
    };
    parts.map(part).collect()
}

/// Returns what memory that is not known can be, each cause with the processes that may have it and a command.
pub(crate) fn possible_causes(holders: &Holders) -> Vec<String> {
    let all = &holders.processes;
    let pids = |why: Why| {
        let with = all.iter().filter(|holder| holder.why.contains(&why));
        let mut pids: Vec<String> = with.map(|holder| holder.pid.to_string()).take(6).collect();
        if pids.len() > 5 {
            pids[5] = "…".into();
        }
        Some(pids.join(", ")).filter(|pids| !pids.is_empty())
    };
    let of_some = |why: Why, what: &str| {
        let command = why.command().unwrap_or_default();
        pids(why).map(|pids| format!("{what} {pids}: {command}"))
    };
    let some = |number: u64| (number > 0).then(|| count(number, "process"));
    let open = all.iter().any(|holder| holder.device_fds > Some(0));
    let open = open.then(|| {
        let alone = pids(Why::OpenAlone).map(|pids| format!(", above all of {pids}"));
        format!(
            "allocated or imported and not mapped for the CPU, by a process with a GPU open{}: ls -l /proc/PID/fd | grep nvidia",
            alone.unwrap_or_default()
        )
    });
    let namespace = match holders.in_namespace {
        Some(true) => Some(
            "processes outside of this PID namespace are not seen: egmem ps outside of the container",
        ),
        None => Some("/proc does not tell whether other PID namespaces exist"),
        Some(false) => None,
    };
    let hides = "/proc hides processes of other users (hidepid): run as root";
    let tables = "tables of the driver, 64 to 80 bytes for each pinned page; per-CPU data and modules of the kernel";
    let causes = [
        open,
        of_some(Why::InFlight, "fds on their way in sockets of"),
        some(holders.unreadable)
            .map(|many| format!("{many} could not be read: run as root, with CAP_SYS_PTRACE")),
        of_some(Why::Waiting, "processes that wait in the kernel,"),
        of_some(
            Why::NodesUnknown,
            "pages, whose nodes the kernel did not tell, of",
        ),
        some(holders.not_looked_at).map(|many| format!("not looked at: {many}")),
        holders.proc_hides.then(|| hides.into()),
        namespace.map(str::to_owned),
        holders.nvml.as_ref().map(|why| format!("NVML: {why}")),
        Some(tables.into()),
    ];
    causes.into_iter().flatten().collect()
}

/// A host node's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeUse {
    /// The node.
    pub node: NodeId,
    /// All of its memory in bytes, as the [topology](crate::topology::NumaNode::memory_total) has it.
    pub total: u64,
    /// The bytes in use.
    pub used: u64,
    /// The bytes that the kernel accounts for: page cache, programs' plain memory, the kernel's own, huge pages. `None`: it
    /// does not say.
    pub kernel: Option<u64>,
    /// The bytes in the ledgers.
    pub accounted: u64,
    /// The bytes in use that neither the kernel nor a ledger accounts for: memory that drivers hold for other programs.
    pub unaccounted: Option<u64>,
}
