//! Appenders whose cursor is in a GPU's memory, where the CPU cannot read it while kernels run.

use std::sync::atomic::Ordering::Relaxed;

use egmem::driver::{DevicePtr, Location};
use egmem::shapes::Appender;
use egmem::{Driver, Error, Stream};

use crate::shapes::append_threads::{Record, record};
use crate::shapes::appender::threads;
use crate::shapes::{MIB, node, nothing_held};

const GPU: Location = Location::Device(0);

fn set_byte(stream: &Stream, at: DevicePtr, byte: u8) {
    // SAFETY: each appender outlives the work; its cursor may have any value.
    unsafe { stream.memset_async(at, byte, 1) }.unwrap();
    stream.synchronize().unwrap();
}

pub fn the_cursor_may_be_in_a_gpus_memory(driver: &Driver) {
    let options = Appender::<Record>::on(node(driver)).access_by([GPU]);
    let mut appender = options.cursor_on(GPU).create(driver).unwrap();
    appender.append(&[record(0), record(1)]).unwrap();
    assert_eq!(appender.collect().unwrap().records, 2..2);
    // The cursor's address is among the constants.
    let cursor = threads(&appender).cursor();
    let stream = Stream::new(driver, 0).unwrap();
    let set = |byte| set_byte(&stream, cursor, byte);
    set(5);
    let error = appender.append(&[record(2)]).unwrap_err();
    assert!(matches!(error, Error::StillHeld { .. }), "{error}");
    // Three unwritten records: the bytes that the memory holds.
    let came = appender.collect().unwrap();
    assert_eq!((came.records, came.missed), (2..5, 0));
    set(4);
    let error = appender.collect().unwrap_err();
    assert!(matches!(error, Error::CursorDamaged { .. }), "{error}");
    assert_eq!(appender.append(&[record(2)]), Ok(1));
    drop((appender, stream));
    nothing_held(driver);
}

/// Returns whether the appender has signalled to kernels that there will be no more memory.
fn is_closed(appender: &Appender<Record>) -> bool {
    threads(appender).end().load(Relaxed) >> 63 != 0
}

/// Pumps until the appender signals that there will be no more memory, or until that many records have some.
fn pump_to(appender: &mut Appender<Record>, records: usize) -> usize {
    let pumps = std::iter::repeat_with(|| {
        std::thread::yield_now();
        (appender.pump(), is_closed(appender))
    });
    let mut pumps = pumps.take(1_000_000);
    let (mapped, _) = pumps
        .find(|&(mapped, closed)| closed || mapped >= records)
        .expect("the GPU copies the cursor");
    mapped
}

/// The memory that is mapped for a count above the cursor, at most.
const AHEAD: usize = 200_000;
/// Records of 2 MiB.
const STEP: usize = 131_072;

fn far_from_the_cpu(driver: &Driver) -> Appender<Record> {
    let options = Appender::on(node(driver)).max_len(64 << 20);
    let options = options.step(2 * MIB).ahead(AHEAD).cursor_on(GPU);
    options.create(driver).unwrap()
}

/// Pumps for a count that kernels have not reserved: the appender detects it.
fn is_found_out(appender: &mut Appender<Record>, wanted: u64) -> usize {
    threads(appender).wanted().store(wanted, Relaxed);
    let mapped = pump_to(appender, usize::MAX);
    let stopped = appender.collect().unwrap().stopped;
    let is_it = matches!(stopped, Some(Error::CursorDamaged { found, .. }) if found == wanted);
    assert!(is_it, "{stopped:?}");
    mapped
}

pub fn a_damaged_count_maps_only_what_is_kept_ahead(driver: &Driver) {
    for wanted in [STEP as u64 * 4, 1 << 40, (1 << 63) - 1] {
        let mut appender = far_from_the_cpu(driver);
        let mapped = is_found_out(&mut appender, wanted);
        assert!(mapped <= 2 * AHEAD + STEP, "{wanted}: {mapped}");
    }
    nothing_held(driver);
}

pub fn a_count_that_the_cursor_confirms_is_believed(driver: &Driver) {
    let mut appender = far_from_the_cpu(driver);
    let stream = Stream::new(driver, 0).unwrap();
    let first = appender.records().capacity();
    // 4 Mi records were reserved, of which kernels have reported a part so far.
    let cursor = threads(&appender).cursor();
    set_byte(&stream, cursor.add(2), 0x40);
    for wanted in [1_000_000, 3_000_000] {
        threads(&appender).wanted().store(wanted as u64, Relaxed);
        let target = wanted + AHEAD;
        let mapped = pump_to(&mut appender, target);
        assert!((target..target + STEP).contains(&mapped), "{mapped}");
        assert!(!is_closed(&appender));
    }
    let came = appender.collect().unwrap();
    assert_eq!((came.records, came.stopped), (0..first, None));
    assert_eq!(came.missed, 0x40_0000 - first as u64);
    // The count of these kernels' records does not hold for the next ones.
    let mapped = appender.records().capacity();
    assert_eq!(is_found_out(&mut appender, 0x3f_ffff), mapped);
    drop((appender, stream));
    nothing_held(driver);
}
