//! Rings with kernels on one side or both; nothing on the simulator, which knows no such kernels.

use egmem::driver::Location;
use egmem::pinned::PinnedHost;
use egmem::shapes::Ring;
use egmem::shapes::device;
use egmem::{Buffer, Driver, Memory};

use crate::shapes::kernels::{Kernels, PATIENCE, Run};
use crate::shapes::node;
use crate::shapes::ring::soon;

/// 24 bytes: no number of them fills the memory.
pub type Record = [u64; 3];

pub fn record(n: u64) -> Record {
    [n, !n, n.wrapping_mul(0x9e37_79b9_7f4a_7c15)]
}

pub fn records(count: u64) -> Vec<Record> {
    (0..count).map(record).collect()
}

/// Memory of GPU 0's host node that contains these records.
pub fn memory(driver: &Driver, contents: &[Record]) -> Buffer {
    let buffer = Buffer::near(driver, 0, size_of_val(contents) as u64).unwrap();
    buffer.write_at(0, contents).unwrap();
    buffer
}

pub const COUNT: u64 = 300_000;

pub fn a_gpu_pushes_what_the_cpu_pops(driver: &Driver) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    for capacity in [1, 7, 1000, 80_000] {
        let count = COUNT.min(capacity as u64 * 1000);
        let from = memory(driver, &records(count));
        let options = Ring::<Record>::on(node(driver)).records(capacity);
        let Ring {
            producer,
            mut consumer,
        } = options.create(driver).unwrap();
        let producer = producer.into_gpu();
        let args = [
            producer.device_ptr().0,
            from.device_ptr().0,
            count,
            PATIENCE,
        ];
        // SAFETY: the ring and the memory live until the kernel was waited for.
        let run = unsafe { kernels.launch(device::RING_PUSH_RECORDS, (1, 32), &args) };
        let mut next = 0;
        while next < count {
            let batch = consumer.peek_until(500, soon()).unwrap();
            assert!(!batch.is_empty(), "no record {next} of {count}");
            for index in 0..batch.len() {
                assert_eq!(batch.get(index), Ok(record(next)), "record {next}");
                next += 1;
            }
            batch.release().unwrap();
        }
        assert_eq!(run.wait(), [count]);
        // The CPU goes on where the kernel stopped.
        let mut producer = producer.into_cpu().unwrap();
        assert_eq!(producer.try_push(record(count)), Ok(true));
        assert_eq!(consumer.try_pop(), Ok(Some(record(count))));
    }
}

pub fn a_gpu_pops_what_the_cpu_pushes(driver: &Driver) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    for capacity in [1, 7, 1000, 80_000] {
        let count = COUNT.min(capacity as u64 * 1000);
        let to = memory(driver, &vec![[0; 3]; count as usize]);
        let options = Ring::<Record>::on(node(driver)).records(capacity);
        let Ring {
            mut producer,
            consumer,
        } = options.create(driver).unwrap();
        let consumer = consumer.into_gpu();
        let args = [consumer.device_ptr().0, to.device_ptr().0, count, PATIENCE];
        // SAFETY: the ring and the memory live until the kernel was waited for.
        let run = unsafe { kernels.launch(device::RING_POP_RECORDS, (1, 32), &args) };
        let all = records(count);
        let mut rest = &all[..];
        while !rest.is_empty() {
            let batch = rest.len().min(capacity).min(333);
            let mut room = producer.reserve_until(batch, soon()).unwrap().unwrap();
            room.write(0, &rest[..batch]).unwrap();
            room.commit().unwrap();
            rest = &rest[batch..];
        }
        assert_eq!(run.wait(), [count]);
        let mut found = vec![[0; 3]; count as usize];
        to.read_at(0, &mut found).unwrap();
        assert!(found == all);
    }
}

/// Through a ring in the GPU's own memory, and through one on its host node.
pub fn kernels_pass_records_to_each_other(driver: &Driver) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    for location in [Location::Device(0), node(driver).into()] {
        pass_records(driver, [&kernels, &kernels], location);
    }
}

/// A kernel pushes records through a ring at a location, and another pops them.
pub fn pass_records(driver: &Driver, [pushing, popping]: [&Kernels; 2], location: Location) {
    let from = memory(driver, &records(COUNT));
    let to = memory(driver, &vec![[0; 3]; COUNT as usize]);
    let options = Ring::<Record>::on(location).records(5000);
    let Ring { producer, consumer } = options.create(driver).unwrap();
    let (producer, consumer) = (producer.into_gpu(), consumer.into_gpu());
    let runs = [pushing.run(), popping.run()];
    let mut done = 0;
    // Calls of other tests may keep the second kernel from starting until the first has filled the ring and given up.
    while done < COUNT {
        let args = |ring, memory: &Buffer, run: &Run| {
            let memory = memory.device_ptr().0 + done * size_of::<Record>() as u64;
            [ring, memory, COUNT - done, PATIENCE / 100, run.report()]
        };
        let push = args(producer.device_ptr().0, &from, &runs[0]);
        let pop = args(consumer.device_ptr().0, &to, &runs[1]);
        // SAFETY: the ring and the memory live until both kernels were waited for.
        unsafe {
            pushing.start(&runs[0], device::RING_PUSH_RECORDS, (1, 32), &push);
            popping.start(&runs[1], device::RING_POP_RECORDS, (1, 32), &pop);
        }
        let [[pushed], [popped]] = [runs[0].wait(), runs[1].wait()];
        assert!(pushed == popped && pushed > 0, "{pushed}, {popped}");
        done += pushed;
    }
    let mut found = vec![[0; 3]; COUNT as usize];
    to.read_at(0, &mut found).unwrap();
    assert!(found == records(COUNT));
}

pub fn a_block_pushes_batches(driver: &Driver) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    for (threads, batch) in [(32, 1), (256, 100), (1024, 4096)] {
        let options = Ring::<[u64; 2]>::on(node(driver)).records(10_000);
        let Ring {
            producer,
            mut consumer,
        } = options.create(driver).unwrap();
        let producer = producer.into_gpu();
        let args = [producer.device_ptr().0, 100_001, batch, PATIENCE];
        // SAFETY: the ring lives until the kernel was waited for.
        let run = unsafe { kernels.launch(device::RING_PUSH_NUMBERED, (1, threads), &args) };
        for n in 0..100_001_u64 {
            assert_eq!(consumer.pop_until(soon()), Ok(Some([n, !n])));
        }
        assert_eq!(run.wait(), [100_001]);
    }
}

pub fn a_full_ring_ends_a_kernel_that_waits_no_longer(driver: &Driver) {
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    let from = memory(driver, &records(100));
    let options = Ring::<Record>::on(node(driver)).records(60);
    let Ring {
        producer,
        mut consumer,
    } = options.create(driver).unwrap();
    let producer = producer.into_gpu();
    let args = [producer.device_ptr().0, from.device_ptr().0, 100, 10];
    // SAFETY: the ring and the memory live until the kernel was waited for.
    let run = unsafe { kernels.launch(device::RING_PUSH_RECORDS, (1, 32), &args) };
    assert_eq!(run.wait(), [60]);
    assert_eq!(consumer.pop_into(&mut vec![[0; 3]; 60]), Ok(60));
    // A second kernel goes on with the rest.
    let rest = from.device_ptr().0 + 60 * 24;
    let args = [producer.device_ptr().0, rest, 40, 10];
    // SAFETY: as above.
    let run = unsafe { kernels.launch(device::RING_PUSH_RECORDS, (1, 32), &args) };
    assert_eq!(run.wait(), [40]);
    assert_eq!(consumer.try_pop(), Ok(Some(record(60))));
    // And one measures: it sees that each record is released.
    drop((producer, consumer));
    let ring = Ring::<[u64; 2]>::on(node(driver)).create(driver).unwrap();
    let (producer, mut consumer) = (ring.producer.into_gpu(), ring.consumer);
    let times = PinnedHost::new(driver, 0, 8 * 50).unwrap();
    let args = [producer.device_ptr().0, 50, PATIENCE, times.device_ptr().0];
    // SAFETY: as above.
    let run = unsafe { kernels.launch(device::RING_ROUND_TRIPS, (1, 1), &args) };
    for n in 0..50_u64 {
        assert_eq!(consumer.pop_until(soon()), Ok(Some([n, !n])));
    }
    let [nanoseconds, cycles] = run.wait();
    assert!(nanoseconds > 0 && cycles > 0);
}
