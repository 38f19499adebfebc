//! Processes that are killed and stopped while they have one side of a ring, and others that go on with it.

use std::time::{Duration, Instant};

use egmem::Driver;
use egmem::shapes::Ring;
use egmem::shapes::device;
use egmem::shapes::ring::{Consumer, Producer};
use egmem::share::ImportOptions;
use egmem_tests::drivers::{is_cuda_required, node};

use crate::shapes::kernels::{Kernels, PATIENCE};
use crate::shapes::ring::soon;
use crate::shapes::stage::{Part, Stage, deaths, driver};

/// A record's number, its complement, and which record of how many in its batch it is.
type Record = [u64; 4];
const RECORDS: usize = 61;
/// Records that kernels push: a number from 0 on and its complement.
type Numbered = [u64; 2];
/// The records of a kernel's batch.
const BATCH: u64 = 5;

const fn batch_of(number: u64) -> u64 {
    1 + number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 23
}

/// Has a side until it is killed.
#[test]
fn child() {
    let Some(mut part) = Part::of_this_process() else {
        return;
    };
    let (driver, options) = (part.driver.clone(), ImportOptions::new());
    let channel = &mut part.channel;
    match &part.role[..] {
        "produce" => {
            let producer = Producer::receive(&driver, channel, options).unwrap();
            produce(producer, |word| part.say(word));
        }
        "consume" => {
            let consumer = Consumer::receive(&driver, channel, options).unwrap();
            consume(consumer, |word| part.say(word));
        }
        _ => {
            let producer = Producer::receive(&driver, channel, options).unwrap();
            launch(&driver, producer);
        }
    }
}

/// Commits batches, from the last record to the first, and says how many records it has committed.
fn produce(mut producer: Producer<Record>, say: impl Fn(u64)) {
    loop {
        let first = producer.committed();
        let count = batch_of(first);
        let batch = producer.reserve_until(count as usize, soon()).unwrap();
        // The parent was killed.
        let Some(mut batch) = batch else { return };
        for index in (0..count).rev() {
            let number = first + index;
            batch
                .write(index as usize, &[[number, !number, index, count]])
                .unwrap();
        }
        batch.commit().unwrap();
        say(first + count);
    }
}

/// Looks at records and releases some, and says how many it has released.
fn consume(mut consumer: Consumer<Record>, say: impl Fn(u64)) {
    loop {
        let first = consumer.released();
        let records = consumer.peek_until(9, soon()).unwrap();
        if records.is_empty() {
            return;
        }
        for index in 0..records.len() {
            let number = first + index as u64;
            let [found, complement, ..] = records.get(index).unwrap();
            assert_eq!((found, complement), (number, !number));
        }
        records.release_first(1 + (first % 7) as usize).unwrap();
        say(consumer.released());
    }
}

/// Has a kernel push records until it is killed with its process.
fn launch(driver: &Driver, producer: Producer<Numbered>) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    let producer = producer.into_gpu();
    let args = [producer.device_ptr().0, 1 << 40, BATCH, PATIENCE];
    // SAFETY: the ring lives until the kernel was waited for.
    let run = unsafe { kernels.launch(device::RING_PUSH_NUMBERED, (1, 32), &args) };
    let [_] = run.wait();
}

/// Waits a moment in which the child gets to any place of its work.
fn a_moment() {
    std::thread::sleep(Duration::from_micros(fastrand::u64(0..2000)));
}

/// Takes the records that are there, waiting for one until `deadline`, and checks that they go on from `next` in whole batches.
/// Returns the next number.
fn take(consumer: &mut Consumer<Record>, next: u64, deadline: Instant) -> u64 {
    let records = consumer.peek_until(RECORDS, deadline).unwrap();
    let mut numbers = next..;
    for at in 0..records.len() {
        let [number, complement, index, count] = records.get(at).unwrap();
        assert_eq!(Some(number), numbers.next());
        assert_eq!(complement, !number);
        let is_last = at + 1 == records.len();
        assert!(
            !is_last || index + 1 == count,
            "a part of a batch was committed"
        );
    }
    records.release().unwrap();
    numbers.start
}

/// Producers are killed, after some were stopped: the consumer gets whole batches, all that were committed, and hands the side on.
#[test]
fn killed_producers_leave_whole_batches() {
    let driver = driver();
    let stage = Stage::new(&driver, module_path!());
    let options = Ring::<Record>::on(node(&driver))
        .records(RECORDS)
        .shareable();
    let Ring { mut consumer, .. } = options.create(&driver).unwrap();
    let mut next = 0;
    for death in 0..deaths(30) {
        let (mut child, mut channel) = stage.start("produce", next);
        consumer.share_producer(&mut channel).unwrap();
        next = take(&mut consumer, next, soon());
        a_moment();
        if death % 2 == 1 {
            child.stop();
            // It is there, and a wait ends at its deadline.
            next = take(
                &mut consumer,
                next,
                Instant::now() + Duration::from_millis(1),
            );
            assert!(!consumer.is_alone() && consumer.ready() == Ok(0));
        }
        if death % 4 == 1 {
            child.signal(libc::SIGCONT);
            next = take(&mut consumer, next, soon());
        }
        let said = stage.word();
        child.kill();
        next = take_rest(&mut consumer, next);
        assert!(next >= said.max(stage.word()), "records were lost");
        assert_eq!(consumer.released(), next);
    }
}

/// Takes what a dead producer has left.
fn take_rest(consumer: &mut Consumer<Record>, next: u64) -> u64 {
    while !consumer.is_alone() {
        assert!(consumer.peek_until(1, soon()).unwrap().len() <= 1);
    }
    take(consumer, next, Instant::now())
}

/// Consumers are killed, after some were stopped: the next one gets all that was not released.
#[test]
fn killed_consumers_leave_what_they_have_not_released() {
    let driver = driver();
    let stage = Stage::new(&driver, module_path!());
    let options = Ring::<Record>::on(node(&driver))
        .records(RECORDS)
        .shareable();
    let Ring { mut producer, .. } = options.create(&driver).unwrap();
    let push = |producer: &mut Producer<Record>, deadline| {
        let number = producer.committed();
        producer
            .push_until([number, !number, 0, 1], deadline)
            .unwrap()
    };
    for death in 0..deaths(30) {
        let before = producer.committed() - (RECORDS - producer.room().unwrap()) as u64;
        let (mut child, mut channel) = stage.start("consume", before);
        producer.share_consumer(&mut channel).unwrap();
        for _ in 0..RECORDS + 10 {
            assert!(push(&mut producer, soon()), "it takes none");
        }
        a_moment();
        if death % 2 == 1 {
            child.stop();
            while push(&mut producer, Instant::now()) {}
            assert!(!push(
                &mut producer,
                Instant::now() + Duration::from_millis(1)
            ));
            assert!(!producer.is_alone());
        }
        if death % 4 == 1 {
            child.signal(libc::SIGCONT);
            assert!(push(&mut producer, soon()));
        }
        child.kill();
        while push(&mut producer, soon()) {}
        assert!(producer.is_alone() && producer.room() == Ok(0));
        let released = producer.committed() - RECORDS as u64;
        assert!(released >= stage.word().max(before), "a release was lost");
    }
}

/// Processes are killed while their kernels push: whole batches come, and the next process's kernels go on.
#[test]
fn killed_kernels_leave_whole_batches() {
    if !is_cuda_required() {
        return;
    }
    let driver = driver();
    let stage = Stage::new(&driver, module_path!());
    let options = Ring::<Numbered>::on(node(&driver))
        .records(1000)
        .shareable();
    let Ring { mut consumer, .. } = options.create(&driver).unwrap();
    for _ in 0..deaths(10) {
        let (mut child, mut channel) = stage.start("launch", 0);
        consumer.share_producer(&mut channel).unwrap();
        let mut next = 0;
        let mut take = |consumer: &mut Consumer<Numbered>, deadline| {
            let records = consumer.peek_until(400, deadline).unwrap();
            let count = records.len();
            for index in 0..count {
                assert_eq!(records.get(index), Ok([next, !next]));
                next += 1;
            }
            records.release().unwrap();
            (count, next)
        };
        while take(&mut consumer, soon()).1 < 20_000 {}
        a_moment();
        // The kernel has ended with its process.
        child.kill();
        while !consumer.is_alone() {
            take(&mut consumer, soon());
        }
        while take(&mut consumer, Instant::now()).0 > 0 {}
        assert_eq!(next % BATCH, 0, "a part of a batch was committed");
    }
}
