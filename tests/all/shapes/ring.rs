//! Rings between threads of the CPU, and the damage that a GPU can do to them.

use std::time::{Duration, Instant};

use egmem::driver::Location;
use egmem::shapes::Ring;
use egmem::shapes::ring::{Consumer, Producer};
use egmem::{Driver, Error, Stream};

use crate::shapes::{MIB, node, nothing_held};

/// The bytes from a ring's address to the counter of released records.
const TAIL: u64 = 128;

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

fn ring(driver: &Driver, records: usize) -> (Producer<u64>, Consumer<u64>) {
    let options = Ring::on(node(driver)).records(records);
    let Ring { producer, consumer } = options.create(driver).unwrap();
    (producer, consumer)
}

/// Records of 12 bytes: no number of them fills the memory, so one lies across its end.
pub fn records_come_out_as_they_went_in(driver: &Driver) {
    let Ring {
        mut producer,
        mut consumer,
    } = Ring::<[u32; 3]>::on(node(driver)).create(driver).unwrap();
    assert_eq!(producer.capacity(), (2 * MIB / 12) as usize);
    let record = |n: u32| [n, n ^ 0xffff, n.wrapping_mul(7)];
    let (mut next, mut seen) = (0, 0);
    let mut to = vec![[0; 3]; 1777];
    while seen < 400_000 {
        let batch: Vec<_> = (next..next + 2000).map(record).collect();
        next += producer.push_some(&batch).unwrap() as u32;
        let count = consumer.pop_into(&mut to).unwrap();
        for (n, &found) in (seen..).zip(&to[..count]) {
            assert_eq!(found, record(n), "record {n}");
        }
        seen += count as u32;
    }
}

pub fn a_full_ring_refuses_and_an_empty_one_has_none(driver: &Driver) {
    let (mut producer, mut consumer) = ring(driver, 3);
    assert_eq!((producer.room(), consumer.ready()), (Ok(3), Ok(0)));
    assert_eq!(consumer.try_pop(), Ok(None));
    assert_eq!(producer.try_push_all(&[1, 2]), Ok(true));
    assert_eq!(producer.try_push_all(&[3, 4]), Ok(false));
    assert_eq!(producer.push_some(&[3, 4]), Ok(1));
    assert_eq!(producer.try_push(4), Ok(false));
    assert_eq!(producer.push_until(4, Instant::now()), Ok(false));
    assert!(producer.reserve_until(1, Instant::now()).unwrap().is_none());
    assert_eq!((producer.room(), consumer.ready()), (Ok(0), Ok(3)));
    assert_eq!(consumer.try_pop(), Ok(Some(1)));
    assert_eq!(producer.push_until(4, Instant::now()), Ok(true));
    let mut to = [0; 5];
    assert_eq!((consumer.pop_into(&mut to), to), (Ok(3), [2, 3, 4, 0, 0]));
    assert_eq!(consumer.pop_until(Instant::now()), Ok(None));
    assert!(consumer.peek_until(2, Instant::now()).unwrap().is_empty());
    assert!(consumer.peek_until(0, soon()).unwrap().is_empty());
}

/// Records whose words all say the same, so that a torn one shows, in batches whose records say which batch they are
/// of.
pub fn threads_pass_batches_untorn(driver: &Driver) {
    const RECORDS: u64 = 40_000;
    type Record = [u64; 5];
    let options = Ring::<Record>::on(node(driver)).records(61);
    let Ring {
        mut producer,
        mut consumer,
    } = options.create(driver).unwrap();
    let writer = std::thread::spawn(move || {
        let mut next = 0;
        while next < RECORDS {
            let count = (1 + next % 23).min(RECORDS - next);
            let mut batch = producer
                .reserve_until(count as usize, soon())
                .unwrap()
                .unwrap();
            // From the last to the first: an early commit would show.
            for index in (0..count).rev() {
                let n = next + index;
                batch.write(index as usize, &[[n, n, n, n, n]]).unwrap();
            }
            batch.commit().unwrap();
            next += count;
        }
        producer
    });
    let mut next = 0;
    while next < RECORDS {
        let most = 1 + (next % 61) as usize;
        let records = consumer.peek_until(most, soon()).unwrap();
        assert!(!records.is_empty(), "no record {next}");
        for index in 0..records.len() {
            assert_eq!(records.get(index), Ok([next; 5]));
            next += 1;
        }
        records.release().unwrap();
    }
    let mut producer = writer.join().unwrap();
    assert_eq!((producer.room(), consumer.ready()), (Ok(61), Ok(0)));
}

pub fn what_was_not_committed_or_released_did_not_happen(driver: &Driver) {
    let (mut producer, mut consumer) = ring(driver, 4);
    let mut batch = producer.try_reserve(3).unwrap().unwrap();
    batch.write(0, &[9, 9, 9]).unwrap();
    let outside = batch.write(2, &[1, 1]).unwrap_err();
    assert!(matches!(outside, Error::OutOfRange { .. }), "{outside}");
    batch.write(usize::MAX, &[1]).unwrap_err();
    drop(batch);
    assert_eq!((consumer.ready(), producer.room()), (Ok(0), Ok(4)));
    assert_eq!(producer.try_push_all(&[1, 2, 3]), Ok(true));
    for _ in 0..2 {
        let records = consumer.peek(9).unwrap();
        assert_eq!((records.len(), records.get(2)), (3, Ok(3)));
        records.get(3).unwrap_err();
        records.get(usize::MAX).unwrap_err();
        records.read(2, &mut [0; 2]).unwrap_err();
    }
    consumer.peek(2).unwrap().release_first(1).unwrap();
    consumer.peek(1).unwrap().release_first(5).unwrap();
    assert_eq!(producer.room(), Ok(3));
    assert_eq!(consumer.try_pop(), Ok(Some(3)));
}

pub fn both_mappings_are_the_same_memory(driver: &Driver) {
    let (producer, mut consumer) = ring(driver, 4);
    let gpu = producer.into_gpu();
    let second = gpu.records_ptr().add(2 * MIB);
    let stream = Stream::new(driver, 0).unwrap();
    // SAFETY: the ring outlives the work, which writes its second mapping, and any bytes are records.
    unsafe { stream.memset_async(second, 7, 16) }.unwrap();
    stream.synchronize().unwrap();
    let mut producer = gpu.into_cpu().unwrap();
    // The CPU never wrote these records: they have the bytes that the GPU wrote through the other mapping.
    producer.try_reserve(2).unwrap().unwrap().commit().unwrap();
    let sevens = u64::from_ne_bytes([7; 8]);
    assert_eq!(consumer.pop_into(&mut [0; 2]), Ok(2));
    let mut producer = producer;
    producer.try_reserve(4).unwrap().unwrap().commit().unwrap();
    let mut all = [1; 4];
    consumer.pop_into(&mut all).unwrap();
    assert_eq!(all, [0; 4]);
    // Around to the first place, which was not written since.
    let around = 2 * MIB as usize / 8 - 6;
    for _ in 0..around {
        producer.try_reserve(1).unwrap().unwrap().commit().unwrap();
        consumer.try_pop().unwrap().unwrap();
    }
    assert!(producer.try_push(1).unwrap());
    producer.try_reserve(1).unwrap().unwrap().commit().unwrap();
    assert_eq!(consumer.try_pop(), Ok(Some(1)));
    assert_eq!(consumer.try_pop(), Ok(Some(sevens)));
}

/// Sets all bytes of a ring's counter by the GPU.
fn set_counter(driver: &Driver, at: egmem::driver::DevicePtr, byte: u8) {
    let stream = Stream::new(driver, 0).unwrap();
    // SAFETY: the ring lives; its counters may have any value.
    unsafe { stream.memset_async(at, byte, 8) }.unwrap();
    stream.synchronize().unwrap();
}

pub fn a_damaged_counter_is_an_error(driver: &Driver) {
    let damaged = |result: Result<usize, Error>, what: &str| {
        let error = result.unwrap_err();
        let is_it = matches!(error, Error::CursorDamaged { what: cursor, .. } if cursor == what);
        assert!(is_it, "{error}");
    };
    let (producer, mut consumer) = ring(driver, 100);
    let producer = producer.into_gpu();
    let head = producer.device_ptr();
    for byte in [0xff, 0x01, 0x80] {
        set_counter(driver, head, byte);
        damaged(consumer.ready(), "the head of a ring");
        damaged(consumer.pop_into(&mut [0; 200]), "the head of a ring");
        damaged(consumer.try_pop().map(|_| 0), "the head of a ring");
        let waited = consumer.peek_until(1, soon()).map(|records| records.len());
        damaged(waited, "the head of a ring");
    }
    set_counter(driver, head, 0);
    assert_eq!(consumer.ready(), Ok(0));
    set_counter(driver, head, 0xff);
    damaged(producer.into_cpu().map(|_| 0), "the head of a ring");

    let (mut producer, consumer) = ring(driver, 100);
    assert_eq!(producer.push_some(&[5; 100]), Ok(100));
    let consumer = consumer.into_gpu();
    let tail = consumer.device_ptr().add(TAIL);
    for byte in [0xff, 0x01, 0x80] {
        set_counter(driver, tail, byte);
        damaged(producer.room(), "the tail of a ring");
        damaged(producer.push_some(&[1]), "the tail of a ring");
        let waited = producer.push_until(1, soon()).map(usize::from);
        damaged(waited, "the tail of a ring");
    }
    damaged(consumer.into_cpu().map(|_| 0), "the tail of a ring");
    // A counter that goes backwards.
    let (mut producer, mut consumer) = ring(driver, 300);
    assert_eq!(producer.push_some(&[5; 300]), Ok(300));
    assert_eq!(consumer.ready(), Ok(300));
    let gpu = producer.into_gpu();
    set_counter(driver, gpu.device_ptr(), 0);
    damaged(consumer.ready(), "the head of a ring");
}

/// Kernels go on from the CPU's own count, not from the counter in the memory.
pub fn a_damaged_counter_is_set_right_for_a_gpu(driver: &Driver) {
    let (mut producer, mut consumer) = ring(driver, 100);
    assert_eq!(producer.push_some(&[5; 60]), Ok(60));
    assert_eq!(consumer.pop_into(&mut [0; 20]), Ok(20));
    let gpu = producer.into_gpu();
    let at = gpu.device_ptr();
    producer = gpu.into_cpu().unwrap();
    for byte in [0xff, 0x01, 0] {
        set_counter(driver, at, byte);
        let (error, what) = (consumer.ready().unwrap_err(), "the head of a ring");
        assert!(matches!(error, Error::CursorDamaged { what: cursor, .. } if cursor == what));
        producer = producer.into_gpu().into_cpu().unwrap();
        assert_eq!((consumer.ready(), producer.room()), (Ok(40), Ok(60)));
    }
    for byte in [0xff, 0x80, 0] {
        set_counter(driver, at.add(TAIL), byte);
        let (error, what) = (producer.room().unwrap_err(), "the tail of a ring");
        assert!(matches!(error, Error::CursorDamaged { what: cursor, .. } if cursor == what));
        consumer = consumer.into_gpu().into_cpu().unwrap();
        assert_eq!((consumer.ready(), producer.room()), (Ok(40), Ok(60)));
    }
    assert_eq!(consumer.pop_into(&mut [0; 40]), Ok(40));
    // A GPU that damages the counter while it has the side gets no CPU's end of it.
    let gpu = producer.into_gpu();
    set_counter(driver, at, 0xff);
    let error = gpu.into_cpu().unwrap_err();
    assert!(matches!(error, Error::CursorDamaged { .. }), "{error}");
}

pub fn sides_go_to_a_gpu_and_come_back(driver: &Driver) {
    let (mut producer, mut consumer) = ring(driver, 10);
    for round in 0..7 {
        assert_eq!(producer.push_some(&[round; 4]), Ok(4));
        assert_eq!(consumer.try_pop(), Ok(Some(round)));
        let (from, to) = (producer.into_gpu(), consumer.into_gpu());
        assert_eq!(from.device_ptr(), to.device_ptr());
        assert_eq!((from.capacity(), to.capacity()), (10, 10));
        producer = from.into_cpu().unwrap();
        consumer = to.into_cpu().unwrap();
        assert_eq!((producer.room(), consumer.ready()), (Ok(7), Ok(3)));
        assert_eq!(consumer.pop_into(&mut [0; 3]), Ok(3));
    }
}

pub fn a_ring_in_a_gpus_memory_is_not_the_cpus(driver: &Driver) {
    let refused = |result: Result<bool, Error>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    };
    let gpu = Location::Device(0);
    let options = Ring::<u64>::on(gpu).access_by([gpu]);
    let Ring {
        mut producer,
        mut consumer,
    } = options.create(driver).unwrap();
    refused(producer.try_push(1));
    refused(producer.room().map(|_| true));
    refused(producer.try_reserve(0).map(|_| true));
    refused(consumer.try_pop().map(|_| true));
    refused(consumer.peek(0).map(|_| true));
    refused(producer.into_gpu().into_cpu().map(|_| true));
    refused(consumer.into_gpu().into_cpu().map(|_| true));
    nothing_held(driver);
}

pub fn either_side_keeps_the_memory(driver: &Driver) {
    let (mut producer, consumer) = ring(driver, 10);
    assert!(!producer.is_alone() && !consumer.is_alone());
    drop(consumer);
    assert!(producer.is_alone());
    assert_eq!(producer.try_push(5), Ok(true));
    drop(producer);
    nothing_held(driver);

    let (mut producer, mut consumer) = ring(driver, 10);
    assert_eq!(producer.try_push(5), Ok(true));
    let gpu = producer.into_gpu();
    assert!(!gpu.is_alone());
    drop(gpu);
    assert!(consumer.is_alone());
    assert_eq!(consumer.try_pop(), Ok(Some(5)));
    drop(consumer);
    nothing_held(driver);
}

pub fn rings_that_cannot_be_are_refused(driver: &Driver) {
    let invalid = |error: Error| assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    invalid(Ring::<()>::on(node(driver)).create(driver).unwrap_err());
    let options = Ring::<u64>::on(node(driver));
    // The last would be 4 GiB, more than one physical memory may have.
    for records in [0, usize::MAX, (256 << 20) + 1] {
        invalid(options.clone().records(records).create(driver).unwrap_err());
    }
    let error = Ring::<u64>::on(Location::Device(4444)).create(driver);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::NoSuchGpu { .. }), "{error}");
    let (mut producer, _consumer) = ring(driver, 10);
    invalid(producer.try_reserve(11).unwrap_err());
    invalid(producer.try_push_all(&[0; 11]).unwrap_err());
    assert_eq!(producer.push_some(&[0; 11]), Ok(10));
    invalid(producer.reserve_until(11, soon()).unwrap_err());
}
