//! Facts about the host that decide what works: device nodes, limits, containers, kernel settings.
//!
//! They come from the kernel's files and calls, so they are available without a driver and without permissions. A
//! fact that cannot be read is `None`, which does not mean "no".

use std::path::{Path, PathBuf};

use egmem_core::Kernel;
pub use egmem_core::host::Container;
use egmem_core::host::status_field;
use egmem_core::topology::{CpuSet, Overcommit};
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use crate::capability::{IMEX_CHANNELS, imex_channels};
use crate::driver::NodeId;

/// Facts about the host. A field is `None` (or empty) if the fact could not be read.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HostFacts {
    /// The processor's architecture, as Rust names it: `aarch64` on Grace.
    pub architecture: &'static str,
    /// The kernel's release. Source: `/proc/sys/kernel/osrelease`.
    pub kernel: Option<String>,
    /// The NVIDIA kernel module. Source: `/proc/driver/nvidia/version`.
    pub driver_module: Option<DriverModule>,
    /// NVIDIA's device nodes in `/dev`, including `nvidiactl` and `nvidia0`.
    pub device_nodes: Vec<PathBuf>,
    /// The IMEX channels that this process can see.
    pub imex_channels: Vec<DeviceNode>,
    /// The kernel's page size in bytes: 65 536 on many Grace machines. Source: sysconf(3).
    pub page_size: Option<u64>,
    /// The pools of huge pages. Source: `/sys/kernel/mm/hugepages`.
    pub huge_pages: Vec<HugePages>,
    /// The setting for transparent huge pages: `always`, `madvise` or `never`.
    pub transparent_huge_pages: Option<String>,
    /// The same for memory that processes share: `always`, `within_size`, `advise`, `never`, `deny` or `force`.
    pub shared_huge_pages: Option<String>,
    /// The most mappings that a process may have (`vm.max_map_count`).
    pub max_mappings: Option<u64>,
    /// How many bytes this process may lock (RLIMIT_MEMLOCK). Source: getrlimit(2).
    pub memlock: Option<Limit>,
    /// How many bytes of addresses this process may have (RLIMIT_AS). Source: getrlimit(2).
    pub address_space: Option<Limit>,
    /// The smallest memory limit of the control groups over this process, in bytes; `None`: none.
    pub cgroup_memory_limit: Option<u64>,
    /// The bytes that these groups leave to it.
    pub cgroup_memory_room: Option<u64>,
    /// The CPUs that this process may run on. Source: `Cpus_allowed_list`.
    pub allowed_cpus: Option<CpuSet>,
    /// The NUMA nodes that this process may allocate on (`cpuset.mems`). Source: `Mems_allowed_list`. The
    /// driver's pages need not respect it.
    pub allowed_nodes: Option<Vec<NodeId>>,
    /// The container that this process runs in, as far as traces show.
    pub container: Option<Container>,
    /// Whether CAP_SYS_NICE is effective: NUMA placement in containers may need it.
    pub cap_sys_nice: Option<bool>,
    /// Whether CAP_IPC_LOCK is effective: the memlock limit then does not apply.
    pub cap_ipc_lock: Option<bool>,
    /// Whether the kernel migrates pages to the nodes that use them (`kernel.numa_balancing`), which slows
    /// GPU access to pageable memory on coherent machines; pinned memory stays.
    pub numa_balancing: Option<bool>,
    /// The NUMA nodes that are GPUs' own memory.
    pub gpu_memory_nodes: Vec<NodeId>,
    /// The environment variable CUDA_VISIBLE_DEVICES, if set.
    pub cuda_visible_devices: Option<String>,
    /// The environment variable LD_PRELOAD, if set: libraries whose functions replace others', the driver's too.
    pub ld_preload: Option<String>,
    /// The libraries that every process loads first. Source: `/etc/ld.so.preload`.
    pub ld_so_preload: Vec<String>,
    /// Whether EGMEM_ALLOW_OVERCOMMIT allows requests beyond the free memory.
    pub overcommit_allowed: bool,
}

/// The NVIDIA kernel module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DriverModule {
    /// Its version, for example `580.159.04`.
    pub version: String,
    /// Whether it is the open one, which Grace machines need.
    pub open: bool,
}

/// A device node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeviceNode {
    /// Its path.
    pub path: PathBuf,
    /// Whether this process can open it for reading and writing.
    pub accessible: bool,
}

/// The pool of huge pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HugePages {
    /// The size of a page in bytes.
    pub page_bytes: u64,
    /// How many pages the pool has.
    pub total: u64,
    /// How many of them are free.
    pub free: u64,
}

/// A resource limit in bytes; `None`: unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Limit {
    /// The limit in force.
    pub soft: Option<u64>,
    /// The most to which an unprivileged process may raise it.
    pub hard: Option<u64>,
}

impl HostFacts {
    /// Reads the facts. Never fails.
    pub fn read() -> Self {
        let variable = |name| std::env::var(name).ok();
        let limit = |resource| {
            let limit = getrlimit(resource);
            let (soft, hard) = (limit.current, limit.maximum);
            Some(Limit { soft, hard })
        };
        Self {
            page_size: Some(rustix::param::page_size() as u64),
            memlock: limit(Resource::Memlock),
            address_space: limit(Resource::As),
            cuda_visible_devices: variable("CUDA_VISIBLE_DEVICES"),
            ld_preload: variable("LD_PRELOAD").filter(|list| !list.is_empty()),
            overcommit_allowed: Overcommit::from_env() == Overcommit::Allow,
            ..Self::of(&Kernel::here())
        }
    }

    /// Reads those that are in the kernel's files.
    fn of(kernel: &Kernel) -> Self {
        let line = |path: &str| kernel.read(path).map(|text| text.trim().to_owned());
        let chosen = |setting| {
            let text = line(&format!("/sys/kernel/mm/transparent_hugepage/{setting}"))?;
            chosen(&text)
        };
        let status = kernel.read("/proc/self/status").unwrap_or_default();
        let module = line("/proc/driver/nvidia/version");
        let preloaded = kernel.read("/etc/ld.so.preload").unwrap_or_default();
        let mut device_nodes = kernel.list("/dev");
        device_nodes.retain(|name| name.starts_with("nvidia"));
        let in_dev = |name| Path::new("/dev").join(name);
        Self {
            architecture: std::env::consts::ARCH,
            kernel: line("/proc/sys/kernel/osrelease"),
            driver_module: module.and_then(|text| driver_module(&text)),
            device_nodes: device_nodes.into_iter().map(in_dev).collect(),
            imex_channels: imex_channels(&kernel.path(IMEX_CHANNELS))
                .map(|(path, opened)| DeviceNode {
                    accessible: opened.is_ok(),
                    path,
                })
                .collect(),
            huge_pages: huge_pages(kernel),
            transparent_huge_pages: chosen("enabled"),
            shared_huge_pages: chosen("shmem_enabled"),
            max_mappings: kernel.number("/proc/sys/vm/max_map_count"),
            cgroup_memory_limit: kernel.memory_limit(),
            cgroup_memory_room: kernel.memory_room(),
            allowed_cpus: status_field(&status, "Cpus_allowed_list")
                .and_then(|list| list.parse().ok()),
            allowed_nodes: kernel.allowed_nodes(),
            container: container(kernel),
            cap_sys_nice: capability(&status, 23),
            cap_ipc_lock: capability(&status, 14),
            numa_balancing: line("/proc/sys/kernel/numa_balancing").map(|text| text != "0"),
            gpu_memory_nodes: kernel.gpu_memory_nodes(),
            ld_so_preload: preloaded_libraries(&preloaded),
            ..Self::default()
        }
    }
}

/// Detects the engine that this process runs in.
fn container(kernel: &Kernel) -> Option<Container> {
    let groups = kernel.read("/proc/self/cgroup").unwrap_or_default();
    let root = kernel.list("/");
    let has = |name: &str| root.iter().any(|entry| entry == name);
    // systemd's interface for containers; engines unknown here set it as well.
    let said = kernel.read("/run/systemd/container");
    let service_account = !kernel.list("/var/run/secrets/kubernetes.io").is_empty();
    match Container::of_groups(&groups) {
        _ if service_account => Some(Container::Kubernetes),
        Some(container) => Some(container),
        None if has(".dockerenv") => Some(Container::Docker),
        None if kernel.read("/run/.containerenv").is_some() => Some(Container::Podman),
        None if has(".singularity.d") => Some(Container::Apptainer),
        None => {
            let name = said?.trim().to_owned();
            (!name.is_empty()).then_some(Container::Other(name))
        }
    }
}

fn huge_pages(kernel: &Kernel) -> Vec<HugePages> {
    let folder = "/sys/kernel/mm/hugepages";
    let pool = |name: &String| {
        let number = |file: &str| kernel.number(&format!("{folder}/{name}/{file}"));
        let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
        let kib: u64 = kib.parse().ok()?;
        Some(HugePages {
            page_bytes: kib.checked_mul(1024)?,
            total: number("nr_hugepages")?,
            free: number("free_hugepages")?,
        })
    };
    let mut pools: Vec<HugePages> = kernel.list(folder).iter().filter_map(pool).collect();
    pools.sort_by_key(|pool| pool.page_bytes);
    pools
}

/// Parses `/etc/ld.so.preload`: names with spaces or colons between them, and comments.
fn preloaded_libraries(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.split('#').next());
    let names = lines.flat_map(|line| line.split([' ', '\t', ':']));
    let names = names.filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

/// Returns whether a capability is in the effective set.
fn capability(status: &str, bit: u32) -> Option<bool> {
    let effective = u64::from_str_radix(status_field(status, "CapEff")?, 16).ok()?;
    Some(effective >> bit & 1 == 1)
}

/// Returns the word in brackets of a setting such as `always [madvise] never`.
fn chosen(setting: &str) -> Option<String> {
    let (_, after) = setting.split_once('[')?;
    let (word, _) = after.split_once(']')?;
    Some(word.to_owned())
}

/// Returns the first word that looks like a version in the line `NVRM version: …`.
fn driver_module(text: &str) -> Option<DriverModule> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("NVRM version:"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    Some(DriverModule {
        version: line.split_ascii_whitespace().find(is_version)?.to_owned(),
        open: line.contains("Open Kernel Module"),
    })
}

/// The libraries in the address space of a process that has opened the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Libraries {
    /// The driver library's file.
    #[serde(rename = "library")]
    pub driver: Option<String>,
    /// The files of libraries that share GPUs between containers and answer driver calls in the driver's place:
    /// `libvgpu.so`.
    pub shims: Vec<String>,
}

impl Libraries {
    /// Finds the libraries of this process. Source: `/proc/self/maps`.
    pub fn of_this_process() -> Self {
        let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
        Self::of_maps(&String::from_utf8_lossy(&maps))
    }

    fn of_maps(maps: &str) -> Self {
        let named = |name: &str| {
            let paths = maps.lines();
            let paths = paths.filter_map(|line| line.find('/').map(|at| &line[at..]));
            let is_it = |path: &&str| {
                path.rsplit('/')
                    .next()
                    .is_some_and(|file| file.starts_with(name))
            };
            let mut named: Vec<String> = paths.filter(is_it).map(str::to_owned).collect();
            named.dedup();
            named
        };
        Self {
            driver: named("libcuda.so").into_iter().next(),
            shims: named("libvgpu.so"),
        }
    }

    /// Returns the driver library's file, its folder, and the version in its name, if it has one.
    pub(crate) fn driver_file(&self) -> Option<(&str, &str, Option<&str>)> {
        let path = self.driver.as_deref()?;
        let (folder, file) = path.rsplit_once('/')?;
        let version = file.strip_prefix("libcuda.so.");
        let version = version.filter(|version| version.contains('.'));
        Some((path, folder, version))
    }
}

#[cfg(test)]
mod tests;
