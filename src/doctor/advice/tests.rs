//! Tests of advice about reports.

use std::collections::BTreeSet;

use super::*;
use crate::capability::{Capabilities, ImexChannel};
use crate::driver::{Call, CudaVersion};
use crate::host::{Container, DriverModule, HostFacts, Limit};
use crate::{Answer, Driver, InProcess, Reason};
use egmem_core::Machine;

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
        transparent_huge_pages: None,
        shared_huge_pages: None,
        max_mappings: None,
        cuda_visible_devices: None,
        ld_preload: None,
        ld_so_preload: Vec::new(),
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
    let faults: [(&str, Break); 8] = [
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
        ("mappings", |report| {
            report.host.max_mappings = Some(30_000);
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
fn libraries_before_the_driver_are_named_if_something_fails() {
    let mut report = healthy(Machine::h200x8());
    report.host.ld_preload = Some("/a.so".into());
    report.host.ld_so_preload = vec!["/b.so".into()];
    report.driver.libraries.shims = vec!["/c/libvgpu.so".into()];
    report.host.architecture = "x86_64";
    for tried in &mut report.capabilities {
        tried.answer = Answer::Yes; // fabric handles too
    }
    assert_eq!(abouts(&report), [""; 0]);
    let reason = Reason::from(crate::Error::driver(Call::Init, Code::UNKNOWN));
    report.capabilities[0].answer = Answer::No { reason };
    let named = advise(&report);
    assert_eq!(named.len(), 3);
    for (advice, name) in named.iter().zip(["/c/libvgpu.so", "/b.so", "/a.so"]) {
        assert!(
            advice.about == "preload" && advice.finding.contains(name),
            "{advice:?}"
        );
    }
}

#[test]
fn a_library_of_another_version_than_the_module_is_named_with_its_folder() {
    let mut report = healthy(Machine::gh200());
    report.host.driver_module = Some(DriverModule {
        version: "600.1".into(),
        open: true,
    });
    report.driver.libraries.driver = Some("/usr/local/cuda/compat/libcuda.so.560.28.03".into());
    let told = |report: &Report| {
        let advice = advise(report).into_iter();
        let finding = advice
            .filter(|advice| advice.about == "driver")
            .map(|advice| advice.finding);
        finding.collect::<Vec<_>>()
    };
    assert_eq!(told(&report), [""; 0]);
    let problem = |code| Some(Reason::from(crate::Error::driver(Call::Init, code)));
    report.driver.problem = problem(Code::SYSTEM_DRIVER_MISMATCH);
    let finding = &told(&report)[0];
    for part in ["560.28.03", "600.1", "the folder /usr/local/cuda/compat,"] {
        assert!(finding.contains(part), "{finding}");
    }
    for same in ["/usr/lib/libcuda.so.600.1", "/usr/lib/libcuda.so.1"] {
        report.driver.libraries.driver = Some(same.into());
        assert_eq!(told(&report).len(), 1);
    }
    report.driver.problem = problem(Code::UNKNOWN);
    assert_eq!(told(&report), [""; 0]);
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
fn huge_pages_that_are_off_are_named_where_they_decide() {
    type Set = fn(&mut HostFacts);
    let settings: [(&str, Set); 3] = [
        ("transparent_hugepage/enabled", |host| {
            host.transparent_huge_pages = Some("never".into());
        }),
        ("transparent_hugepage/shmem_enabled", |host| {
            host.shared_huge_pages = Some("never".into());
        }),
        ("transparent_hugepage/shmem_enabled", |host| {
            host.shared_huge_pages = Some("deny".into());
        }),
    ];
    let with = |machine, set: Set| {
        let mut report = healthy(machine);
        set(&mut report.host);
        assert_eq!(abouts(&report), [""; 0], "registered memory works");
        for backing in &mut report.backings {
            if let Some(chosen) = &mut backing.chosen
                && chosen.why == Why::Faster
            {
                chosen.why = Why::Trial("small pages".into());
            }
        }
        let advice = advise(&report).into_iter();
        advice
            .filter(|advice| advice.about == "pages")
            .collect::<Vec<_>>()
    };
    for (file, set) in settings {
        let named = with(Machine::h200x8(), set);
        assert_eq!(named.len(), 1);
        assert!(named[0].remedy.contains(file), "{named:?}");
        assert_eq!(with(Machine::gh200(), set), []);
    }
    let fine = |host: &mut HostFacts| {
        host.transparent_huge_pages = Some("madvise".into());
        host.shared_huge_pages = Some("advise".into());
    };
    assert_eq!(with(Machine::h200x8(), fine), []);
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

#[test]
fn versions_are_two_numbers() {
    assert_eq!(version("580.159.04"), Some((580, 159)));
    assert_eq!(version("590.44"), Some((590, 44)));
    for text in ["", "580", "580.x", "x.1"] {
        assert_eq!(version(text), None, "{text}");
    }
}

#[test]
fn the_documentation_has_every_trap() {
    let text = include_str!("../../../docs/driver-versions.md");
    let mut machine = Machine::gh200();
    machine.nodes[0].memory = 512 << 30;
    let mut report = healthy(machine);
    report.imex = ImexChannel::Accessible { path: "x".into() };
    report.host.architecture = "aarch64";
    report.host.page_size = Some(65_536);
    report.host.address_space = Some(LOW);
    let mut rows = BTreeSet::new();
    for version in ["580.1", "615.1"] {
        let open = true;
        let version = version.into();
        report.host.driver_module = Some(DriverModule { version, open });
        let advice = advise(&report).into_iter();
        rows.extend(advice.filter(|it| it.about == "trap").map(|trap| {
            let (_, finding) = trap.finding.split_once(": ").unwrap();
            format!("| {finding} | {} |", trap.remedy)
        }));
    }
    assert_eq!(rows.len(), 5);
    for row in rows {
        assert!(text.contains(&row), "docs/driver-versions.md lacks\n{row}");
    }
}

#[test]
fn a_reason_says_what_the_error_says() {
    let error = Error::PlatformUnsupported {
        what: "fabric handles",
        source: Some(egmem_core::DriverError {
            call: Call::MemCreate,
            code: Code::NOT_SUPPORTED,
        }),
    };
    let reason = Reason::from(&error);
    assert_eq!(reason.kind, "PlatformUnsupported");
    assert_eq!(
        reason.message,
        "this platform does not support fabric handles \
         (cuMemCreate failed: CUDA_ERROR_NOT_SUPPORTED (801))"
    );
    assert_eq!(reason.code, Some(Code::NOT_SUPPORTED));
    assert!(reason.to_string().starts_with(&Explained(&error).message()));

    let unit = Reason::from(Error::driver(Call::MemCreate, Code(4242)));
    assert_eq!(unit.kind, "Driver");
    assert_eq!(unit.message, "cuMemCreate failed: unknown code 4242");
}

#[test]
fn no_remedy_in_a_report_is_to_run_the_doctor() {
    let codes = (0..1000).map(Code);
    let errors = codes.map(|code| Error::driver(Call::Init, code));
    let unsupported = Error::unsupported("fabric handles", None);
    for error in errors.chain([unsupported]) {
        let reason = Reason::from(error);
        assert!(!reason.remedy.contains("egmem doctor"), "{reason}");
    }
}
