//! The memory of processes, nodes and GPUs, summed up.

use egmem_share::{BootId, Identity, InstanceId};
use serde_json::Value;

use egmem_core::Backing;
use egmem_core::driver::HandleType;
use egmem_core::vmm::PhysicalMemory;

use super::*;
use crate::entries::{Allocation, Imported, Party};
use crate::offer::encode;
use crate::report::Exporter;
use crate::{Ledger, NodeUse, Report};

/// The report's line on the node of [`buffer`].
fn its_node(report: &Report) -> &NodeUse {
    let mut nodes = report.nodes.iter();
    nodes.find(|node| node.node == NodeId(1)).unwrap()
}

#[test]
fn a_ledger_that_is_sent_has_the_largest_allocations_and_all_sums() {
    let driver = machine();
    let buffers = several(&driver, "many", 20);
    let ledger = Ledger::of(&driver);
    let whole = serde_json::to_string(&ledger.allocations).unwrap().len();
    let sent: Ledger = serde_json::from_str(&encode(ledger.clone(), whole / 2).unwrap()).unwrap();
    assert_eq!(sent.totals, ledger.totals);
    assert_eq!(sent.allocations.len() as u64 + sent.omitted, 20);
    assert!(
        sent.omitted >= 9 && !sent.allocations.is_empty(),
        "{}",
        sent.omitted
    );
    let least = sent.allocations.iter().map(|entry| entry.bytes).min();
    assert_eq!(least, Some((sent.omitted + 1) * 2 * MIB));
    let text = encode(ledger.clone(), usize::MAX).unwrap();
    assert_eq!(serde_json::from_str::<Ledger>(&text).unwrap().omitted, 0);
    let report = Report::of(vec![sent], Vec::new(), Some(&driver));
    let node = its_node(&report);
    assert_eq!(node.accounted, 420 * MIB, "what was not sent counts too");
    drop(buffers);
}

#[test]
fn a_machines_memory_is_in_the_ledgers_or_not_accounted_for() {
    let driver = machine();
    let known = buffer(&driver, "known", 6 * MIB);
    let foreign = driver.mem_alloc(0, 10 * MIB).unwrap();
    let report = Report::of(vec![Ledger::of(&driver)], Vec::new(), Some(&driver));
    let gpu = &report.gpus[0];
    assert_eq!((gpu.used, gpu.accounted), (gpu.unaccounted, 0));
    assert!(gpu.used >= Some(10 * MIB) && gpu.used <= gpu.total && gpu.why.is_none());
    let node = its_node(&report);
    assert_eq!(
        (node.used, node.accounted, node.unaccounted),
        (6 * MIB, 6 * MIB, Some(0))
    );
    let text = report.to_text();
    assert_eq!(report.kept, []);
    for words in ["known", "NOT ACCOUNTED FOR", "node 1", "GPU 0"] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    // SAFETY: allocated above, and used by nothing.
    unsafe { driver.mem_free(0, foreign).unwrap() };
    drop(known);
}

/// A node's total is the one that `egmem topo` shows.
#[test]
fn nodes_have_the_topologys_totals() {
    use crate::topology::Topology;

    let driver = machine();
    for (driver, topology) in [
        (Some(&driver), Topology::discover(&driver).unwrap()),
        (None, Topology::of_host()),
    ] {
        let report = Report::of(Vec::new(), Vec::new(), driver);
        let totals: Vec<_> = report
            .nodes
            .iter()
            .map(|node| (node.node, node.total))
            .collect();
        let expected = topology
            .nodes()
            .iter()
            .map(|node| (node.id, node.memory_total));
        assert_eq!(totals, expected.collect::<Vec<_>>());
    }
}

#[test]
fn this_process_is_shown_once_and_only_with_allocations() {
    use crate::report::add_own;

    let driver = machine();
    let kept = buffer(&driver, "own", 2 * MIB);
    let own = Ledger::of(&driver);
    let mut other = own.clone();
    (other.process.pid, other.process.instance) = (1, None);
    let mut processes = vec![other.clone(), own.clone()];
    add_own(&mut processes, own.clone());
    assert_eq!(processes, [other.clone(), own.clone()]);
    let mut processes = vec![other.clone()];
    add_own(&mut processes, own.clone());
    assert_eq!(processes, [other, own]);
    drop(kept);
    let mut processes = Vec::new();
    add_own(&mut processes, Ledger::of(&driver));
    assert_eq!(processes, []);
}

#[test]
fn managed_memory_is_no_locations() {
    let driver = machine();
    let gpu = Location::Device(0);
    let entries = [
        entry(&driver, AllocPath::Managed, gpu, 6 * MIB),
        entry(&driver, AllocPath::Device, gpu, 2 * MIB),
    ];
    let mut ledger = Ledger::of(&driver);
    let total = &ledger.totals[0];
    assert_eq!((total.own, total.managed), (2 * MIB, 6 * MIB));
    let svg = ledger.to_svg();
    assert!(svg.contains(">managed, GPU 0<") && svg.contains(">GPU 0<"));
    // Sent whole or not.
    for omitted in [0, 2] {
        ledger.omitted = omitted;
        if omitted > 0 {
            ledger.allocations.clear();
        }
        let report = Report::of(vec![ledger.clone()], Vec::new(), Some(&driver));
        let found = &report.gpus[0];
        assert_eq!((found.accounted, found.managed), (2 * MIB, 6 * MIB));
        assert_eq!(report.gpus[1].managed, 0);
        assert!(report.to_text().contains("MANAGED"));
    }
    drop(entries);
}

/// The driver does not report the node of pinned memory. The process's own pages are in the kernel's counters.
#[test]
fn pinned_memory_is_the_only_nodes() {
    for (machine, accounted) in [(Machine::gh200(), 2 * MIB), (Machine::gh200x4(), 0)] {
        let driver = Driver::simulated(machine).unwrap();
        let paths = [AllocPath::Pinned, AllocPath::Registered, AllocPath::System];
        let entries = paths.map(|path| entry(&driver, path, Location::Host, 2 * MIB));
        let report = Report::of(vec![Ledger::of(&driver)], Vec::new(), Some(&driver));
        assert_eq!(report.nodes[0].accounted, accounted);
        drop(entries);
    }
}

/// The importer of registered memory has pages as its own, which the kernel counts.
#[test]
fn imported_pages_are_in_the_kernels_counters() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    for (backing, accounted) in [(Backing::Driver, 2 * MIB), (Backing::Registered, 0)] {
        let options = PhysicalMemory::options(NodeId(0)).backing(backing);
        let options = options.handle_types(HandleTypes::POSIX_FD);
        let memory = options.create(&driver, 2 * MIB).unwrap();
        let fd = memory.export(HandleType::PosixFd).unwrap();
        let imported = PhysicalMemory::import(&driver, &fd, 2 * MIB).unwrap();
        let origin = Imported {
            from: None,
            identity: Some(memory.identity().unwrap()),
        };
        imported.imported_from(origin, None, Site::unknown());
        // Its exporter ends.
        drop(memory);
        let ledger = Ledger::of(&driver);
        assert_eq!(ledger.allocations[0].path, AllocPath::Import);
        let report = Report::of(vec![ledger], Vec::new(), Some(&driver));
        assert_eq!(report.nodes[0].accounted, accounted);
        assert_eq!(report.kept.len(), 1);
    }
}

/// The kernel counts it, and no ledger again.
#[test]
fn registered_memory_is_the_processes_own_and_the_sums_of_its_node_add_up() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let of = |backing, bytes| {
        let options = Buffer::on(NodeId(0)).backing(backing).bytes(bytes);
        options
            .label(backing.to_string())
            .allocate(&driver)
            .unwrap()
    };
    let memory = [
        of(Backing::Driver, 4 * MIB),
        of(Backing::Registered, 6 * MIB),
        of(Backing::Auto, 2 * MIB),
    ];
    let ledger = Ledger::of(&driver);
    let report = Report::of(vec![ledger.clone()], Vec::new(), Some(&driver));
    let node = &report.nodes[0];
    assert_eq!((node.used, node.accounted), (12 * MIB, 4 * MIB));
    assert_eq!((node.kernel, node.unaccounted), (Some(8 * MIB), Some(0)));
    let text = report.to_text();
    let row = text.lines().find(|line| line.contains("6 MiB")).unwrap();
    assert!(
        row.contains("node 0") && row.contains("registered"),
        "{text}"
    );

    let json = serde_json::to_value(&ledger).unwrap();
    let backing = |label: &str| {
        let entries = json["allocations"].as_array().unwrap().iter();
        let mut of_label = entries.filter(|entry| entry["label"] == label);
        let entry = of_label.next().unwrap();
        (entry["path"].clone(), entry["backing"]["why"].clone())
    };
    assert_eq!(backing("driver"), ("vmm".into(), Value::Null));
    assert_eq!(backing("registered"), ("registered".into(), "asked".into()));
    assert_eq!(backing("auto"), ("registered".into(), "faster".into()));
    drop(memory);
    let report = Report::of(vec![Ledger::of(&driver)], Vec::new(), Some(&driver));
    assert_eq!((report.nodes[0].used, report.nodes[0].kernel), (0, None));
}

/// A ledger with one import of the identity.
fn importer(pid: u32, identity: Identity, from: Option<Party>) -> Ledger {
    let driver = machine();
    let _memory = buffer(&driver, "imported", 2 * MIB);
    let mut ledger = Ledger::of(&driver);
    ledger.process.pid = pid;
    ledger.process.instance = None;
    let entry: &mut Allocation = &mut ledger.allocations[0];
    entry.path = AllocPath::Import;
    entry.imported = Some(Imported {
        from,
        identity: Some(identity),
    });
    ledger
}

#[test]
fn memory_of_ended_exporters_is_named_with_who_keeps_it() {
    let party = |pid| Party {
        pid: Some(pid),
        name: format!("process {pid}"),
    };
    let identity = |boot, allocation| Identity {
        boot,
        instance: InstanceId::from_bytes([7; 16]),
        allocation,
        generation: 0,
    };
    let here = BootId::current().unwrap();
    let this = std::process::id();
    let ledgers = vec![
        importer(1, identity(here, 1), Some(party(u32::MAX))),
        importer(2, identity(here, 1), Some(party(u32::MAX))),
        importer(3, identity(here, 2), Some(party(this))),
        importer(4, identity(BootId::from_bytes([1; 16]), 3), None),
        importer(5, identity(here, 4), None),
    ];
    let driver = machine();
    let report = Report::of(ledgers.clone(), Vec::new(), Some(&driver));
    let found: Vec<_> = report
        .kept
        .iter()
        .map(|kept| (&kept.exporter, kept.importers.len()))
        .collect();
    let expected = [
        (&Exporter::Ended(party(u32::MAX)), 2),
        (&Exporter::Running(party(this)), 1),
        (&Exporter::Elsewhere(None), 1),
        (&Exporter::Unknown(None), 1),
    ];
    assert_eq!(found, expected);
    assert!(
        report
            .to_text()
            .contains(&format!("ended: process {}", u32::MAX))
    );
    let node = its_node(&report);
    assert_eq!(
        node.accounted,
        8 * MIB,
        "two imports of one memory count once"
    );

    // With the exporter's own entry, nothing is kept by importers alone.
    let mut owner = importer(6, identity(here, 1), None);
    let entry = &mut owner.allocations[0];
    (entry.path, entry.imported, entry.identity) = (AllocPath::Vmm, None, Some(identity(here, 1)));
    let mut ledgers = ledgers;
    ledgers.push(owner);
    let report = Report::of(ledgers, Vec::new(), Some(&driver));
    assert_eq!(report.kept.len(), 3);
    let node = its_node(&report);
    assert_eq!(node.accounted, 8 * MIB);
}

#[test]
fn a_new_process_with_an_old_id_is_not_the_exporter() {
    let this = Party {
        pid: Some(std::process::id()),
        name: "the exporter".into(),
    };
    let identity = Identity {
        boot: BootId::current().unwrap(),
        instance: InstanceId::from_bytes([7; 16]),
        allocation: 1,
        generation: 0,
    };
    let mut ledger = importer(1, identity, Some(this.clone()));
    // Imported before this process began.
    ledger.allocations[0].age_ms = u64::MAX;
    let report = Report::of(vec![ledger], Vec::new(), None);
    assert_eq!(report.kept[0].exporter, Exporter::Ended(this));
}
