//! Finds settings of this machine that should change, and says what to do; errors as a report has them.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::backing::Why;
use crate::capability::ImexChannel;
use crate::driver::{Call, Code, CudaVersion, versions};
use crate::size::Bytes;
use crate::{Error, Explained, Report};
use egmem_core::error::RUN_DOCTOR;
use egmem_core::topology::TopologySource;

/// A setting that is not ideal, or that explains a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Advice {
    /// Its subject, in one word, for programs: `memlock`, `container`, …
    pub about: &'static str,
    /// The finding.
    pub finding: String,
    /// The remedy.
    pub remedy: &'static str,
}

/// Why something does not work, and what to do: an [`Error`] as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// The name of the [`Error`]'s variant, such as `NoImexChannel`.
    pub kind: String,
    /// The failure and its cause.
    pub message: String,
    /// The remedy.
    pub remedy: String,
    /// The failed driver call behind it, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<Call>,
    /// The call's result code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
}

impl From<&Error> for Reason {
    fn from(error: &Error) -> Self {
        // Derived `Debug` output starts with the variant's name.
        let mut kind = format!("{error:?}");
        if let Some(end) = kind.find(|c: char| !c.is_ascii_alphanumeric()) {
            kind.truncate(end);
        }
        let source = error.driver_error();
        let remedy = in_report(error).to_owned();
        Self {
            kind,
            message: Explained(error).message(),
            remedy,
            call: source.map(|source| source.call),
            code: source.map(|source| source.code),
        }
    }
}

/// Returns an error's remedy, without the advice to run the doctor, which shows it.
fn in_report(error: &Error) -> &'static str {
    match (error, error.remedy()) {
        (Error::PlatformUnsupported { .. }, _) => "use a path that this report answers with yes",
        (_, RUN_DOCTOR) => {
            "look the code up in the documentation of the CUDA driver API, and look for NVRM and Xid in the kernel's \
             log (dmesg)"
        }
        (_, remedy) => match remedy.split_once(" (`egmem doctor` shows") {
            Some((remedy, _)) => remedy,
            None => remedy,
        },
    }
}

impl From<Error> for Reason {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.message, self.remedy)
    }
}

/// Derives advice from a report. A simulated driver says nothing about the host's settings.
pub(crate) fn advise(report: &Report) -> Vec<Advice> {
    let mut advice = Vec::new();
    on_driver(&mut advice, report);
    if report.simulated.is_none() {
        on_libraries(&mut advice, report);
        on_process(&mut advice, report);
        on_kernel(&mut advice, report);
        on_traps(&mut advice, report);
    }
    advice
}

/// If the control group leaves less, even small buffers fail.
const LITTLE_ROOM: u64 = 1 << 30;

/// The kernel's default for `vm.max_map_count`.
const USUAL_MAPPINGS: u64 = 65_530;

/// Adds advice for each condition that holds: `condition => about, (finding), remedy;`.
macro_rules! advise {
    ($all:expr; $($condition:expr => $about:literal, ($($finding:tt)+), $remedy:literal;)*) => {
        $(if $condition {
            let finding = format!($($finding)+);
            $all.push(Advice { about: $about, finding, remedy: $remedy });
        })*
    };
}

/// The driver's version, and nodes.
fn on_driver(advice: &mut Vec<Advice>, report: &Report) {
    // Without a version nothing is known to lack.
    let cuda = report.driver.cuda.unwrap_or(CudaVersion(i32::MAX));
    let lacks: Vec<String> = versions::lacking(cuda)
        .map(|feature| format!("{} ({})", feature.name, feature.since))
        .collect();
    let gpus = report.topology.gpus().iter();
    let unknown: Vec<String> = gpus
        .filter(|gpu| gpu.host_numa.is_none())
        .map(|gpu| gpu.ordinal.to_string())
        .collect();
    advise! { advice;
        !lacks.is_empty() => "driver", ("the driver, for CUDA {cuda}, lacks {}", lacks.join(", ")),
            "install a newer driver if you need them";
        !unknown.is_empty() => "numa", ("the host NUMA node of GPU {} is unknown", unknown.join(", ")),
            "name a node yourself; in a virtual machine, give it the host's NUMA topology";
        report.topology.source() == TopologySource::Driver => "numa", ("the kernel reports no NUMA nodes"),
            "mount /sys in the container, or run a kernel with CONFIG_NUMA";
    }
}

/// What stands between this process and the kernel module, if something does not work.
fn on_libraries(advice: &mut Vec<Advice>, report: &Report) {
    let (driver, host) = (&report.driver, &report.host);
    let mut tried = report.capabilities.iter();
    if driver.problem.is_none() && tried.all(|tried| tried.answer.is_yes()) {
        return;
    }
    if let (Some(problem), Some(module)) = (&driver.problem, &host.driver_module)
        && let Some((library, folder, version)) = driver.libraries.driver_file()
    {
        let codes = [
            Code::SYSTEM_DRIVER_MISMATCH,
            Code::COMPAT_NOT_SUPPORTED_ON_DEVICE,
        ];
        let is_told = problem.code.is_some_and(|code| codes.contains(&code));
        let kernel = &module.version;
        advise! { advice;
            is_told || version.is_some_and(|version| version != kernel) => "driver",
                ("the driver library is {library}, in the folder {folder}, and the kernel module's version is {kernel}"),
                "remove that folder from LD_LIBRARY_PATH and /etc/ld.so.conf.d (then run ldconfig), if it is a \
                 container's cuda-compat; otherwise reboot, or reload the kernel module";
        }
    }
    let shims = driver.libraries.shims.join(", ");
    let all = host.ld_so_preload.join(", ");
    let own = host.ld_preload.as_deref().unwrap_or_default();
    advise! { advice;
        !shims.is_empty() => "preload", ("{shims} answers driver calls in the driver's place"),
            "try without it: it may refuse host memory that the driver would create";
        !all.is_empty() => "preload", ("/etc/ld.so.preload loads {all} into every process"),
            "try without it: a library loaded first may answer driver calls in the driver's place";
        !own.is_empty() => "preload", ("LD_PRELOAD is {own}"),
            "try without it: a library loaded first may answer driver calls in the driver's place";
    }
}

/// What this process may use: GPUs, capabilities, and memory within limits.
fn on_process(advice: &mut Vec<Advice>, report: &Report) {
    let host = &report.host;
    // Device nodes of GPUs are named nvidia0, nvidia1, …
    let number = |path: &PathBuf| -> Option<u32> {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix("nvidia")?.parse().ok()
    };
    let nodes = host.device_nodes.iter().filter_map(number).count();
    let gpus = report.topology.gpus().len();
    let container = host.container.as_ref();
    let container = container.map_or_else(String::new, ToString::to_string);
    let limits = [
        host.memlock.and_then(|limit| limit.soft),
        host.cgroup_memory_room,
        host.max_mappings,
    ];
    let [memlock, room, most] = limits.map(|limit| limit.unwrap_or(u64::MAX));
    advise! { advice;
        report.driver.problem.is_some() && host.driver_module.is_some() => "container",
            ("the NVIDIA kernel module is loaded, but the driver cannot be used"),
            "in a container use the NVIDIA Container Toolkit (--gpus all); otherwise \
             install the module's own libcuda";
        gpus > 0 && gpus < nodes && host.cuda_visible_devices.is_none() => "cgroup",
            ("only {gpus} of {nodes} GPUs can be opened: a control group denies the rest"),
            "allow all of the node's GPUs, since denied ones block EGM routing, and choose \
             by CUDA_VISIBLE_DEVICES";
        host.container.is_some() && host.cap_sys_nice == Some(false) => "container",
            ("this container ({container}) has no CAP_SYS_NICE"),
            "start it with --cap-add=SYS_NICE: placement on NUMA nodes may need it";
        memlock < u64::MAX && host.cap_ipc_lock != Some(true) => "memlock",
            ("only {} may be locked", Bytes(memlock)),
            "ulimit -l unlimited, if NICs are to reach the memory (RDMA); CUDA does not \
             need it";
        room < LITTLE_ROOM => "cgroup", ("the control group leaves {} of memory", Bytes(room)),
            "raise its limit (memory.max, docker --memory)";
        most < USUAL_MAPPINGS => "mappings",
            ("a process may have only {most} mappings, and each chunk of memory takes one"),
            "sysctl vm.max_map_count=65530, the kernel's default, or more";
    }
}

/// The kernel's settings. Without huge pages registered memory is not faster than the driver's; whether it has them, its
/// trial tells: from Linux 6.1 on settings that are off do not decide.
fn on_kernel(advice: &mut Vec<Advice>, report: &Report) {
    let host = &report.host;
    let chosen = report.backings.iter().filter_map(|of| of.chosen.as_ref());
    let is_slow = chosen
        .into_iter()
        .any(|chosen| matches!(chosen.why, Why::Trial(_)));
    let of_private = host.transparent_huge_pages.as_deref().unwrap_or_default();
    let of_shared = host.shared_huge_pages.as_deref().unwrap_or_default();
    let is_coherent = report.topology.gpus().iter().any(|gpu| gpu.coherent);
    let is_closed = host
        .driver_module
        .as_ref()
        .is_some_and(|module| !module.open);
    advise! { advice;
        is_coherent && host.numa_balancing == Some(true) => "numa", ("automatic NUMA balancing is on"),
            "sysctl kernel.numa_balancing=0: it slows GPU access to pageable memory";
        is_coherent && host.page_size == Some(4096) => "pages", ("the kernel's pages are 4 KiB"),
            "NVIDIA recommends a kernel with 64 KiB pages on Grace";
        is_coherent && is_closed => "driver", ("the kernel module is the closed one"),
            "install the open one: coherent machines need it";
        is_slow && of_private == "never" => "pages", ("transparent huge pages are off"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: registered memory in huge pages is pinned \
             several times as fast as the driver's";
        is_slow && matches!(of_shared, "never" | "deny") => "pages",
            ("transparent huge pages are off for memory that processes share ({of_shared})"),
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled: shareable registered memory in huge \
             pages is pinned several times as fast as the driver's";
    }
}

const GIB: u64 = 1 << 30;

/// Known faults of drivers, by the version of the kernel module. All are reports of others, which were not reproduced here.
/// docs/driver-versions.md has the same texts in a table with sources.
fn on_traps(advice: &mut Vec<Advice>, report: &Report) {
    let host = &report.host;
    let module = host.driver_module.as_ref();
    let Some((version, numbers)) = module.and_then(|it| Some((&it.version, version(&it.version)?)))
    else {
        return;
    };
    let nodes = report.topology.nodes().iter();
    let host_memory = nodes.map(|node| node.memory_total).sum::<u64>();
    let has_large_pages = host.architecture == "aarch64" && host.page_size == Some(64 << 10);
    let gpus = report.topology.gpus().iter();
    let twice = gpus.map(|gpu| gpu.memory.saturating_mul(2)).max();
    let addresses = host.address_space.and_then(|limit| limit.soft);
    advise! { advice;
        numbers < (595, 0) => "trap",
            ("the driver is {version}: drivers before 595 were reported to crash inside cuMemCreate for host memory"),
            "try the calls that a program needs in a child process first, as `egmem doctor` does, or install 595 or newer";
        ((580, 0)..(590, 0)).contains(&numbers) && host_memory >= 512 * GIB => "trap",
            ("the driver is {version}: drivers 580 were reported to fail for 512 GiB or more of host memory in one call"),
            "allocate in chunks, as buffers and heaps do by default";
        numbers >= (590, 44) && has_large_pages => "trap",
            ("the driver is {version}: drivers from 590.44 on were reported to fault below each 4 GiB boundary of one allocation, with pages of 64 KiB"),
            "keep allocations of physical memory below 4 GiB, as buffers and heaps do";
        numbers >= (615, 0) && matches!(report.imex, ImexChannel::Accessible { .. }) => "trap",
            ("the driver is {version}: drivers from 615 on were reported not to rebuild fabric state when a checkpoint of a process is restored"),
            "export and import memory by fabric handles again after a restore";
        addresses.zip(twice).is_some_and(|(limit, twice)| limit < twice) => "trap",
            ("the driver is {version}: a pool without a largest size was reported to reserve twice a GPU's memory in addresses, and this process may not have as many"),
            "set max_size on pools, or raise the limit (ulimit -v unlimited)";
    }
}

/// Parses the first two numbers of `580.159.04`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests;
