//! Ledgers over processes, as one process can show it: with memory of a simulated machine, in folders of its own.

use std::path::Path;

use egmem_core::{Buffer, Driver, Machine};
use egmem_share::{BootId, Identity, InstanceId};

use crate::ask::Found;
use crate::driver::{Access, HandleTypes, Location, NodeId};
use crate::entries::{AllocPath, Allocation, Entry, Imported, NewEntry, Party};
use crate::ledger::Process;
use crate::offer::{encode, offer_in};
use crate::report::Exporter;
use crate::{Ledger, Report, Silent};

const MIB: u64 = 1 << 20;

fn machine() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

fn buffer(driver: &Driver, label: &str, bytes: u64) -> Buffer {
    let buffer = Buffer::on(NodeId(1)).bytes(bytes).label(label);
    let buffer = buffer.handle_types(HandleTypes::POSIX_FD);
    buffer
        .access(Location::Device(0), Access::Read)
        .allocate(driver)
        .unwrap()
}

fn ask(folder: &Path) -> (Vec<Ledger>, Vec<Silent>) {
    let mut found = Found::new(64 << 20);
    found.look_in(folder).unwrap();
    (found.ledgers, found.silent)
}

fn folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;

    let mode = PermissionsExt::from_mode(0o700);
    tempfile::Builder::new()
        .permissions(mode)
        .tempdir()
        .unwrap()
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_ledger_is_offered_until_the_offer_ends() {
    let (driver, folder) = (machine(), folder());
    let kept = buffer(&driver, "offered <1>", 3 * MIB);
    let offer = offer_in(folder.path()).unwrap();
    for _ in 0..3 {
        let (ledgers, silent) = ask(folder.path());
        assert!(silent.is_empty(), "{silent:?}");
        let [ledger] = &ledgers[..] else {
            panic!("{ledgers:?}")
        };
        assert_eq!(ledger.process, Process::current());
        let mut entries = ledger.allocations.iter();
        let entry = entries.find(|entry| entry.label.as_deref() == Some("offered <1>"));
        assert_eq!(entry.unwrap().bytes, 4 * MIB);
    }
    assert_eq!(files(folder.path()), 1);
    drop(offer);
    assert_eq!(files(folder.path()), 0);
    assert_eq!(ask(folder.path()), (Vec::new(), Vec::new()));
    drop(kept);
}

#[test]
fn all_ledgers_together_are_bounded() {
    let folder = folder();
    // Far more than other tests have meanwhile.
    let driver = machine();
    let entry = |_| {
        Entry::new(NewEntry {
            driver: &driver,
            bytes: 1,
            location: Location::Host,
            path: AllocPath::Pinned,
            label: None,
            site: None,
        })
    };
    let entries: Vec<Entry> = (0..1000).map(entry).collect();
    let own = encode(Ledger::of(&driver), usize::MAX).unwrap().len();
    let offers = [(); 3].map(|()| offer_in(folder.path()).unwrap());
    // Room for one ledger, not for two.
    let mut found = Found::new(own * 3 / 2);
    found.look_in(folder.path()).unwrap();
    assert_eq!((found.ledgers.len(), found.silent.len()), (1, 2));
    assert!(
        found.silent[0].why.starts_with("not asked: the limit of"),
        "{:?}",
        found.silent
    );
    drop(entries);
    drop(offers);
}

#[test]
fn processes_are_asked_at_once() {
    use std::sync::{Arc, Barrier};

    use egmem_share::{Listener, Peers};

    let folder = folder();
    let both_asked = Arc::new(Barrier::new(2));
    let answers = [1, 2].map(|n| {
        let path = folder.path().join(format!("ps-{n}-00.sock"));
        let listener = Listener::bind(path, Peers::same_user()).unwrap();
        let both_asked = Arc::clone(&both_asked);
        std::thread::spawn(move || {
            let mut channel = listener.accept().unwrap();
            both_asked.wait();
            let text = encode(Ledger::of(&machine()), usize::MAX).unwrap();
            channel.send_text(&text).unwrap();
        })
    });
    let (ledgers, silent) = ask(folder.path());
    assert_eq!((ledgers.len(), silent), (2, Vec::new()));
    for answer in answers {
        answer.join().unwrap();
    }
}

#[test]
fn a_dead_processs_socket_is_removed_and_a_mute_one_is_named() {
    use std::os::unix::net::UnixListener;

    let folder = folder();
    let pid = std::process::id();
    // As after a crash: the file is there, and nothing listens.
    let dead = folder.path().join(format!("ps-{}-00.sock", u32::MAX));
    drop(UnixListener::bind(&dead).unwrap());
    let starting = folder.path().join(format!("ps-{pid}-00.sock"));
    drop(UnixListener::bind(&starting).unwrap());
    std::fs::write(folder.path().join("other"), "").unwrap();
    let (ledgers, silent) = ask(folder.path());
    assert!(ledgers.is_empty() && !dead.exists() && starting.exists());
    let [one] = &silent[..] else {
        panic!("{silent:?}")
    };
    assert_eq!((one.pid, &one.path), (Some(pid), &starting));

    std::fs::remove_file(&starting).unwrap();
    let mute = UnixListener::bind(&starting).unwrap();
    let answers = std::thread::spawn(move || {
        use std::io::Write;
        // No frame: a length beyond the largest.
        mute.accept().unwrap().0.write_all(&[0xff; 64]).unwrap();
    });
    let (_, silent) = ask(folder.path());
    answers.join().unwrap();
    assert!(silent[0].why.contains("a frame of"), "{silent:?}");
}

#[test]
fn only_an_own_folder_is_read() {
    use std::os::unix::fs::PermissionsExt;

    let folder = folder();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o770)).unwrap();
    assert!(Found::new(1).look_in(folder.path()).is_err());
    let none = folder.path().join("none");
    assert!(Found::new(1).look_in(&none).is_ok());
}

#[test]
fn a_ledger_that_is_sent_has_the_largest_allocations_and_all_sums() {
    let driver = machine();
    let buffers: Vec<_> = (1..=20)
        .map(|n| buffer(&driver, "many", n * 2 * MIB))
        .collect();
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
    let node = report
        .nodes
        .iter()
        .find(|node| node.node == NodeId(1))
        .unwrap();
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
    let node = report
        .nodes
        .iter()
        .find(|node| node.node == NodeId(1))
        .unwrap();
    assert_eq!(
        (node.used, node.accounted, node.unaccounted),
        (6 * MIB, 6 * MIB, Some(0))
    );
    let text = report.to_text();
    assert_eq!(report.kept, []);
    for words in ["known", "NOT ACCOUNTED FOR", "host NUMA node 1", "GPU 0"] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    // SAFETY: allocated above, and used by nothing.
    unsafe { driver.mem_free(0, foreign).unwrap() };
    drop(known);
}

#[test]
fn what_the_driver_refuses_hides_no_ledger() {
    use crate::driver::{Call, Code};

    let driver = machine();
    let kept = buffer(&driver, "still shown", 2 * MIB);
    let sim = driver.sim().unwrap();
    let report = || {
        let report = Report::of(vec![Ledger::of(&driver)], Vec::new(), Some(&driver));
        assert!(report.to_text().contains("still shown"));
        expect_well_formed(&report.to_svg());
        report
    };
    // A full GPU has no memory for a context.
    sim.fail(Call::MemGetInfo, 2, Code::OUT_OF_MEMORY);
    let full = report();
    assert_eq!((full.gpus.len(), full.gpus[0].why.as_ref()), (4, None));
    let gpu = &full.gpus[1];
    assert_eq!((gpu.used, gpu.unaccounted), (None, None));
    assert_eq!(gpu.total, full.gpus[0].total);
    let why = gpu.why.clone().unwrap();
    assert!(full.to_text().contains(&format!("GPU 1: {why}")), "{why}");

    for nth in [1, 2] {
        sim.fail(Call::DeviceGetCount, nth, Code::UNKNOWN);
        let refused = report();
        assert_eq!(refused.warnings.len(), 1, "{refused:?}");
        assert!(refused.to_text().contains(&refused.warnings[0]));
        assert_eq!(sim.cancel_all(), 0);
    }
    drop(kept);
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
    let node = report
        .nodes
        .iter()
        .find(|node| node.node == NodeId(1))
        .unwrap();
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
    let node = report
        .nodes
        .iter()
        .find(|node| node.node == NodeId(1))
        .unwrap();
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

#[test]
fn a_table_has_one_line_for_allocations_that_are_alike() {
    let driver = machine();
    let buffers: Vec<_> = (1..=3)
        .map(|n| buffer(&driver, "parts", n * 2 * MIB))
        .collect();
    let other = buffer(&driver, "other", 2 * MIB);
    let text = Ledger::of(&driver).to_text();
    let row = |label: &str| {
        let lines: Vec<&str> = text.lines().filter(|line| line.contains(label)).collect();
        assert_eq!(lines.len(), 1, "{text}");
        lines[0]
            .split_whitespace()
            .skip(1)
            .take(3)
            .collect::<Vec<_>>()
    };
    assert_eq!(row("parts"), ["3", "12", "MiB"]);
    assert_eq!(row("other"), ["1", "2", "MiB"]);
    drop((buffers, other));
}

/// A process may send anything.
#[test]
fn impossible_ledgers_are_shown_without_a_panic() {
    let driver = machine();
    let _buffers = [(); 2].map(|()| buffer(&driver, "x\u{1b}[2J\n<", 2 * MIB));
    let mut ledger = Ledger::of(&driver);
    ledger.process.name = "\u{202e}evil\n".into();
    ledger.process.instance = None;
    ledger.allocations[0].label = Some("l".repeat(70_000));
    ledger.allocations[1].site = None;
    ledger.totals[0].driver = "d".repeat(70_000);
    ledger.omitted = u64::MAX;
    for entry in &mut ledger.allocations {
        (entry.bytes, entry.age_ms) = (u64::MAX, u64::MAX);
        entry.mapped[0].start = u64::MAX;
    }
    ledger.totals[0].own = u64::MAX;
    let ledgers = vec![ledger.clone(), ledger];
    let report = Report::of(ledgers, Vec::new(), Some(&driver));
    let text = report.to_text();
    assert!(
        !text.contains('\u{1b}') && !text.contains('\u{202e}'),
        "{text}"
    );
    expect_well_formed(&report.to_svg());
}

/// Checks that tags are closed in order, which is what a picture's well-formedness needs here.
fn expect_well_formed(svg: &str) {
    let mut open = Vec::new();
    for tag in svg.split('<').skip(1) {
        let (inside, _) = tag.split_once('>').expect("a tag ends");
        let name = inside
            .trim_start_matches('/')
            .split([' ', '\n', '/'])
            .next()
            .unwrap();
        match inside {
            _ if inside.starts_with('/') => assert_eq!(open.pop(), Some(name), "{inside}"),
            _ if inside.ends_with('/') => {}
            _ => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn drawings_show_each_allocation_and_escape_its_name() {
    let driver = machine();
    let buffers = [
        buffer(&driver, "a <b> & \"c\"", 2 * MIB),
        buffer(&driver, "d", 2 * MIB),
    ];
    let ledger = Ledger::of(&driver);
    let svg = ledger.to_svg();
    expect_well_formed(&svg);
    assert_eq!(svg.matches("class=\"part v\"").count(), 2);
    assert!(svg.contains("a &lt;b&gt; &amp;") && !svg.contains("<b>"));
    let report = Report::of(vec![ledger], Vec::new(), Some(&driver));
    let svg = report.to_svg();
    expect_well_formed(&svg);
    assert!(svg.contains("GPU 3") && svg.contains("are accounted for"));
    drop(buffers);
    expect_well_formed(&Ledger::of(&driver).to_svg());
}
