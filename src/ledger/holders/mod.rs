//! The processes that may hold GPUs' memory or shared host memory, whether they offer a ledger or not: what the kernel and
//! NVML tell of them.

mod files;
mod holder;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Ledger;
use crate::procs::{Late, Unanswered};

use files::Tmpfs;
pub use holder::{Holder, OnGpu, Why};
use walk::{LIMITS, Walk};

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
        let nvml = LATE.within((), NVML_LIMIT, ask_nvml);
        let nvml = nvml.unwrap_or_else(|why| match why {
            Unanswered::Late => Err(format!("NVML did not answer within {NVML_LIMIT:?}")),
            Unanswered::NotAsked => Err("there is no thread to ask NVML".into()),
        });
        let tmpfs = Tmpfs::of_this_process();
        let walk = Walk::of(
            Path::new("/"),
            &first(&nvml, &pids),
            several_nodes,
            tmpfs,
            LIMITS,
        );
        Self::judged(walk, nvml, &pids)
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
    /// process do not wait for it. Its pages by node have another 10 s, and if they do not come the process is in the result with
    /// [`Why::NodesUnknown`]. After 60 s in all, and while 64 such threads stay, the other processes are not looked at
    /// ([`Why::NotLookedAt`]).
    pub fn of(
        root: &Path,
        nvml: Result<Vec<NvmlGpu>, String>,
        with_ledgers: impl IntoIterator<Item = u32>,
        several_nodes: bool,
    ) -> Self {
        let ledgers: Vec<u32> = with_ledgers.into_iter().collect();
        let first = first(&nvml, &ledgers);
        let walk = Walk::of(root, &first, several_nodes, Tmpfs::below(root), LIMITS);
        Self::judged(walk, nvml, &ledgers)
    }

    /// Adds what NVML tells, and the reasons, and sorts.
    fn judged(mut walk: Walk, nvml: Result<Vec<NvmlGpu>, String>, ledgers: &[u32]) -> Self {
        let mut all = walk.holders;
        match nvml {
            Ok(gpus) => all.gpus = gpus,
            Err(why) => all.nvml = Some(why),
        }
        let note = all.gpus.iter().find_map(|gpu| gpu.why.clone());
        all.nvml = all.nvml.or(note);
        add_nvml(&mut walk.seen, &all.gpus);
        let mut files = HashMap::new();
        for (&inode, &size) in walk.seen.values().flat_map(|holder| &holder.files) {
            // A process that may measure a file tells more than one that maps it alone.
            let known = files.entry(inode).or_insert(size);
            *known = size.min(*known);
        }
        let shared = files.values().map(|size| size.bytes);
        all.shared_found = shared.fold(0, u64::saturating_add);
        all.processes = walk.seen.into_values().filter(Holder::counts).collect();
        for holder in &mut all.processes {
            judge(holder, walk.own, ledgers, &all.gpus);
        }
        let order = |holder: &Holder| (std::cmp::Reverse(holder.bytes()), holder.pid);
        all.processes.sort_by_key(order);
        all.omitted = all.processes.len().saturating_sub(MAX_HOLDERS) as u64;
        all.processes.truncate(MAX_HOLDERS);
        all
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

/// The driver's memory and managed memory below which a process has none worth a word: a process that has called `cuInit`
/// alone maps 4 KiB.
const LEAST: u64 = 1 << 20;

/// What a context of its own maps: 70 MiB of the driver's memory, 2 MiB of managed memory, 8 MiB of shared pages on an H200
/// (driver 580.159.04), with room for other GPUs.
const DRIVER_OF_CONTEXT: u64 = 128 << 20;
const OTHER_OF_CONTEXT: u64 = 16 << 20;

/// Adds the reasons to a process, the strongest first. `own` is the process that looks.
fn judge(holder: &mut Holder, own: u32, ledgers: &[u32], gpus: &[NvmlGpu]) {
    let user = rustix::process::geteuid().as_raw();
    let is_hidden = !holder.is_listed;
    let is_in = |states: &str| holder.state.is_some_and(|state| states.contains(state));
    let in_vain = [Why::Waiting, Why::NotLookedAt];
    let has_asked_in_vain = in_vain.iter().any(|why| holder.why.contains(why));
    let uses_gpus = !holder.gpus.is_empty();
    // Without NVML it is not known who has contexts.
    let contexts = holder.gpus.len().max(gpus.is_empty().into()) as u64;
    let exceeds = |bytes: u64, of_context: u64| bytes >= LEAST.max(contexts * of_context);
    let driver = holder.driver_mapped.unwrap_or(0);
    let managed = holder.managed_mapped.unwrap_or(0);
    let named = holder.shared_mapped.saturating_sub(holder.unnamed_mapped);
    let has_gpu = holder.has_gpu();
    let is_client = || {
        let mut all = gpus.iter().flat_map(|gpu| &gpu.processes);
        all.any(|process| process.pid == holder.pid && process.is_mps_client)
    };
    let all = [
        (Why::Reporter, holder.pid == own),
        (Why::Ledger, ledgers.contains(&holder.pid)),
        (Why::Hidden, is_hidden),
        (Why::Zombie, is_in("ZX") && !holder.has_ended),
        (Why::Stopped, is_in("Tt")),
        (Why::Waiting, is_in("D")),
        (Why::Mps, holder.name.starts_with("nvidia-cuda-mps")),
        (Why::MpsClient, is_client()),
        (Why::Namespace, holder.inner_pid.is_some()),
        (Why::OtherUser, holder.uid.is_some_and(|uid| uid != user)),
        (
            Why::Unreadable,
            // One that did not answer, or was not asked, may be permitted.
            !is_hidden && !holder.has_ended && holder.device_fds.is_none() && !has_asked_in_vain,
        ),
        (Why::InFlight, holder.fds_in_flight > Some(0)),
        (Why::OnGpus, uses_gpus || gpus.is_empty() && driver >= LEAST),
        (Why::Managed, exceeds(managed, OTHER_OF_CONTEXT)),
        (Why::DriverMemory, exceeds(driver, DRIVER_OF_CONTEXT)),
        (
            Why::Pinned,
            has_gpu && exceeds(holder.unnamed_mapped, OTHER_OF_CONTEXT),
        ),
        (Why::SharedUnmapped, holder.shared_unmapped > 0),
        (
            Why::Shared,
            named > 0 || !has_gpu && holder.unnamed_mapped > 0,
        ),
        (
            Why::OpenAlone,
            holder.device_fds > Some(0) && !uses_gpus && driver < LEAST && managed < LEAST,
        ),
    ];
    let reasons = all.into_iter().filter(|(_, is_so)| *is_so);
    holder.why.extend(reasons.map(|(why, _)| why));
    holder.why.sort_unstable();
    holder.why.dedup();
}

/// A process that NVML names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NvmlProcess {
    /// Its process id.
    pub pid: u32,
    /// Its bytes on the GPU. `None`: NVML does not tell.
    pub bytes: Option<u64>,
    /// Whether it is a client of an MPS server.
    pub is_mps_client: bool,
}

impl NvmlProcess {
    /// A process with `bytes` on a GPU, which is no client of an MPS server.
    pub const fn new(pid: u32, bytes: Option<u64>) -> Self {
        Self {
            pid,
            bytes,
            is_mps_client: false,
        }
    }
}

/// A GPU, as NVML has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NvmlGpu {
    /// NVML's index, which need not be CUDA's ordinal.
    pub index: u32,
    /// Its UUID, as `nvidia-smi -L` shows it.
    pub uuid: Option<String>,
    /// The bytes that the driver and the firmware keep for themselves; CUDA counts them neither as total nor as used.
    pub reserved: Option<u64>,
    /// The processes that use it, at most 4096.
    pub processes: Vec<NvmlProcess>,
    /// NVML's error, where it did not tell something.
    pub why: Option<String>,
}

/// Asks NVML, if it is here.
#[cfg(not(feature = "nvml"))]
fn ask_nvml() -> Result<Vec<NvmlGpu>, String> {
    Err("this build asks no NVML (feature nvml)".into())
}

#[cfg(feature = "nvml")]
use asked::ask_nvml;

#[cfg(feature = "nvml")]
mod asked {
    use nvml_wrapper::enums::device::UsedGpuMemory;
    use nvml_wrapper::error::NvmlError;
    use nvml_wrapper::struct_wrappers::device::ProcessInfo;
    use nvml_wrapper::{Device, Nvml};

    use super::{NvmlGpu, NvmlProcess};

    /// The most GPUs and the most processes of one.
    const MOST: usize = 4096;

    /// Asks NVML, if it is here. It is loaded for one question, and given up with its files.
    pub(super) fn ask_nvml() -> Result<Vec<NvmlGpu>, String> {
        let nvml = Nvml::init().map_err(|error| match error {
            NvmlError::LibloadingError(_) => "libnvidia-ml.so.1 is not here".to_owned(),
            error => format!("NVML does not start: {error}"),
        })?;
        let count = nvml
            .device_count()
            .map_err(|error| format!("NVML counts no GPUs: {error}"))?;
        let gpu = |index| match nvml.device_by_index(index) {
            Ok(device) => of_device(index, &device),
            Err(error) => NvmlGpu {
                index,
                why: Some(format!("NVML has no GPU {index}: {error}")),
                ..NvmlGpu::default()
            },
        };
        Ok((0..count.min(MOST as u32)).map(gpu).collect())
    }

    fn of_device(index: u32, device: &Device<'_>) -> NvmlGpu {
        let mut gpu = NvmlGpu {
            index,
            uuid: device.uuid().ok(),
            reserved: device.memory_info().ok().map(|info| info.reserved),
            ..NvmlGpu::default()
        };
        let lists = [
            ("compute", device.running_compute_processes(), false),
            ("graphics", device.running_graphics_processes(), false),
            ("MPS", device.mps_running_compute_processes(), true),
        ];
        for (name, list, is_mps_client) in lists {
            match list {
                Ok(list) => gpu.add(list, is_mps_client),
                // Drivers before 510 have another form of the lists.
                Err(error) => {
                    gpu.why = Some(format!("NVML does not list {name} processes: {error}"))
                }
            }
        }
        gpu
    }

    impl NvmlGpu {
        fn add(&mut self, list: Vec<ProcessInfo>, is_mps_client: bool) {
            for info in list {
                let bytes = match info.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                };
                let is_full = self.processes.len() == MOST;
                let mut all = self.processes.iter_mut();
                match all.find(|known| known.pid == info.pid) {
                    Some(known) => {
                        known.bytes = known.bytes.max(bytes);
                        known.is_mps_client |= is_mps_client;
                    }
                    None if is_full => return,
                    None => self.processes.push(NvmlProcess {
                        pid: info.pid,
                        bytes,
                        is_mps_client,
                    }),
                }
            }
        }
    }
}
