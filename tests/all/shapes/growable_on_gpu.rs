//! Kernels that read a vector while it grows.

use egmem::driver::LaunchDims;
use egmem::kernels::{self, pattern};
use egmem::pinned::PinnedHost;
use egmem::shapes::{Growable, Ring, device};
use egmem::{Driver, Memory, Result, Stream};

use crate::shapes::kernels::{Kernels, PATIENCE};
use crate::shapes::ring::soon;
use crate::shapes::ring_on_gpu::{Record, record};
use crate::shapes::{MIB, node, nothing_held};

/// Kernels read the elements that were there while the CPU adds more and takes them back.
pub fn kernels_read_a_prefix_while_more_is_added(driver: &Driver) {
    const LAUNCHES: u64 = 21;
    let options = Growable::<u64>::on(node(driver))
        .max_len(16 << 20)
        .step(2 * MIB);
    let mut vector = options.create(driver).unwrap();
    let words: Vec<u64> = (0..500_000).map(|at| pattern(1, at)).collect();
    for half in words.chunks(250_000) {
        vector.extend_from_slice(half).unwrap();
    }
    let stream = Stream::new(driver, 0).unwrap();
    let found = PinnedHost::new(driver, 0, 8).unwrap();
    found.cpu().put(0, 0_u64).unwrap();
    let prefix = vector.prefix();
    let args = [
        prefix.device_ptr().0,
        prefix.len() as u64,
        found.device_ptr().0,
    ];
    // SAFETY: the text is PTX.
    let module = unsafe { driver.module_load(0, kernels::PTX) }.unwrap();
    let (blocks, threads) = (1, 256); // slow, so that some run meanwhile
    // SAFETY: the prefix keeps the elements until the kernels were waited for, and the result lives as long.
    unsafe {
        let read = driver.module_function(0, module, kernels::READ).unwrap();
        for _ in 0..LAUNCHES {
            let dims = LaunchDims { blocks, threads };
            driver
                .launch_kernel(read, dims, &args, stream.handle())
                .unwrap();
        }
    }
    let mut grow = || -> Result<()> {
        for _ in 0..10 {
            vector.extend_from_slice(&words)?;
        }
        vector.truncate(100_000); // the prefix has more
        vector.shrink_to_fit().map(drop)
    };
    let grown = grow();
    stream.finish().unwrap(); // before anything is dropped
    grown.unwrap();
    // Exclusive or of all words, an odd number of times.
    let expected = words.iter().fold(0, |all, word| all ^ word);
    assert_eq!(found.cpu().get(0), Ok(expected));
    // SAFETY: nothing runs any more.
    unsafe { driver.module_unload(0, module) }.unwrap();
    drop((vector, prefix, stream, found));
    nothing_held(driver);
}

/// A kernel sends elements to the CPU, which adds those that come next while the kernel waits for room: in memory that
/// is mapped while it runs.
pub fn a_kernel_reads_elements_that_come_while_it_runs(driver: &Driver) {
    const ROOM: usize = 10_000;
    const COUNT: usize = 600_000;
    let Some(kernels) = Kernels::load(driver) else {
        return;
    };
    let options = Growable::<Record>::on(node(driver))
        .max_len(COUNT)
        .step(2 * MIB);
    let mut vector = options.create(driver).unwrap();
    let add = |vector: &mut Growable<Record>, count: usize| {
        let len = vector.len() as u64;
        let new: Vec<Record> = (len..len + count as u64).map(record).collect();
        vector.extend_from_slice(&new).unwrap();
    };
    add(&mut vector, ROOM);
    let options = Ring::<Record>::on(node(driver)).records(ROOM);
    let Ring {
        producer,
        mut consumer,
    } = options.create(driver).unwrap();
    let producer = producer.into_gpu();
    let args = [
        producer.device_ptr().0,
        vector.device_ptr().0,
        COUNT as u64,
        PATIENCE,
    ];
    // SAFETY: the ring lives until the kernel was waited for. The kernel reads a record when the ring has room for it. There
    // is room for ROOM records at first, and for one more when one is released; by then the vector has it.
    let run = unsafe { kernels.launch(device::RING_PUSH_RECORDS, (1, 32), &args) };
    let before = vector.chunks();
    let mut next = 0;
    while next < COUNT {
        let batch = consumer.peek_until(ROOM, soon()).unwrap();
        assert!(!batch.is_empty(), "no record {next} of {COUNT}");
        for index in 0..batch.len() {
            assert_eq!(batch.get(index), Ok(record((next + index) as u64)));
        }
        let count = batch.len();
        let left = COUNT - vector.len();
        add(&mut vector, count.min(left));
        batch.release().unwrap();
        next += count;
    }
    assert_eq!(run.wait(), [COUNT as u64]);
    assert!(vector.chunks() > before + 3, "{}", vector.chunks());
}
