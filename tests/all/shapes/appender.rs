//! Appenders with threads of the CPU in the place of kernels, and the damage that a GPU can do to their counters.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use egmem::driver::{Access, Call, Code, Location};
use egmem::shapes::{Appended, Appender};
use egmem::{Buffer, Driver, Error, Stream};

use crate::shapes::append_threads::{Record, Threads, record};
use crate::shapes::{MIB, grace, node, nothing_held};

/// Up to 4 Mi records, 64 MiB; memory comes by 2 MiB, and is kept 1000 records ahead.
pub fn appender(driver: &Driver) -> Appender<Record> {
    let options = Appender::on(node(driver)).max_len(4 << 20).step(2 * MIB);
    options.ahead(1000).create(driver).unwrap()
}

pub fn threads(appender: &Appender<Record>) -> Threads {
    // SAFETY: each test drops its appender after its last use of the threads.
    unsafe { Threads::open(appender.device_ptr()) }
}

/// Returns the items of an appender's records, in order.
pub fn items(appender: &Appender<Record>) -> Vec<u64> {
    let mut all = vec![[0; 2]; appender.records().len()];
    appender
        .records()
        .cpu()
        .unwrap()
        .read_at(0, &mut all)
        .unwrap();
    let mut items: Vec<u64> = all
        .iter()
        .map(|found| {
            assert_eq!(*found, record(found[0]));
            found[0]
        })
        .collect();
    items.sort_unstable();
    items
}

/// Four threads append the items that are not done yet, a batch of up to 32 at a time, while this one pumps if it is
/// to. Returns the outcome.
fn round(
    appender: &mut Appender<Record>,
    done: &[AtomicBool],
    patience: Duration,
    pump: bool,
) -> Appended {
    let gpu = threads(appender);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                scope.spawn(move || {
                    let open = |item: &u64| !done[*item as usize].load(Relaxed);
                    let mine = (0..done.len() as u64).filter(|item| item / 32 % 4 == worker);
                    let mine: Vec<u64> = mine.filter(open).collect();
                    for batch in mine.chunk_by(|a, b| a / 32 == b / 32) {
                        let came = gpu.append(batch, patience);
                        for (&item, came) in batch.iter().zip(came) {
                            done[item as usize].store(came, Relaxed);
                        }
                    }
                })
            })
            .collect();
        if pump {
            appender.pump_until(|| workers.iter().all(|worker| worker.is_finished()));
        }
    });
    appender.collect().unwrap()
}

fn flags(count: usize) -> Vec<AtomicBool> {
    (0..count).map(|_| AtomicBool::new(false)).collect()
}

/// Longer than the host takes to map the missing memory.
const LONG: Duration = Duration::from_secs(600);
const ITEMS: usize = 300_000;

pub fn threads_append_without_holes(driver: &Driver) {
    let mut appender = appender(driver);
    let done = flags(ITEMS);
    let came = round(&mut appender, &done, LONG, true);
    let all = Appended {
        records: 0..ITEMS,
        missed: 0,
        stopped: None,
    };
    assert_eq!(came, all);
    assert_eq!(items(&appender), (0..ITEMS as u64).collect::<Vec<_>>());
    assert!(appender.records().chunks() > 1);
    // Nothing new: nothing comes.
    assert_eq!(appender.collect().unwrap().records, ITEMS..ITEMS);
    drop(appender);
    nothing_held(driver);
}

pub fn what_has_no_memory_is_missed_and_comes_later(driver: &Driver) {
    let mut appender = appender(driver);
    let done = flags(ITEMS);
    let mut rounds = 0;
    let mut left = ITEMS;
    while left > 0 {
        // Nothing more is mapped meanwhile, so each round takes the records that have memory.
        let before = appender.records().len();
        let room = appender.records().capacity() - before;
        let came = round(&mut appender, &done, Duration::from_micros(3), false);
        assert_eq!(came.records, before..before + room.min(left));
        assert_eq!(came.missed, (left - came.records.len()) as u64);
        left -= came.records.len();
        let set = done.iter().filter(|done| done.load(Relaxed)).count();
        assert_eq!(set, ITEMS - left);
        // Room for the next round: the records kept ahead.
        appender.pump();
        rounds += 1;
    }
    assert!(rounds > 2);
    assert_eq!(items(&appender), (0..ITEMS as u64).collect::<Vec<_>>());
}

pub fn the_greatest_length_is_never_exceeded(driver: &Driver) {
    let options = Appender::<Record>::on(node(driver)).max_len(200_000);
    let mut appender = options.ahead(1).create(driver).unwrap();
    let done = flags(ITEMS);
    let came = round(&mut appender, &done, LONG, true);
    assert_eq!((came.records, came.missed), (0..200_000, 100_000));
    assert_eq!(came.stopped, None);
    let came = round(&mut appender, &done, LONG, true);
    assert_eq!((came.records, came.missed), (200_000..200_000, 100_000));
    assert_eq!(appender.append(&[record(1)]), Ok(0));
    assert_eq!(items(&appender).len(), 200_000);
}

#[test]
fn memory_that_is_refused_is_reported() {
    let driver = grace();
    let mut appender = appender(&driver);
    let done = flags(ITEMS);
    let sim = driver.sim().unwrap();
    // The step, the needed part of it, and the kernels' requests.
    for nth in 1..=3 {
        sim.fail(Call::MemCreate, nth, Code::OUT_OF_MEMORY);
    }
    let came = round(&mut appender, &done, LONG, true);
    assert!(
        matches!(came.stopped, Some(Error::OutOfMemory { .. })),
        "{came:?}"
    );
    assert_eq!(came.records.len() as u64 + came.missed, ITEMS as u64);
    assert!(came.missed > 0);
    let mut rounds = 0;
    while appender.records().len() < ITEMS {
        let came = round(&mut appender, &done, LONG, true);
        assert!(rounds < 3, "{came:?}");
        rounds += 1;
    }
    assert_eq!(items(&appender), (0..ITEMS as u64).collect::<Vec<_>>());
}

pub fn the_cpu_appends_between_kernels(driver: &Driver) {
    let mut appender = appender(driver);
    assert_eq!(appender.append(&[record(0), record(1)]), Ok(2));
    let gpu = threads(&appender);
    assert_eq!(gpu.append(&[2, 3, 4], Duration::ZERO), [true; 3]);
    let error = appender.append(&[record(5)]).unwrap_err();
    assert!(matches!(error, Error::StillHeld { .. }), "{error}");
    assert_eq!(appender.records().len(), 2);
    assert_eq!(appender.collect().unwrap().records, 2..5);
    assert_eq!(appender.append(&[record(5); 1]), Ok(1));
    assert_eq!(gpu.append(&[6], Duration::ZERO), [true]);
    gpu.wanted().store(5000, Relaxed);
    assert_eq!(appender.collect().unwrap().records, 6..7);
    // The next kernels may not want as much as the last ones.
    assert_eq!(gpu.wanted().load(Relaxed), 7);
    assert_eq!(items(&appender), [0, 1, 2, 3, 4, 5, 6]);
    let prefix = appender.records().prefix();
    // Counters that a kernel may still read are the vector's to keep.
    let vector = appender.into_growable();
    assert_eq!(gpu.next().load(Relaxed), 7);
    assert_eq!((vector.len(), vector.get(6)), (7, Ok(record(6))));
    drop(vector);
    assert_eq!(prefix.get(0), Ok(record(0)));
    drop(prefix);
    nothing_held(driver);
}

pub fn a_damaged_cursor_is_an_error(driver: &Driver) {
    let mut appender = appender(driver);
    appender.append(&[record(0), record(1)]).unwrap();
    let gpu = threads(&appender);
    let capacity = appender.records().capacity() as u64;
    let damage = |case, len| match case {
        0 => (len - 1, capacity, "the cursor of an appender"),
        1 => (u64::MAX, capacity, "the cursor of an appender"),
        2 => (len, capacity + 1, "the limit of an appender"),
        3 => (len, 1 << 62, "the limit of an appender"),
        _ => (len, len - 1, "the limit of an appender"),
    };
    for case in 0..5 {
        let (next, limit, what) = damage(case, appender.records().len() as u64);
        gpu.next().store(next, Relaxed);
        gpu.limit().store(limit, Relaxed);
        let error = appender.collect().unwrap_err();
        let is_it = matches!(error, Error::CursorDamaged { what: cursor, .. } if cursor == what);
        assert!(is_it, "{error}");
        // The next ones come.
        let len = appender.records().len();
        assert_eq!(gpu.append(&[9], Duration::ZERO), [true]);
        assert_eq!(appender.collect().unwrap().records, len..len + 1);
    }
    // A count that is too great makes the count of missed records wrong, and nothing else.
    gpu.next().store(1 << 40, Relaxed);
    let came = appender.collect().unwrap();
    assert_eq!(came.records.end, capacity as usize);
    assert_eq!(came.missed, (1 << 40) - capacity);
}

/// Kernels that say that they want more than they have reserved get nothing.
pub fn no_memory_is_mapped_for_a_damaged_count(driver: &Driver) {
    let options = Appender::<Record>::on(node(driver)).max_len(400_000);
    for wanted in [1_u64, 1 << 40, u64::MAX] {
        let mut appender = options
            .clone()
            .step(2 * MIB)
            .ahead(1)
            .create(driver)
            .unwrap();
        let capacity = appender.records().capacity();
        appender.append(&vec![record(0); capacity - 1]).unwrap();
        let gpu = threads(&appender);
        let len = appender.records().len() as u64;
        gpu.wanted().store(wanted.saturating_add(len), Relaxed);
        assert_eq!(appender.pump(), capacity, "{wanted}");
        // Kernels see that there will be no more, and the records that have memory are collected.
        assert_eq!(gpu.append(&[7, 8], LONG), [true, false]);
        let came = appender.collect().unwrap();
        assert_eq!((came.records.len(), came.missed), (1, 1));
        let what = "the count of records that an appender's kernels want";
        let is_it =
            matches!(came.stopped, Some(Error::CursorDamaged { what: count, .. }) if count == what);
        assert!(is_it, "{:?}", came.stopped);
        // The next ones get memory.
        assert!(appender.pump() > capacity);
        assert_eq!(gpu.append(&[9], LONG), [true]);
        assert_eq!(appender.collect().unwrap().stopped, None);
    }
    // Where both counters are wrong alike, the memory ends with the vector's.
    let mut small = options.ahead(1).create(driver).unwrap();
    let gpu = threads(&small);
    gpu.next().store(1 << 40, Relaxed);
    gpu.wanted().store(1 << 40, Relaxed);
    assert_eq!(small.pump(), 400_000);
}

/// Work on a stream that sets the greatest record with memory to a byte.
pub fn write_last(appender: &Appender<Record>, stream: &Stream, byte: u8) {
    let last = appender.records().capacity() as u64 - 1;
    let at = appender.records().device_ptr().add(last * 16);
    // SAFETY: the appender keeps the memory until the stream's work has ended, which the tests check.
    unsafe { stream.memset_async(at, byte, 16) }.unwrap();
}

/// Returns the byte that `write_last` has set.
fn last(appender: &mut Appender<Record>) -> u64 {
    let capacity = appender.records().capacity();
    let missing = capacity - appender.records().len();
    let gpu = threads(appender);
    gpu.next().store(capacity as u64, Relaxed);
    assert_eq!(appender.collect().unwrap().records.len(), missing);
    appender.records().get(capacity - 1).unwrap()[0]
}

pub fn pumping_ends_with_the_streams_work(driver: &Driver) {
    let mut appender = appender(driver);
    let stream = Stream::new(driver, 0).unwrap();
    write_last(&appender, &stream, 5);
    appender.pump_while(&stream).unwrap();
    assert_eq!(last(&mut appender), u64::from_ne_bytes([5; 8]));
    drop(appender);
    drop(stream);
    nothing_held(driver);
}

/// The driver refuses to say whether kernels have ended, for a while: the error comes after their end.
#[test]
fn pumping_that_fails_waits_for_the_streams_work() {
    for queries in 1..4 {
        let driver = grace();
        let sim = driver.sim().unwrap();
        let mut appender = appender(&driver);
        let stream = Stream::new(&driver, 0).unwrap();
        write_last(&appender, &stream, 6);
        sim.fail(Call::StreamQuery, 1, Code::UNKNOWN);
        for nth in 1..queries {
            sim.fail(Call::StreamSynchronize, nth, Code::UNKNOWN);
        }
        let error = appender.pump_while(&stream).unwrap_err();
        assert_eq!(error.code(), Some(Code::UNKNOWN));
        // The appender has signalled to the kernels that there is no more.
        assert_ne!(threads(&appender).end().load(Relaxed) >> 63, 0);
        sim.cancel_all();
        let seen = appender.collect().unwrap();
        assert_eq!(seen.stopped, Some(error));
        assert_eq!(last(&mut appender), u64::from_ne_bytes([6; 8]));
        drop((appender, stream));
        nothing_held(&driver);
    }
}

/// A kernel reserves records, and a fault ends it before it has written them.
#[test]
fn records_of_a_kernel_that_died_are_not_collected() {
    let driver = grace();
    let mut appender = appender(&driver);
    appender.append(&[record(3)]).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    threads(&appender).next().store(1000, Relaxed);
    let read_only = Buffer::on(node(&driver)).access(Location::Device(0), Access::Read);
    let read_only = read_only.bytes(MIB).allocate(&driver).unwrap();
    // SAFETY: the memory outlives the work, which faults.
    unsafe { stream.memset_async(read_only.device_ptr(), 1, 8) }.unwrap();
    let lost = |error: Error| assert!(matches!(error, Error::ContextLost { .. }), "{error}");
    lost(appender.pump_while(&stream).unwrap_err());
    lost(appender.collect().unwrap_err());
    assert_eq!(appender.records().len(), 1);
    // The CPU and other GPUs go on.
    assert_eq!(appender.append(&[record(4)]), Ok(1));
    assert_eq!(appender.collect().unwrap().records, 2..2);
    assert_eq!(items(&appender), [3, 4]);
}

pub fn records_may_be_in_a_gpus_memory(driver: &Driver) {
    let gpu = Location::Device(0);
    let options = Appender::<Record>::on(gpu).max_len(1 << 20);
    let mut appender = options.access_by([gpu]).create(driver).unwrap();
    assert!(appender.pump() > 0);
    assert_eq!(appender.collect().unwrap().records, 0..0);
    let error = appender.append(&[record(0)]).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    drop(appender);
    nothing_held(driver);
}

pub fn appenders_that_cannot_be_are_refused(driver: &Driver) {
    let invalid = |error: Error| assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    invalid(Appender::<()>::on(node(driver)).create(driver).unwrap_err());
    let options = Appender::<Record>::on(node(driver));
    let error = options.max_len(0).create(driver).unwrap_err();
    assert!(error.to_string().contains("0 elements"), "{error}");
    invalid(error);
    let options = Appender::<Record>::on(node(driver)).cursor_on(Location::Device(4444));
    let error = options.create(driver).unwrap_err();
    assert!(matches!(error, Error::NoSuchGpu { .. }), "{error}");
    nothing_held(driver);
}
