//! Facts of a made `/`, and of this machine.

use super::*;

/// A folder that stands for `/`.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn kernel(&self) -> Kernel {
        Kernel::at(self.0.path())
    }
}

#[test]
fn nothing_to_read_is_nothing_known() {
    let facts = HostFacts::of(&Tree::new().kernel());
    assert_eq!(facts.kernel, None);
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
    let channels = facts.imex_channels.iter();
    let channels = channels.map(|node| node.path.file_name().unwrap().to_str().unwrap());
    assert!(channels.eq(["channel2", "channel10"]));
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

#[test]
fn both_kernel_modules_are_told_apart() {
    let open = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.159.04  Release Build\nGCC version: 12.2.0";
    let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n";
    let module = driver_module(open).unwrap();
    assert_eq!((module.version.as_str(), module.open), ("580.159.04", true));
    let module = driver_module(closed).unwrap();
    assert_eq!((module.version.as_str(), module.open), ("550.54.15", false));
    assert_eq!(driver_module("GCC version: 12.2.0"), None);
}

#[test]
fn capabilities_of_the_status() {
    let status =
        "CapPrm:\tffff\nCapEff:\t0000000000800000\nMems_allowed:\t1\nMems_allowed_list:\t0\n";
    assert_eq!(capability(status, 23), Some(true));
    assert_eq!(capability(status, 14), Some(false));
    assert_eq!(capability("", 23), None);
}

#[test]
fn a_setting_is_the_word_in_brackets() {
    assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
    assert_eq!(chosen("always"), None);
}

#[test]
fn files_tell_it_where_groups_do_not() {
    let tree = Tree::new();
    assert_eq!(container(&tree.kernel()), None);
    tree.file("run/systemd/container", "systemd-nspawn\n");
    assert_eq!(
        container(&tree.kernel()).unwrap().to_string(),
        "systemd-nspawn"
    );
    tree.file("run/.containerenv", "");
    assert_eq!(container(&tree.kernel()), Some(Container::Podman));
    tree.file(".dockerenv", "");
    assert_eq!(container(&tree.kernel()), Some(Container::Docker));
    tree.file("var/run/secrets/kubernetes.io/serviceaccount/token", "");
    assert_eq!(container(&tree.kernel()), Some(Container::Kubernetes));
}

proptest::proptest! {
    #[test]
    fn damaged_texts_never_panic(text in "(CapEff|NVRM version)?:?[ -~\n]{0,60}") {
        let _ = (driver_module(&text), capability(&text, 23), chosen(&text));
    }
}

#[test]
fn libraries_are_found_by_the_names_of_their_files() {
    let maps = "\
7f10-7f20 r-xp 0 08:01 5  /usr/lib/libvgpu.so.d/libc.so.6
7f20-7f30 r--p 0 08:01 7  /usr/local/vgpu/libvgpu.so
7f30-7f40 r-xp 0 08:01 7  /usr/local/vgpu/libvgpu.so
7f40-7f50 rw-p 0 00:00 0
7f50-7f60 r-xp 0 08:01 9  /usr/local/cuda/compat/libcuda.so.560.28.03
7f60-7f70 r-xp 0 08:01 8  /usr/lib/libcuda.so.580.1
";
    let found = Libraries::of_maps(maps);
    assert_eq!(found.shims, ["/usr/local/vgpu/libvgpu.so"]);
    let folder = "/usr/local/cuda/compat";
    let path = format!("{folder}/libcuda.so.560.28.03");
    assert_eq!(
        found.driver_file(),
        Some((&*path, folder, Some("560.28.03")))
    );
    let none = Libraries::of_maps("");
    assert_eq!((&none, none.driver_file()), (&Libraries::default(), None));
}
