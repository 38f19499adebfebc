//! The generator, the runner and the comparison, on the simulator.

use std::collections::BTreeMap;

use egmem::driver::Call;
use egmem::{Driver, Machine};
use egmem_tests::drivers::half_of_the_addresses;
use egmem_trace::{
    Addr, Memory, Op, Outcome, Record, Recorded, Sequence, Shape, Value, compare, generate, run,
};

const SHAPE: Shape = Shape {
    len: 64,
    devices: 1,
};

fn h200() -> Driver {
    Driver::simulated(Machine::h200x8()).unwrap()
}

#[test]
fn a_seed_makes_one_sequence_of_the_length_asked_for() {
    for seed in 0..50 {
        let sequence = generate(seed, &SHAPE);
        assert_eq!(sequence.ops.len(), 64);
        assert_eq!(sequence, generate(seed, &SHAPE));
        assert_ne!(sequence.ops, generate(seed + 1, &SHAPE).ops);
    }
}

#[test]
fn sequences_and_records_survive_json() {
    let _room = half_of_the_addresses();
    let driver = h200();
    for seed in 0..20 {
        let sequence = generate(seed, &SHAPE);
        let record = run(&driver, &sequence);
        let recorded = Recorded::new(sequence.clone(), record.clone());
        let text = serde_json::to_string(&recorded).unwrap();
        let read: Recorded = serde_json::from_str(&text).unwrap();
        assert_eq!(read.split(), (sequence, record));
    }
}

#[test]
fn every_preset_answers_a_sequence_the_same_every_time_eager_or_lazy() {
    let _room = half_of_the_addresses();
    for preset in Machine::PRESETS {
        let machine = Machine::preset(preset).unwrap();
        let devices = machine.gpus.len() as i32;
        let shape = Shape { devices, ..SHAPE };
        let (eager, lazy) = (
            Driver::simulated(machine.clone()).unwrap(),
            Driver::simulated(machine).unwrap(),
        );
        eager.sim().unwrap().set_eager(true);
        lazy.sim().unwrap().set_eager(false);
        for seed in 0..20 {
            let sequence = generate(seed, &shape);
            let records = [&eager, &lazy, &lazy].map(|driver| run(driver, &sequence));
            for record in &records {
                assert_eq!(record.left, [""; 0], "{preset}, sequence {seed}");
                let differences = compare(&sequence, &records[0], record);
                assert!(differences.is_empty(), "{preset}: {}", differences[0]);
            }
            for driver in [&eager, &lazy] {
                let held = driver.sim().unwrap().held();
                assert!(held.is_empty(), "{preset}, sequence {seed}: {held:?}");
            }
        }
    }
}

/// Kinds that can only succeed, or that the runner makes only where they do.
const CANNOT_FAIL: &[&str] = &[
    "release",
    "granularity",
    "properties",
    "export",
    "pool_destroy",
    "pool_get",
    "pool_trim",
    "pool_export",
    "pool_free",
    "stream_destroy",
    "stream_synchronize",
    "stream_query",
    "stream_wait_event",
    "event_destroy",
    "event_record",
    "event_synchronize",
    "event_query",
    "free_plain",
    "cpu_write",
    "cpu_read",
];

/// Kinds that the simulated machines refuse always: they make no DMA-BUF.
const CANNOT_SUCCEED: &[&str] = &["dma_buf"];

#[test]
fn every_kind_of_operation_succeeds_and_fails_and_few_are_skipped() {
    let _room = half_of_the_addresses();
    let driver = h200();
    let mut counts: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    for seed in 1..=240 {
        let sequence = generate(seed, &SHAPE);
        let record = run(&driver, &sequence);
        for (op, outcome) in sequence.ops.iter().zip(&record.outcomes) {
            let column = match outcome {
                Outcome::Done(_) => 0,
                Outcome::Failed(_) => 1,
                Outcome::Skipped => 2,
                Outcome::Refused(error) => panic!("{op:?}: {error}"),
            };
            counts.entry(op.kind()).or_default()[column] += 1;
        }
    }
    let (mut wrong, mut all, mut all_skipped) = (Vec::new(), 0, 0);
    for (kind, [done, failed, skipped]) in &counts {
        println!("{kind:>20} {done:>6} {failed:>6} {skipped:>6}");
        let fails_enough = *failed > 10 || CANNOT_FAIL.contains(kind);
        let succeeds_enough = *done > 10 || CANNOT_SUCCEED.contains(kind);
        if !succeeds_enough || !fails_enough || skipped * 2 > done + failed {
            wrong.push(*kind);
        }
        all += done + failed + skipped;
        all_skipped += skipped;
    }
    assert!(wrong.is_empty(), "too rarely of one kind: {wrong:?}");
    assert!(
        all_skipped * 12 < all,
        "{all_skipped} of {all} were skipped"
    );
    // All 53 kinds: a new one must be generated, or nothing records it.
    assert_eq!(counts.len(), 53);
}

#[test]
fn a_driver_that_answers_otherwise_is_found_with_the_history() {
    let _room = half_of_the_addresses();
    let driver = h200();
    let sequence = generate(7, &SHAPE);
    let expected = run(&driver, &sequence);
    let index = sequence
        .ops
        .iter()
        .zip(&expected.outcomes)
        .position(|(op, outcome)| matches!(op, Op::Map { .. }) && outcome.is_done())
        .unwrap();
    let earlier = sequence.ops[..=index]
        .iter()
        .zip(&expected.outcomes)
        .filter(|(op, outcome)| matches!(op, Op::Map { .. }) && **outcome != Outcome::Skipped)
        .count();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemMap, earlier as u64, egmem::driver::Code(4242));
    let found = run(&driver, &sequence);
    let differences = compare(&sequence, &expected, &found);
    let first = &differences[0];
    assert_eq!((first.index, &first.found), (index, &Outcome::Failed(4242)));
    let report = first.to_string();
    for word in ["Create", "Reserve", "unknown code 4242", "success"] {
        assert!(report.contains(word), "no '{word}' in:\n{report}");
    }
    // The operations after an unknown answer were skipped or failed, and all was given back.
    assert_eq!(found.left, [""; 0]);
    assert!(sim.held().is_empty());
}

#[test]
fn different_outputs_and_missing_answers_are_differences() {
    let sequence = Sequence {
        seed: 0,
        devices: 1,
        ops: vec![Op::CanAccessPeer { device: 0, peer: 0 }; 2],
    };
    let record = |values: &[u64]| Record {
        outcomes: values
            .iter()
            .map(|value| Outcome::Done(vec![Value::Number(*value)]))
            .collect(),
        left: Vec::new(),
    };
    let count = |found| compare(&sequence, &record(&[1, 1]), &record(found)).len();
    assert_eq!(count(&[1, 1]), 0);
    assert_eq!(count(&[1, 0]), 1);
    assert_eq!(count(&[1]), 1);
}

#[test]
fn sequences_by_hand_cannot_reach_memory_that_is_not_theirs() {
    let _room = half_of_the_addresses();
    // Outside the range, beyond its end, and on mappings without access: skipped, not tried.
    let at = |of, offset| Addr { of, offset };
    let range = Memory::Range(0);
    let sequence = Sequence {
        seed: 0,
        devices: 1,
        ops: vec![
            Op::Reserve {
                out: 0,
                size: 2 << 20,
                alignment: 0,
                hint: None,
            },
            Op::Unmap {
                at: at(range, 0),
                size: 4 << 20,
            },
            Op::Unmap {
                at: at(Memory::Nowhere, 1 << 30),
                size: 2 << 20,
            },
            Op::CpuRead {
                at: at(range, 0),
                words: 1,
            },
            Op::CpuWrite {
                at: at(range, u64::MAX),
                words: 1,
                seed: 0,
            },
            Op::Memset {
                at: at(range, 0),
                value: 0,
                bytes: 8,
                stream: None,
            },
            Op::CpuRead {
                at: at(Memory::Nowhere, 0),
                words: u64::MAX,
            },
        ],
    };
    let record = run(&h200(), &sequence);
    assert!(record.outcomes[0].is_done());
    for outcome in &record.outcomes[1..] {
        assert_eq!(*outcome, Outcome::Skipped);
    }
    assert_eq!(record.left, [""; 0]);
}
