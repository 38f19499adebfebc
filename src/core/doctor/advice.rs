//! Finds settings of this machine that should change, and says what to do.

use serde::Serialize;

use super::Report;
use super::traps::{self, Machine as At};
use crate::driver::versions;
use crate::size::Bytes;
use crate::topology::TopologySource;

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

/// Derives advice from a report. A simulated driver says nothing about the host's settings.
pub(super) fn advise(report: &Report) -> Vec<Advice> {
    let mut advice = Advisor(Vec::new());
    advice.on_driver(report);
    advice.on_nodes(report);
    if report.simulated.is_none() {
        advice.on_access_to_gpus(report);
        advice.on_limits(report);
        advice.on_kernel(report);
        advice.on_traps(report);
    }
    advice.0
}

/// If the control group leaves less, even small buffers fail.
const LITTLE_ROOM: u64 = 1 << 30;

struct Advisor(Vec<Advice>);

/// Adds advice for each condition that holds: `condition => about, (finding), remedy;`.
macro_rules! advise {
    ($advisor:expr; $($condition:expr => $about:literal, ($($finding:tt)+), $remedy:literal;)*) => {
        $(if $condition {
            $advisor.add($about, format!($($finding)+), $remedy);
        })*
    };
}

impl Advisor {
    fn add(&mut self, about: &'static str, finding: String, remedy: &'static str) {
        self.0.push(Advice {
            about,
            finding,
            remedy,
        });
    }

    fn on_driver(&mut self, report: &Report) {
        let Some(cuda) = report.driver.cuda else {
            return;
        };
        let lacks: Vec<String> = versions::lacking(cuda)
            .map(|feature| format!("{} ({})", feature.name, feature.since))
            .collect();
        advise! { self;
            !lacks.is_empty() => "driver", ("the driver, for CUDA {cuda}, lacks {}", lacks.join(", ")),
                "install a newer driver if you need them";
        }
    }

    fn on_nodes(&mut self, report: &Report) {
        let gpus = report.topology.gpus().iter();
        let unknown: Vec<String> = gpus
            .filter(|gpu| gpu.host_numa.is_none())
            .map(|gpu| gpu.ordinal.to_string())
            .collect();
        advise! { self;
            !unknown.is_empty() => "numa", ("the host NUMA node of GPU {} is unknown", unknown.join(", ")),
                "name a node yourself; in a virtual machine, give it the host's NUMA topology";
            report.topology.source() == TopologySource::Driver => "numa", ("the kernel reports no NUMA nodes"),
                "mount /sys in the container, or run a kernel with CONFIG_NUMA";
        }
    }

    fn on_access_to_gpus(&mut self, report: &Report) {
        let host = &report.host;
        // Device nodes of GPUs are named nvidia0, nvidia1, …
        let nodes = host
            .device_nodes
            .iter()
            .filter_map(|path| path.file_name()?.to_str()?.strip_prefix("nvidia"))
            .filter(|number| number.parse::<u32>().is_ok())
            .count();
        let gpus = report.topology.gpus().len();
        advise! { self;
            report.driver.problem.is_some() && host.driver_module.is_some() => "container",
                ("the NVIDIA kernel module is loaded, but the driver cannot be used"),
                "in a container use the NVIDIA Container Toolkit (--gpus all); otherwise \
                 install the module's own libcuda";
            gpus > 0 && gpus < nodes && host.cuda_visible_devices.is_none() => "cgroup",
                ("only {gpus} of {nodes} GPUs can be opened: a control group denies the rest"),
                "allow all of the node's GPUs, since denied ones block EGM routing, and choose \
                 by CUDA_VISIBLE_DEVICES";
        }
        if let Some(container) = &host.container {
            advise! { self;
                host.cap_sys_nice == Some(false) => "container",
                    ("this container ({container}) has no CAP_SYS_NICE"),
                    "start it with --cap-add=SYS_NICE: placement on NUMA nodes may need it";
            }
        }
    }

    fn on_limits(&mut self, report: &Report) {
        let host = &report.host;
        if let Some(memlock) = host.memlock.and_then(|limit| limit.soft) {
            advise! { self;
                host.cap_ipc_lock != Some(true) => "memlock", ("only {} may be locked", Bytes(memlock)),
                    "ulimit -l unlimited, if NICs are to reach the memory (RDMA); CUDA does not \
                     need it";
            }
        }
        if let Some(room) = host.cgroup_memory_room {
            advise! { self;
                room < LITTLE_ROOM => "cgroup", ("the control group leaves {} of memory", Bytes(room)),
                    "raise its limit (memory.max, docker --memory)";
            }
        }
    }

    /// Faults that others have reported of this version of the kernel module.
    fn on_traps(&mut self, report: &Report) {
        let Some(module) = &report.host.driver_module else {
            return;
        };
        let machine = At {
            host: &report.host,
            topology: &report.topology,
            imex: &report.imex,
        };
        for trap in traps::found(&machine) {
            let finding = format!("the driver is {}: {}", module.version, trap.finding);
            self.add("trap", finding, trap.remedy);
        }
    }

    fn on_kernel(&mut self, report: &Report) {
        let host = &report.host;
        if !report.topology.gpus().iter().any(|gpu| gpu.coherent) {
            return;
        }
        advise! { self;
            host.numa_balancing == Some(true) => "numa", ("automatic NUMA balancing is on"),
                "sysctl kernel.numa_balancing=0: it slows GPU access to pageable memory";
            host.page_size == Some(4096) => "pages", ("the kernel's pages are 4 KiB"),
                "NVIDIA recommends a kernel with 64 KiB pages on Grace";
            host.driver_module.as_ref().is_some_and(|module| !module.open) => "driver",
                ("the kernel module is the closed one"),
                "install the open one: coherent machines need it";
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::{Capabilities, ImexChannel};
    use crate::doctor::InProcess;
    use crate::driver::CudaVersion;
    use crate::host::{Container, DriverModule, HostFacts, Limit};
    use crate::{Driver, Machine};

    const LOW: Limit = Limit {
        soft: Some(8 << 20),
        hard: None,
    };

    /// Returns the report of a simulated machine as if it were a real one without problems.
    fn healthy(machine: Machine) -> Report {
        let driver = Driver::simulated(machine.clone()).unwrap();
        let mut prober = InProcess(Capabilities::of(&driver));
        let mut report = Report::gather_simulated(&mut prober, &machine);
        assert!(report.works);
        report.simulated = None;
        report.host = HostFacts {
            driver_module: None,
            device_nodes: Vec::new(),
            memlock: None,
            cgroup_memory_room: None,
            container: None,
            numa_balancing: None,
            page_size: None,
            cuda_visible_devices: None,
            ..report.host
        };
        report
    }

    fn abouts(report: &Report) -> Vec<&'static str> {
        advise(report).iter().map(|advice| advice.about).collect()
    }

    #[test]
    fn a_healthy_machine_gets_no_advice_and_each_fault_its_own() {
        let good = healthy(Machine::gh200x4());
        assert_eq!(abouts(&good), [""; 0]);

        type Break = fn(&mut Report);
        let faults: [(&str, Break); 7] = [
            ("container", |report| {
                report.host.container = Some(Container::Docker);
                report.host.cap_sys_nice = Some(false);
            }),
            ("cgroup", |report| {
                let nodes = (0..6).map(|i| format!("/dev/nvidia{i}").into());
                report.host.device_nodes = nodes.collect();
                report.host.device_nodes.push("/dev/nvidiactl".into());
            }),
            ("cgroup", |report| {
                report.host.cgroup_memory_room = Some(5 << 20);
            }),
            ("numa", |report| report.host.numa_balancing = Some(true)),
            ("pages", |report| report.host.page_size = Some(4096)),
            ("driver", |report| {
                report.driver.cuda = Some(CudaVersion(12040));
            }),
            ("memlock", |report| {
                report.host.memlock = Some(LOW);
                report.host.cap_ipc_lock = Some(false);
            }),
        ];
        for (about, break_it) in faults {
            let mut report = good.clone();
            break_it(&mut report);
            assert_eq!(abouts(&report), [about]);
            // A simulated machine has another host.
            report.simulated = Some("gh200x4".into());
            let of_driver = about == "driver";
            assert_eq!(abouts(&report).len(), usize::from(of_driver), "{about}");
        }
    }

    #[test]
    fn chosen_gpus_are_no_denied_ones_and_capabilities_lift_limits() {
        let mut report = healthy(Machine::gh200());
        let nodes = (0..6).map(|i| format!("/dev/nvidia{i}").into());
        report.host.device_nodes = nodes.collect();
        report.host.cuda_visible_devices = Some("0".into());
        report.host.memlock = Some(LOW);
        report.host.cap_ipc_lock = Some(true);
        assert_eq!(abouts(&report), [""; 0]);
    }

    #[test]
    fn settings_of_coherent_machines_matter_to_them_alone() {
        let mut report = healthy(Machine::h200x8());
        report.host.numa_balancing = Some(true);
        report.host.page_size = Some(4096);
        assert_eq!(abouts(&report), [""; 0]);
    }

    #[test]
    fn a_gpu_whose_node_is_unknown_is_named() {
        let mut machine = Machine::gh200x4();
        machine.gpus[2].host_numa = -1;
        let report = healthy(machine);
        let advice = advise(&report);
        assert_eq!(advice.len(), 1);
        assert!(advice[0].finding.contains("GPU 2"), "{advice:?}");
    }

    /// Returns the faults that the report shows for a driver of this version. A simulated machine has none.
    fn traps(report: &Report, version: &str) -> Vec<String> {
        let mut report = report.clone();
        report.host.driver_module = Some(DriverModule {
            version: version.into(),
            open: true,
        });
        let told = |report: &Report| {
            let advice = advise(report).into_iter();
            let traps = advice.filter(|advice| advice.about == "trap");
            traps.map(|advice| advice.finding).collect::<Vec<_>>()
        };
        let found = told(&report);
        report.simulated = Some("gh200".into());
        assert_eq!(told(&report), [""; 0]);
        found
    }

    #[test]
    fn faults_of_drivers_are_told_by_version_to_machines_that_meet_them() {
        let mut report = healthy(Machine::gh200());
        report.imex = ImexChannel::Absent { path: "x".into() };
        report.host.architecture = "aarch64";
        report.host.page_size = Some(4096);
        let has = |report: &Report, version, part: &str| {
            let traps = traps(report, version);
            traps.iter().any(|finding| finding.contains(part))
        };
        assert!(has(&report, "580.159.04", "crash inside cuMemCreate"));
        assert!(has(&report, "594.99", "crash inside cuMemCreate"));
        assert!(!has(&report, "595.10", "crash inside cuMemCreate"));
        assert_eq!(traps(&report, "600.1"), [""; 0]);

        // 512 GiB.
        assert!(!has(&report, "580.1", "512 GiB"));
        let mut large = Machine::gh200();
        large.nodes[0].memory = 512 << 30;
        report.topology = healthy(large).topology;
        assert!(has(&report, "580.1", "512 GiB"));
        assert!(!has(&report, "590.1", "512 GiB"));

        // Pages of 64 KiB.
        assert!(!has(&report, "590.44", "4 GiB boundary"));
        report.host.page_size = Some(65_536);
        assert!(has(&report, "590.44", "4 GiB boundary"));
        assert!(!has(&report, "590.43.9", "4 GiB boundary"));
        report.host.architecture = "x86_64";
        assert!(!has(&report, "590.44", "4 GiB boundary"));

        // Fabric handles.
        assert!(!has(&report, "615.1", "fabric state"));
        report.imex = ImexChannel::Accessible { path: "x".into() };
        assert!(has(&report, "615.1", "fabric state") && !has(&report, "614.9", "fabric state"));

        // Addresses.
        assert!(!has(&report, "600.1", "addresses"));
        report.host.address_space = Some(LOW);
        assert!(has(&report, "600.1", "addresses"));
    }
}
