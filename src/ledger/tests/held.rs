//! Memory in use by cause, and the text of it, from a made `/proc`.

use std::os::unix::fs::symlink;

use egmem_core::Topology;

use super::*;
use crate::holders::{Holders, NvmlGpu, NvmlProcess, Why};
use crate::parts::{self, Cause};
use crate::{GpuUse, Ledger, NodeUse, Report};

const UUID: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

/// A process that maps 512 MiB of the driver's memory, one with a GPU open, and NVML's list.
fn holders() -> Holders {
    let root = tempfile::tempdir().unwrap();
    let long = "train.py --option ".repeat(20);
    for pid in [1, 70, 4_194_303] {
        let process = root.path().join(format!("proc/{pid}"));
        std::fs::create_dir_all(process.join("fd")).unwrap();
        let stat = format!("{pid} (python3) S 1 1 1 0 -1 0 0 0 0 0 1 2 3 4 20 0 1 0 77 8 9");
        let maps = match pid {
            70 => "200000000-220000000 rw-s 00000000 00:06 506    /dev/nvidiactl\n",
            _ => "",
        };
        for (file, text) in [("stat", &*stat), ("maps", maps), ("cmdline", &long)] {
            std::fs::write(process.join(file), text).unwrap();
        }
        if pid != 1 {
            symlink("/dev/nvidiactl", process.join("fd/3")).unwrap();
        }
    }
    let gpu = NvmlGpu {
        uuid: Some(UUID.into()),
        processes: vec![NvmlProcess::new(70, Some(300 * MIB))],
        ..NvmlGpu::default()
    };
    Holders::of(root.path(), Ok(vec![gpu]), [], false)
}

fn bytes(parts: &[parts::Part], cause: Cause) -> u64 {
    let of_cause = parts.iter().filter(|part| part.cause == cause);
    of_cause.map(|part| part.bytes).sum()
}

fn node(unaccounted: u64) -> NodeUse {
    NodeUse {
        node: NodeId(0),
        total: 8 << 30,
        used: 4 << 30,
        kernel: Some(1 << 30),
        accounted: 64 * MIB,
        unaccounted: Some(unaccounted),
    }
}

#[test]
fn a_nodes_rest_is_what_no_process_maps() {
    let holders = holders();
    let Some(counts) = Topology::of_host().counts(NodeId(0)) else {
        return;
    };
    let of = |unaccounted, ledgers: &[Ledger]| {
        parts::of_node(&node(unaccounted), &counts, true, &holders, ledgers)
    };
    let found = of(1 << 30, &[]);
    assert_eq!(bytes(&found, Cause::DriverMapped), 512 * MIB);
    assert_eq!(bytes(&found, Cause::NotKnown), 512 * MIB);
    assert_eq!(bytes(&found, Cause::Ledgers), 64 * MIB);
    let shared = [
        Cause::Shared,
        Cause::SharedHeld,
        Cause::Tmpfs,
        Cause::SharedNotFound,
    ];
    let shared: u64 = shared.iter().map(|&cause| bytes(&found, cause)).sum();
    assert_eq!(shared, counts.shared);
    // Memory that several processes map is in none of the kernel's sums twice.
    assert_eq!(bytes(&of(100 * MIB, &[]), Cause::DriverMapped), 100 * MIB);
    // What its ledger has is accounted for.
    let driver = machine();
    let kept = Buffer::on(NodeId(0))
        .bytes(200 * MIB)
        .allocate(&driver)
        .unwrap();
    let mut ledger = Ledger::of(&driver);
    ledger.process.pid = 70;
    let found = of(1 << 30, &[ledger]);
    assert_eq!(bytes(&found, Cause::DriverMapped), 312 * MIB);
    drop(kept);
}

#[test]
fn a_gpus_rest_is_what_nvml_names_nobody_for() {
    let holders = holders();
    let gpu = |used, accounted| GpuUse {
        gpu: 0,
        total: Some(8 << 30),
        used,
        accounted,
        managed: 0,
        unaccounted: None,
        why: None,
    };
    let of = |gpu: &GpuUse, uuid| {
        let found = parts::of_gpu(gpu, uuid, &holders);
        [Cause::Ledgers, Cause::Processes, Cause::NotKnown].map(|cause| bytes(&found, cause) >> 20)
    };
    let used = Some(1000 * MIB);
    assert_eq!(of(&gpu(used, 100 * MIB), Some(UUID)), [100, 200, 700]);
    assert_eq!(of(&gpu(used, 400 * MIB), Some(UUID)), [400, 0, 600]);
    assert_eq!(of(&gpu(used, 0), Some("GPU-other")), [0, 0, 1000]);
    assert_eq!(of(&gpu(used, 0), None), [0, 0, 1000]);
    assert_eq!(of(&gpu(Some(200 * MIB), 0), Some(UUID)), [0, 200, 0]);
    assert_eq!(of(&gpu(None, 0), Some(UUID)), [0, 0, 0]);
}

#[test]
fn the_text_has_a_reason_and_a_command_for_each_process() {
    let driver = machine();
    let mut report = Report::of(Vec::new(), Vec::new(), Some(&driver));
    assert!(report.holders.is_none() && !report.to_text().contains("not known"));
    let holders = holders();
    assert!(holders.processes[1].why.contains(&Why::OpenAlone));
    let causes = [
        Cause::DriverMapped,
        Cause::PageCache,
        Cause::SharedNotFound,
        Cause::NotKnown,
    ];
    let part = |cause| parts::Part {
        location: NodeId(0).into(),
        cause,
        bytes: (1 << 30) + 123 * MIB,
    };
    report.parts = causes.map(part).to_vec();
    report.holders = Some(holders);
    let text = report.to_text();
    for words in [
        "0: 300 MiB",
        "512 MiB",
        "maps the driver's host memory",
        "grep nvidiactl /proc/PID/maps",
        "ls -l /proc/PID/fd | grep nvidia",
        "4194303: ls -l",
        "not known",
    ] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    // A command that is cut serves nobody.
    let mut cut = text.lines().filter(|line| line.contains('…'));
    assert!(cut.all(|line| line.contains("train.py")), "{text}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
    assert!(
        report
            .to_wide_text()
            .contains("train.py --option train.py --option train.py")
    );
    let json = serde_json::to_string(&report).unwrap();
    let newer = json.replace("\"open_alone\"", "\"of_a_newer_version\"");
    let read: Report = serde_json::from_str(&newer).unwrap();
    let why = &read.holders.unwrap().processes[1].why;
    assert!(why.contains(&Why::Other) && !why.contains(&Why::OpenAlone));
}
