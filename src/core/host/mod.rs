//! Facts about the host that decide what works: device nodes, limits, containers, kernel settings.
//!
//! They come only from the kernel's files, so they are available without a driver and without permissions. A
//! fact that cannot be read is `None`, which does not mean "no".

mod container;
pub(crate) mod mappings;
mod parse;
mod process;

use std::fs::OpenOptions;
use std::path::PathBuf;

use serde::Serialize;

pub use container::Container;
pub use process::{ProcessStat, status_field};

use crate::capability::IMEX_CHANNELS;
use crate::driver::NodeId;
use crate::topology::CpuSet;
use crate::topology::cgroup;
use crate::topology::kernel::Kernel;

/// Facts about the host. A field is `None` (or empty) if the fact could not be read.
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    /// The kernel's page size in bytes: 65 536 on many Grace machines. Source: `AT_PAGESZ`.
    pub page_size: Option<u64>,
    /// The pools of huge pages. Source: `/sys/kernel/mm/hugepages`.
    pub huge_pages: Vec<HugePages>,
    /// The setting for transparent huge pages: `always`, `madvise` or `never`.
    pub transparent_huge_pages: Option<String>,
    /// The same for memory that processes share: `always`, `within_size`, `advise`, `never`, `deny` or `force`.
    pub shared_huge_pages: Option<String>,
    /// The most mappings that a process may have (`vm.max_map_count`).
    pub max_mappings: Option<u64>,
    /// How many bytes this process may lock (RLIMIT_MEMLOCK). Source: `/proc/self/limits`.
    pub memlock: Option<Limit>,
    /// How many bytes of addresses this process may have (RLIMIT_AS). Source: `/proc/self/limits`.
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
        let kernel = Kernel::here();
        Self {
            cuda_visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            ld_preload: std::env::var("LD_PRELOAD")
                .ok()
                .filter(|list| !list.is_empty()),
            overcommit_allowed: crate::topology::Overcommit::from_env()
                == crate::topology::Overcommit::Allow,
            ..Self::of(&kernel)
        }
    }

    fn of(kernel: &Kernel) -> Self {
        let line = |path: &str| kernel.read(path).map(|text| text.trim().to_owned());
        let limits = kernel.read("/proc/self/limits").unwrap_or_default();
        let limit = |name| parse::limit(&limits, name);
        let status = kernel.read("/proc/self/status").unwrap_or_default();
        let capability = |bit| parse::capability(&status, bit);
        Self {
            architecture: std::env::consts::ARCH,
            kernel: line("/proc/sys/kernel/osrelease"),
            driver_module: line("/proc/driver/nvidia/version")
                .and_then(|text| parse::driver_module(&text)),
            device_nodes: kernel
                .list("/dev")
                .into_iter()
                .filter(|name| name.starts_with("nvidia"))
                .map(|name| PathBuf::from("/dev").join(name))
                .collect(),
            imex_channels: imex_channels(kernel),
            page_size: kernel
                .read_bytes("/proc/self/auxv")
                .and_then(|auxv| parse::page_size(&auxv)),
            huge_pages: huge_pages(kernel),
            transparent_huge_pages: line("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|text| parse::chosen(&text)),
            shared_huge_pages: line("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
                .and_then(|text| parse::chosen(&text)),
            max_mappings: kernel.number(mappings::LIMIT),
            memlock: limit(parse::MEMLOCK),
            address_space: limit(parse::ADDRESS_SPACE),
            cgroup_memory_limit: cgroup::memory_limit(kernel),
            cgroup_memory_room: cgroup::memory_room(kernel),
            allowed_cpus: parse::list(&status, "Cpus_allowed_list"),
            allowed_nodes: kernel.allowed_nodes(),
            container: Container::find(kernel),
            cap_sys_nice: capability(23),
            cap_ipc_lock: capability(14),
            numa_balancing: line("/proc/sys/kernel/numa_balancing").map(|text| text != "0"),
            gpu_memory_nodes: kernel.gpu_memory_nodes().into_iter().collect(),
            cuda_visible_devices: None,
            ld_preload: None,
            ld_so_preload: kernel
                .read("/etc/ld.so.preload")
                .map(|text| parse::preloaded(&text))
                .unwrap_or_default(),
            overcommit_allowed: false,
        }
    }
}

fn imex_channels(kernel: &Kernel) -> Vec<DeviceNode> {
    let number = |name: &str| name.strip_prefix("channel")?.parse::<u32>().ok();
    let mut names = kernel.list(IMEX_CHANNELS);
    names.retain(|name| number(name).is_some());
    names.sort_by_key(|name| number(name));
    let node = |name: String| {
        let path = PathBuf::from(IMEX_CHANNELS).join(name);
        let here = kernel.path(&path.to_string_lossy());
        DeviceNode {
            accessible: OpenOptions::new().read(true).write(true).open(here).is_ok(),
            path,
        }
    };
    names.into_iter().map(node).collect()
}

fn huge_pages(kernel: &Kernel) -> Vec<HugePages> {
    let folder = "/sys/kernel/mm/hugepages";
    let pool = |name: &String| {
        let number = |file: &str| kernel.number(&format!("{folder}/{name}/{file}"));
        let kib: u64 = name
            .strip_prefix("hugepages-")?
            .strip_suffix("kB")?
            .parse()
            .ok()?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::test_tree::Tree;

    #[test]
    fn nothing_to_read_is_nothing_known() {
        let facts = HostFacts::of(&Tree::new().kernel());
        assert_eq!(facts.kernel, None);
        assert_eq!((facts.memlock, facts.address_space), (None, None));
        assert_eq!(facts.cap_sys_nice, None);
        assert_eq!(facts.numa_balancing, None);
        assert!(facts.imex_channels.is_empty() && facts.huge_pages.is_empty());
    }

    #[test]
    fn a_grace_machine_is_read() {
        let tree = Tree::new();
        tree.file("proc/sys/kernel/osrelease", "6.8.0-1013-nvidia-64k\n");
        tree.file("proc/sys/kernel/numa_balancing", "0\n");
        tree.file(
            "proc/self/status",
            "CapEff:\t0000000000804000\nCpus_allowed_list:\t0-71\nMems_allowed_list:\t0-1,4\n",
        );
        tree.file("dev/nvidia-caps-imex-channels/channel10", "");
        tree.file("dev/nvidia-caps-imex-channels/channel2", "");
        tree.file("dev/nvidia-caps-imex-channels/other", "");
        tree.file("dev/nvidiactl", "");
        tree.file(
            "etc/ld.so.preload",
            "# all\n/usr/local/vgpu/libvgpu.so /a.so:/b.so # more\n",
        );
        tree.file("dev/null", "");
        for (size, total) in [("524288kB", 0), ("2048kB", 7)] {
            let pool = format!("sys/kernel/mm/hugepages/hugepages-{size}");
            tree.file(&format!("{pool}/nr_hugepages"), &format!("{total}\n"));
            tree.file(&format!("{pool}/free_hugepages"), "0\n");
        }
        tree.file(
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always [madvise] never\n",
        );
        tree.file(
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always within_size advise [never] deny force\n",
        );
        tree.file("proc/sys/vm/max_map_count", "65530\n");
        let facts = HostFacts::of(&tree.kernel());

        assert_eq!(
            facts.ld_so_preload,
            ["/usr/local/vgpu/libvgpu.so", "/a.so", "/b.so"]
        );
        assert_eq!(facts.kernel.as_deref(), Some("6.8.0-1013-nvidia-64k"));
        assert_eq!(facts.numa_balancing, Some(false));
        assert_eq!(
            (facts.cap_sys_nice, facts.cap_ipc_lock),
            (Some(true), Some(true))
        );
        assert_eq!(
            facts.allowed_nodes,
            Some(vec![NodeId(0), NodeId(1), NodeId(4)])
        );
        assert_eq!(facts.allowed_cpus.as_ref().map(CpuSet::len), Some(72));
        let channels: Vec<_> = facts
            .imex_channels
            .iter()
            .map(|node| node.path.to_str().unwrap())
            .collect();
        assert_eq!(
            channels,
            [
                "/dev/nvidia-caps-imex-channels/channel2",
                "/dev/nvidia-caps-imex-channels/channel10"
            ]
        );
        assert!(facts.imex_channels[0].accessible);
        let sizes: Vec<_> = facts
            .huge_pages
            .iter()
            .map(|p| (p.page_bytes, p.total))
            .collect();
        assert_eq!(sizes, [(2 << 20, 7), (512 << 20, 0)]);
        assert_eq!(facts.transparent_huge_pages.as_deref(), Some("madvise"));
        assert_eq!(facts.shared_huge_pages.as_deref(), Some("never"));
        assert_eq!(facts.max_mappings, Some(65_530));
        assert!(
            facts
                .device_nodes
                .contains(&PathBuf::from("/dev/nvidiactl"))
        );
        assert!(!facts.device_nodes.contains(&PathBuf::from("/dev/null")));
        assert!(
            serde_json::to_string(&facts)
                .unwrap()
                .contains("\"numa_balancing\":false")
        );
    }

    #[test]
    fn this_machine_is_read() {
        let facts = HostFacts::read();
        assert!(facts.kernel.is_some());
        assert!(facts.memlock.is_some() && facts.address_space.is_some());
        assert!(facts.page_size.is_some_and(|bytes| bytes.is_power_of_two()));
        assert!(facts.allowed_cpus.is_some_and(|cpus| !cpus.is_empty()));
    }
}
