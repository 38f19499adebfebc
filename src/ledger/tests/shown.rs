//! Tables and drawings, also of data that no honest process sends.

use super::*;
use crate::entries::Party;
use crate::{Ledger, Report};

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

#[test]
fn a_table_has_one_line_for_allocations_that_are_alike() {
    let driver = machine();
    let buffers = several(&driver, "parts", 3);
    let other = buffer(&driver, "other", 2 * MIB);
    let text = Ledger::of(&driver).to_text();
    let row = |label: &str| {
        let lines: Vec<&str> = text.lines().filter(|line| line.contains(label)).collect();
        assert_eq!(lines.len(), 1, "{text}");
        lines[0].split_whitespace().take(3).collect::<Vec<_>>()
    };
    assert_eq!(row("parts"), ["3", "12", "MiB"]);
    assert_eq!(row("other"), ["1", "2", "MiB"]);
    drop((buffers, other));
}

/// Ledgers with long names, on a machine with 8 GPUs, in several processes.
fn crowded() -> (Driver, Report) {
    use crate::Process;
    use crate::entries::{CallSite, called_from};

    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let folder = "/home/somebody/projects/a-long-name/experiments".repeat(3);
    let buffers: Vec<_> = (0..4_u64)
        .map(|n| {
            let site = CallSite::new(format!("{folder}/train-{n}.py"), 187);
            let label = format!("{n}: {}", "key/value cache of layer ".repeat(5));
            called_from(Some(site), || {
                let buffer = Buffer::on(NodeId(0)).bytes((n + 1) * 2 * MIB).label(label);
                buffer
                    .access_by((0..8).map(Location::Device))
                    .allocate(&driver)
            })
        })
        .collect();
    let mut ledgers = vec![Ledger::of(&driver); 3];
    drop(buffers);
    for (pid, ledger) in [7, 70_000, 4_194_304].into_iter().zip(&mut ledgers) {
        ledger.process.pid = pid;
        ledger.process.command = format!("python3 {folder}/train.py {}", "--option ".repeat(9));
        ledger.process.instance = Process::current().instance;
        ledger.allocations[0].exported_to = vec![Party {
            pid: Some(1),
            name: "process 4194304 of user 4294967294 in another container".into(),
        }];
    }
    let report = Report::of(ledgers, Vec::new(), Some(&driver));
    (driver, report)
}

#[test]
fn lines_have_at_most_100_columns_unless_they_are_wide() {
    let (_driver, report) = crowded();
    let text = report.to_text();
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    for words in [
        "process 4194304 (python3 /home",
        "4 allocations",
        "CPU, GPUs 0–7",
        "…",
        "train-3.py:187",
        "GPU 7",
        "SHARED",
    ] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    let row = text.lines().nth(2).unwrap();
    assert!(
        row.contains("8 MiB") && row.contains("train-3"),
        "the largest first: {row}"
    );
    let wide = report.to_wide_text();
    for entry in &report.processes[0].allocations {
        assert!(wide.contains(&entry.site.as_ref().unwrap().to_string()));
        assert!(wide.contains(entry.label.as_ref().unwrap()));
        assert!(wide.contains(&format!("{:#x}", entry.mapped[0].start)));
    }
    assert!(wide.contains(&report.processes[2].process.command));
}

#[test]
fn numbers_of_one_are_singular_and_commands_are_escaped() {
    let driver = machine();
    let _buffer = buffer(&driver, "one", 2 * MIB);
    let mut ledger = Ledger::of(&driver);
    ledger.process.command = "python \u{1b}[2Jtrain.py".into();
    let text = ledger.to_text();
    assert!(text.contains("): 1 allocation\n"), "{text}");
    assert!(
        text.contains("train.py") && !text.contains('\u{1b}'),
        "{text}"
    );
    ledger.process.command.clear();
    let name = format!("({}): ", ledger.process.name);
    assert!(
        ledger.to_text().contains(&name),
        "without a command line the name is shown"
    );
}

#[test]
fn long_texts_of_other_processes_are_shown_cut_and_newer_paths_are_kept() {
    let driver = machine();
    let _buffer = buffer(&driver, "LABEL", 2 * MIB);
    let mut ledger = Ledger::of(&driver);
    let party = |name: &str| Party {
        pid: None,
        name: name.into(),
    };
    ledger.process.name = "NAME".into();
    ledger.process.command = "COMMAND".into();
    let entry = &mut ledger.allocations[0];
    entry.exported_to = vec![party("PARTY")];
    entry.site.as_mut().unwrap().file = "FILE".into();
    let mut text = serde_json::to_string(&ledger).unwrap();
    for name in ["NAME", "COMMAND", "LABEL", "PARTY", "FILE", "simulated"] {
        let long = format!("{name}{}", "ä".repeat(5000));
        text = text.replace(name, &long);
    }
    let frames = format!("\"backtrace\":\"{}\"", "f".repeat(1 << 20));
    text = text.replace("\"backtrace\":null", &frames);
    text = text.replace("{\"vmm\":2097152}", "{\"newer\":1,\"new\":2,\"vmm\":3}");
    text = text.replace("\"path\":\"vmm\"", "\"path\":\"newer\"");
    let read: Ledger = serde_json::from_str(&text).unwrap();
    let entry = &read.allocations[0];
    assert_eq!(entry.path, AllocPath::Other);
    let by_path = [(AllocPath::Vmm, 3), (AllocPath::Other, 3)];
    assert_eq!(read.totals[0].by_path, by_path.into());
    let site = entry.site.as_ref().unwrap();
    assert!(site.file.starts_with("FILEä"));
    for line in read.to_text().lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
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

/// Checks that tags are closed in order. A picture needs no more to be well-formed here.
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
    assert_eq!(svg.matches("class=\"part c0\"").count(), 2);
    assert!(svg.contains("a &lt;b&gt; &amp;") && !svg.contains("<b>"));
    let report = Report::of(vec![ledger], Vec::new(), Some(&driver));
    let svg = report.to_svg();
    expect_well_formed(&svg);
    assert!(svg.contains("GPU 3") && svg.contains("are accounted for"));
    drop(buffers);
    expect_well_formed(&Ledger::of(&driver).to_svg());
}
