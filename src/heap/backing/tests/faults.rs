//! Each driver call fails in turn, once or permanently.

use egmem_core::Backing as Kind;

use super::*;

const CODES: [Code; 4] = [
    Code::OUT_OF_MEMORY,
    Code::NOT_PERMITTED,
    Code::INVALID_VALUE,
    Code(77_777),
];

/// Runs a heap from creation to drop; checks that a growth that fails leaves the chunks as they were.
fn run_to_drop(driver: &Driver, plan: &Plan) -> Result<()> {
    let mut backing = Backing::new(driver, plan)?;
    let before = |backing: &Backing| (chunks(backing), backing.backed());
    for want in [
        block(10 * MIB),
        Want::More { bytes: 9 * MIB },
        block(3 * MIB),
    ] {
        let had = before(&backing);
        if let Err(error) = backing.grow(want) {
            assert_eq!(before(&backing), had, "a failed growth left something");
            return Err(error);
        }
    }
    for range in [4 * MIB..12 * MIB, 0..64 * MIB] {
        let had = chunks(&backing);
        let given = give_back(&mut backing, range);
        let kept = chunks(&backing);
        for chunk in had {
            let bytes = chunk.start * MIB..chunk.end * MIB;
            assert_eq!(given.gone.contains(&bytes), !kept.contains(&chunk));
        }
        if let Some(error) = given.error {
            return Err(error);
        }
    }
    assert_eq!(backing.backed(), 0);
    Ok(())
}

fn plans() -> Vec<Plan> {
    let spread = Plan {
        nodes: [0, 1].map(Location::HostNuma).to_vec(),
        ..plan(64, 4)
    };
    let fds = Plan {
        handle_types: HandleTypes::POSIX_FD,
        ..plan(64, 4)
    };
    let plans = [plan(64, 4), spread, fds, plan(0, 4)];
    let registered = plans.clone().map(|plan| Plan {
        backing: Kind::Registered,
        ..plan
    });
    plans.into_iter().chain(registered).collect()
}

/// Returns whether the run may succeed despite the fault.
fn may_be_survived(call: Call, code: Code, plan: &Plan) -> bool {
    match call {
        // Captures are left alone where the driver knows of them.
        Call::ThreadExchangeStreamCaptureMode => true,
        // These calls are retried, and a chunk that was not needed may fail.
        Call::MemUnmap | Call::MemRelease | Call::MemAddressFree => true,
        Call::MemGetAllocationGranularity | Call::MemCreate | Call::MemMap => {
            code == Code::OUT_OF_MEMORY
        }
        Call::MemAddressReserve => code == Code::OUT_OF_MEMORY && plan.limit.is_none(),
        // Together, then one by one.
        Call::MemSetAccess | Call::MemHostUnregister => true,
        Call::MemHostRegister | Call::MemHostGetDevicePointer | Call::DeviceGetCount => {
            code == Code::OUT_OF_MEMORY && plan.backing == Kind::Registered
        }
        // An attribute that the driver does not know.
        Call::DeviceGetAttribute | Call::DeviceGetP2PAttribute => code == Code::INVALID_VALUE,
        _ => false,
    }
}

#[test]
fn each_failing_call_is_named_and_leaves_nothing() {
    let mut injected = 0;
    for plan in plans() {
        let driver = Driver::simulated(Machine::gb200()).unwrap();
        run_to_drop(&driver, &plan).unwrap();
        for (call, count) in driver.sim().unwrap().calls() {
            for (nth, code) in (1..=count).flat_map(|nth| CODES.map(|code| (nth, code))) {
                for times in [1, 2] {
                    fails_well(&plan, call, nth, code, times);
                    injected += 1;
                }
            }
        }
    }
    assert!(injected > 1000, "only {injected} faults were injected");
}

fn fails_well(plan: &Plan, call: Call, nth: u64, code: Code, times: u64) {
    let driver = Driver::simulated(Machine::gb200()).unwrap();
    let sim = driver.sim().unwrap();
    for _ in 0..times {
        sim.fail(call, nth, code);
    }
    let case = format!("{call} number {nth} failing with {code} {times} times for {plan:?}");
    match run_to_drop(&driver, plan) {
        Ok(()) => assert!(
            may_be_survived(call, code, plan),
            "{case}: the fault went unnoticed"
        ),
        Err(error) => {
            let source = error
                .driver_error()
                .unwrap_or_else(|| panic!("{case}: the error names no call: {error}"));
            assert_eq!((source.call, source.code), (call, code), "{case}: {error}");
        }
    }
    let held = sim.held();
    // After "no such thing" the call is not repeated; a refusal at the very end is logged.
    let lost = match call {
        Call::MemRelease => code == Code::INVALID_VALUE,
        Call::MemUnmap | Call::MemHostUnregister => code == Code::INVALID_VALUE && times == 2,
        Call::MemAddressFree => code == Code::INVALID_VALUE || times == 2,
        _ => false,
    };
    assert!(held.is_empty() || lost, "{case}: still held: {held}");
}

#[test]
fn what_cannot_be_given_back_is_tried_again() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let free = sim.free_bytes(NODE);
    let refuse = |call, times| {
        for _ in 0..times {
            sim.fail(call, 1, Code::NOT_PERMITTED);
        }
    };
    let mut backing = Backing::new(&driver, &plan(64, 4)).unwrap();
    assert_eq!(grown(&mut backing, block(MIB)), [0..4]);

    // A chunk that cannot be unmapped stays in use.
    refuse(Call::MemUnmap, 2);
    let given = give_back(&mut backing, 0..4 * MIB);
    assert_eq!(given.error.unwrap().code(), Some(Code::NOT_PERMITTED));
    assert!(given.gone.is_empty());
    assert_eq!(chunks(&backing), [0..4]);
    backing
        .chunks()
        .next()
        .unwrap()
        .mapping()
        .cpu()
        .unwrap()
        .put(0, 1_u8)
        .unwrap();

    // Memory that cannot be released is no longer a chunk, and is released later.
    refuse(Call::MemRelease, 2);
    let given = give_back(&mut backing, 0..4 * MIB);
    assert_eq!(given.error.unwrap().code(), Some(Code::NOT_PERMITTED));
    assert_eq!(given.gone, [0..4 * MIB]);
    assert_eq!(sim.free_bytes(NODE), free - 4 * MIB);
    let given = give_back(&mut backing, 0..0);
    assert_eq!(given.bytes(), 0);
    assert_eq!(sim.free_bytes(NODE), free);

    // The same for a half-built chunk that stays mapped: its addresses are not used again.
    refuse(Call::MemSetAccess, 1);
    refuse(Call::MemUnmap, 2);
    assert!(backing.grow(block(MIB)).is_err());
    assert_eq!((chunks(&backing).len(), backing.backed()), (0, 0));
    assert_eq!(sim.held().mappings, 1);
    refuse(Call::MemUnmap, 2);
    assert_eq!(grown(&mut backing, block(MIB)), [4..8]);
    assert!(backing.chunk_at(0).is_none());
    assert_eq!(grown(&mut backing, block(MIB)), [0..4]);
    assert_eq!(sim.held().mappings, 2);
    drop(backing);
    assert!(sim.held().is_empty());
}
