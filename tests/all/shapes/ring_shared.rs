//! Rings whose sides are sent over channels: here both ends are in one process.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use egmem::driver::{Access, Location};
use egmem::shapes::Ring;
use egmem::shapes::ring::{Consumer, GpuConsumer, Producer, Untyped};
use egmem::share::{self, Channel, ImportOptions, ImportedBuffer, Link, Peers};
use egmem::{Buffer, Driver, Error, Stream};

use crate::shapes::ring::soon;
use crate::shapes::{MIB, node, nothing_held};

pub fn channels() -> (Channel, Channel) {
    let (one, other) = UnixStream::pair().unwrap();
    let channel = |stream| {
        let mut channel = Channel::new(stream, &Peers::same_user()).unwrap();
        channel.set_timeout(Duration::from_secs(600));
        channel
    };
    (channel(one), channel(other))
}

/// A producer whose consumer nobody has.
fn producer(driver: &Driver, records: usize) -> Producer<u64> {
    let options = Ring::on(node(driver)).records(records).shareable();
    let Ring { producer, .. } = options.create(driver).unwrap();
    producer
}

fn consumer(driver: &Driver, channel: &mut Channel) -> Consumer<u64> {
    Consumer::receive(driver, channel, ImportOptions::new()).unwrap()
}

/// The consumer's side goes from process to process, and the records that were not released with it.
pub fn a_side_is_handed_on(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let mut producer = producer(driver, 10);
    assert!(producer.is_alone());
    for round in 0..5_u64 {
        assert_eq!(producer.try_push_all(&[3 * round, 3 * round + 1]), Ok(true));
        producer.share_consumer(&mut channel).unwrap();
        assert!(!producer.is_alone(), "it is on its way");
        let held = producer.share_consumer(&mut channel).unwrap_err();
        assert!(
            matches!(held, share::Error::Memory(Error::StillHeld { .. })),
            "{held}"
        );
        assert_eq!(producer.try_push(3 * round + 2), Ok(true));
        let mut consumer = consumer(driver, &mut others);
        assert_eq!(
            (consumer.released(), producer.committed()),
            (2 * round, 3 * (round + 1))
        );
        assert_eq!((consumer.capacity(), consumer.record_bytes()), (10, 8));
        assert_eq!(consumer.ready(), Ok(3 + round as usize));
        for number in 0..2 {
            assert_eq!(consumer.try_pop(), Ok(Some(2 * round + number)));
        }
        // Looked at, but not released: they stay for the next one.
        assert_eq!(consumer.peek(9).unwrap().get(0), Ok(2 * round + 2));
        assert!(!producer.is_alone() && !consumer.is_alone());
        drop(consumer);
        assert!(producer.is_alone());
    }
    drop(producer);
    nothing_held(driver);
}

/// The side that was received hands the creator's on, and both mappings of a ring of three.
pub fn an_importer_hands_on_the_creators_side(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let Ring { mut consumer, .. } = {
        let options = Ring::<[u64; 2]>::on(node(driver)).records(100);
        options.shareable().create(driver).unwrap()
    };
    consumer.share_producer(&mut channel).unwrap();
    let mut first =
        Producer::<[u64; 2]>::receive(driver, &mut others, ImportOptions::new()).unwrap();
    assert_eq!(first.try_push_all(&[[1, 2], [3, 4]]), Ok(true));
    assert_eq!(consumer.try_pop(), Ok(Some([1, 2])));
    drop(consumer);
    assert!(first.is_alone());
    // The one that has the producer's side gives the consumer's to a third.
    first.share_consumer(&mut channel).unwrap();
    let mut third =
        Consumer::<[u64; 2]>::receive(driver, &mut others, ImportOptions::new()).unwrap();
    assert_eq!((third.released(), third.try_pop()), (1, Ok(Some([3, 4]))));
    drop(first);
    assert!(third.is_alone());
    third.share_producer(&mut channel).unwrap();
    let mut fourth =
        Producer::<[u64; 2]>::receive(driver, &mut others, ImportOptions::new()).unwrap();
    assert_eq!((fourth.committed(), fourth.try_push([5, 6])), (2, Ok(true)));
    assert_eq!(third.try_pop(), Ok(Some([5, 6])));
    drop((third, fourth));
    nothing_held(driver);
}

pub fn a_wait_ends_with_the_other_side(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let mut producer = producer(driver, 2);
    producer.share_consumer(&mut channel).unwrap();
    let mut consumer = consumer(driver, &mut others);
    assert_eq!(producer.try_push_all(&[1, 2]), Ok(true));
    let waiting = std::thread::spawn(move || {
        let is_full = producer.reserve_until(1, soon()).unwrap().is_none();
        (is_full && producer.is_alone(), producer)
    });
    assert_eq!(consumer.peek(1).unwrap().len(), 1);
    drop(consumer);
    let (is_told, mut producer) = waiting.join().unwrap();
    assert!(is_told);

    producer.share_consumer(&mut channel).unwrap();
    let mut consumer = self::consumer(driver, &mut others);
    let waiting = std::thread::spawn(move || {
        // What is there comes first, whether the producer is there or not.
        let mut found = Vec::new();
        while let Some(record) = consumer.pop_until(soon()).unwrap() {
            found.push(record);
        }
        (found, consumer.is_alone())
    });
    assert_eq!(producer.push_until(3, soon()), Ok(true));
    drop(producer);
    assert_eq!(waiting.join().unwrap(), (vec![1, 2, 3], true));
    nothing_held(driver);
}

pub fn sides_in_two_processes_go_to_gpus(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let mut producer = producer(driver, 10);
    assert_eq!(producer.try_push(7), Ok(true));
    let mut producer = producer.into_gpu();
    producer.share_consumer(&mut channel).unwrap();
    let received = consumer(driver, &mut others).into_gpu();
    // Two mappings: the kernels of each process have their own.
    assert_ne!(producer.device_ptr(), received.device_ptr());
    assert!(!producer.is_alone() && !received.is_alone());
    let mut received: Consumer<u64> = received.into_cpu().unwrap();
    assert_eq!(received.try_pop(), Ok(Some(7)));
    let mut producer = producer.into_cpu().unwrap();
    assert_eq!((producer.room(), producer.try_push(8)), (Ok(10), Ok(true)));
    drop(producer);
    let received: GpuConsumer<u64> = received.into_gpu();
    assert!(received.is_alone());
    assert_eq!(received.into_cpu().unwrap().try_pop(), Ok(Some(8)));
    nothing_held(driver);
}

pub fn a_ring_in_a_gpus_memory_is_shared(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let gpu = Location::Device(0);
    let options = Ring::<u64>::on(gpu).access_by([gpu]).records(10);
    let Ring { mut producer, .. } = options.shareable().create(driver).unwrap();
    producer.share_consumer(&mut channel).unwrap();
    let options = ImportOptions::new().access(gpu, Access::ReadWrite);
    let mut received = Consumer::<u64>::receive(driver, &mut others, options).unwrap();
    let refused = received.try_pop().unwrap_err();
    assert!(matches!(refused, Error::NotAccessible { .. }), "{refused}");
    let received = received.into_gpu();
    // The kernels' constants are there.
    let stream = Stream::new(driver, 0).unwrap();
    let seen = Buffer::near(driver, 0, MIB).unwrap();
    // SAFETY: both live until the copy has run.
    unsafe { stream.copy_async(seen.device_ptr(), received.device_ptr(), 512) }.unwrap();
    stream.synchronize().unwrap();
    let expected = [
        u64::from_le_bytes(*b"EGMRING2"),
        4 * MIB,
        10,
        2 * MIB - 1,
        8,
        2 * MIB,
    ];
    for (index, word) in expected.into_iter().enumerate() {
        assert_eq!(seen.get(256 + 8 * index as u64), Ok(word), "word {index}");
    }
    drop((received, producer, stream, seen));
    nothing_held(driver);
}

/// Records of a size that is known at run time, by their addresses.
pub fn records_of_any_size_are_passed(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let options = Ring::untyped(node(driver), 48).records(3);
    let Ring { mut producer, .. } = options.shareable().create(driver).unwrap();
    producer.share_consumer(&mut channel).unwrap();
    let options = ImportOptions::new();
    let mut consumer = Consumer::<Untyped>::receive_untyped(driver, &mut others, options).unwrap();
    assert_eq!((consumer.record_bytes(), producer.record_bytes()), (48, 48));
    for round in 0..5_u64 {
        let batch = producer.reserve_until(2, soon()).unwrap().unwrap();
        for index in 0..2 * 6 {
            // SAFETY: two records of six words, which the CPU may write and nothing else uses.
            unsafe {
                (batch.device_ptr().0 as *mut u64)
                    .add(index)
                    .write(100 * round + index as u64)
            };
        }
        batch.commit().unwrap();
        let records = consumer.peek_until(9, soon()).unwrap();
        assert_eq!(records.len(), 2);
        for index in 0..2 * 6 {
            // SAFETY: as above; the producer writes no record that was committed.
            let found = unsafe { (records.device_ptr().0 as *const u64).add(index).read() };
            assert_eq!(found, 100 * round + index as u64);
        }
        records.release().unwrap();
    }
}

/// A peer that has the memory, and keeps no rule.
struct Hostile {
    memory: ImportedBuffer,
    link: Link,
}

impl Hostile {
    fn receive(driver: &Driver, channel: &mut Channel) -> Self {
        channel.receive_text(128).unwrap();
        let memory = channel.receive().unwrap();
        Self {
            memory: memory.import(driver, ImportOptions::new()).unwrap(),
            link: channel.receive_link().unwrap(),
        }
    }

    /// Sets all words of the counters' part.
    fn damage(&self, byte: u8) {
        self.memory.cpu().unwrap().fill(0, 2 * MIB, byte).unwrap();
    }

    fn set(&self, head: u64, tail: u64) {
        self.memory.put(0, head).unwrap();
        self.memory.put(128, tail).unwrap();
    }
}

pub fn a_peer_that_writes_garbage_is_an_error(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let damaged = |error: Error| assert!(matches!(error, Error::CursorDamaged { .. }), "{error}");
    let mut producer = producer(driver, 100);
    assert_eq!(producer.push_some(&[5; 100]), Ok(100));
    producer.share_consumer(&mut channel).unwrap();
    let hostile = Hostile::receive(driver, &mut others);
    for byte in [0xff, 0x01, 0x80] {
        hostile.damage(byte);
        damaged(producer.room().unwrap_err());
        damaged(producer.try_push(1).unwrap_err());
        damaged(producer.push_until(1, soon()).unwrap_err());
        assert_eq!((producer.capacity(), producer.record_bytes()), (100, 8));
        assert!(!producer.is_alone());
    }
    // Its own count is its own.
    hostile.set(77, 60);
    assert_eq!((producer.room(), producer.committed()), (Ok(60), 100));
    let gpu = producer.into_gpu();
    assert_eq!(hostile.memory.get::<u64>(0), Ok(100));
    hostile.damage(0xff);
    // The constants that kernels of this process use are not in that memory.
    let stream = Stream::new(driver, 0).unwrap();
    let seen = Buffer::near(driver, 0, MIB).unwrap();
    // SAFETY: both live until the copy has run.
    unsafe { stream.copy_async(seen.device_ptr(), gpu.device_ptr(), 512) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(seen.get(256), Ok(u64::from_le_bytes(*b"EGMRING2")));
    hostile.set(100, 60);
    let mut producer = gpu.into_cpu().unwrap();
    hostile.set(100, 30);
    drop(hostile);
    // It went backwards: the side cannot be handed on until it is right again.
    producer.room().unwrap_err();
    let error = producer.share_consumer(&mut channel).unwrap_err();
    assert!(
        matches!(error, share::Error::Memory(Error::CursorDamaged { .. })),
        "{error}"
    );
    assert!(producer.is_alone());
}

/// A ring that another process says it sends, and has the memory of.
fn offer(channel: &mut Channel, driver: &Driver, text: &str, bytes: &[u64]) {
    channel.send_text(text).unwrap();
    let options = egmem::vmm::PhysicalMemory::options(node(driver));
    let options = options.handle_types(egmem::driver::HandleTypes::POSIX_FD);
    let parts = bytes
        .iter()
        .map(|&bytes| options.clone().create(driver, bytes).unwrap());
    let shared = share::Shared::from_physical(parts.collect(), bytes.iter().sum()).unwrap();
    channel.send(&shared, Access::ReadWrite).unwrap();
    channel.send_link().unwrap();
}

pub fn rings_that_cannot_be_are_not_received(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let g = 2 * MIB;
    for (text, bytes) in [
        ("consumer 10 8 2097152", &[g, g][..]),
        ("producer 10 16 2097152", &[g, g]),
        ("producer 10 0 2097152", &[g, g]),
        ("producer 0 8 2097152", &[g, g]),
        ("producer 10 8 2097151", &[g, g]),
        ("producer 10 8 4194304", &[g, 2 * g]),
        ("producer 300000 8 2097152", &[g, g]),
        ("producer 18446744073709551615 8 2097152", &[g, g]),
        ("producer 2305843009213693953 8 8", &[g, g]),
        ("producer 10 8 2097152", &[g, 2 * g]),
        ("producer 10 8 2097152", &[2 * g, g]),
        ("producer 10 8 2097152", &[g]),
        ("producer 10 8 2097152", &[g, g, g]),
    ] {
        offer(&mut channel, driver, &format!("egmem-ring 1 {text}"), bytes);
        let options = ImportOptions::new();
        let error = Producer::<u64>::receive(driver, &mut others, options).unwrap_err();
        let is_it = matches!(error, share::Error::Memory(Error::InvalidArgument { .. }));
        assert!(is_it, "{text}: {error}");
        nothing_held(driver);
    }
    for text in [
        "",
        "egmem-ring 2 producer 10 8 2097152",
        "egmem-ring 1 producer 10 8",
        "egmem-ring 1 producer 10 8 9 9",
    ] {
        channel.send_text(text).unwrap();
        let options = ImportOptions::new();
        let error = Producer::<u64>::receive(driver, &mut others, options).unwrap_err();
        let is_it = matches!(error, share::Error::Memory(Error::InvalidArgument { .. }));
        assert!(is_it, "{text}: {error}");
    }
    // The channel is as good as before.
    offer(
        &mut channel,
        driver,
        "egmem-ring 1 producer 10 8 2097152",
        &[g, g],
    );
    let mut producer = Producer::<u64>::receive(driver, &mut others, ImportOptions::new()).unwrap();
    assert_eq!(
        (producer.try_push(1), producer.is_alone()),
        (Ok(true), true)
    );
    drop(producer);
    nothing_held(driver);
}

pub fn a_side_with_damaged_counters_is_not_received(driver: &Driver) {
    let (mut channel, mut others) = channels();
    let mut producer = producer(driver, 10);
    producer.share_consumer(&mut channel).unwrap();
    let Hostile { memory, link } = Hostile::receive(driver, &mut others);
    drop(link);
    for (head, tail) in [(11, 0), (0, 1), (u64::MAX, 5)] {
        producer.share_consumer(&mut channel).unwrap();
        memory.put(0, head).unwrap();
        memory.put(128, tail).unwrap();
        let options = ImportOptions::new();
        let error = Consumer::<u64>::receive(driver, &mut others, options).unwrap_err();
        let is_it = matches!(error, share::Error::Memory(Error::CursorDamaged { .. }));
        assert!(is_it && producer.is_alone(), "{error}");
        memory.put(128, 0_u64).unwrap();
    }
    producer.share_consumer(&mut channel).unwrap();
    assert_eq!(consumer(driver, &mut others).ready(), Ok(0));
}

pub fn rings_that_are_not_shareable_are_not_sent(driver: &Driver) {
    let (mut channel, _others) = channels();
    let Ring { mut producer, .. } = Ring::<u64>::on(node(driver)).create(driver).unwrap();
    let error = producer.share_consumer(&mut channel).unwrap_err();
    assert!(
        matches!(error, share::Error::Memory(Error::InvalidArgument { .. })),
        "{error}"
    );
    // A reader alone cannot have a side.
    let options = Ring::<u64>::on(node(driver)).shareable();
    let Ring {
        mut producer,
        mut consumer,
    } = options.create(driver).unwrap();
    for error in [
        producer.share_consumer(&mut channel),
        consumer.share_producer(&mut channel),
    ] {
        let error = error.unwrap_err();
        assert!(
            matches!(error, share::Error::Memory(Error::StillHeld { .. })),
            "{error}"
        );
    }
}
