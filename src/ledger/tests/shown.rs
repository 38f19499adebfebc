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

#[test]
fn texts_of_other_processes_are_cut_and_newer_paths_are_kept() {
    let driver = machine();
    let _buffer = buffer(&driver, "LABEL", 2 * MIB);
    let mut ledger = Ledger::of(&driver);
    let party = |name: &str| Party {
        pid: None,
        name: name.into(),
    };
    ledger.process.name = "NAME".into();
    let entry = &mut ledger.allocations[0];
    entry.exported_to = vec![party("PARTY")];
    entry.site.as_mut().unwrap().file = "FILE".into();
    let mut text = serde_json::to_string(&ledger).unwrap();
    for name in ["NAME", "LABEL", "PARTY", "FILE", "simulated"] {
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
    let names = [
        &read.process.name,
        &read.totals[0].driver,
        &entry.driver,
        &entry.exported_to[0].name,
        &site.file,
        entry.label.as_ref().unwrap(),
    ];
    for name in names {
        assert!((500..=512).contains(&name.len()), "{}", name.len());
    }
    let frames = site.backtrace.as_ref().unwrap().to_string();
    assert_eq!(frames.len(), 64 << 10);
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
    assert_eq!(svg.matches("class=\"part v\"").count(), 2);
    assert!(svg.contains("a &lt;b&gt; &amp;") && !svg.contains("<b>"));
    let report = Report::of(vec![ledger], Vec::new(), Some(&driver));
    let svg = report.to_svg();
    expect_well_formed(&svg);
    assert!(svg.contains("GPU 3") && svg.contains("are accounted for"));
    drop(buffers);
    expect_well_formed(&Ledger::of(&driver).to_svg());
}
