//! Shapes that two GPUs use, each in its own way. On a machine with one GPU these say that they are skipped.

use egmem::driver::{Access, DevicePtr, Location};
use egmem::pinned::PinnedHost;
use egmem::proof::Prover;
use egmem::shapes::{Growable, Ring, Stripes, stripes};
use egmem::{Driver, Error, Memory, Stream};

use crate::shapes::kernels::Kernels;
use crate::shapes::ring_on_gpu::{Record, pass_records, records};
use crate::shapes::{MIB, node, nothing_held};

const GPUS: [i32; 2] = [0, 1];

/// Whether there are two GPUs that reach each other's memory.
fn are_two(driver: &Driver) -> bool {
    let reach = |gpu, other| driver.device_can_access_peer(gpu, other) == Ok(true);
    let are_two = driver.device_count().unwrap() > 1 && reach(0, 1) && reach(1, 0);
    if !are_two {
        println!("skipped: there are no two GPUs that reach each other's memory");
    }
    are_two
}

/// One GPU writes a vector, another only reads it, in chunks that come later too: in host memory and in the owner's.
pub fn one_gpu_writes_a_vector_and_another_reads_it(driver: &Driver) {
    if !are_two(driver) {
        return;
    }
    let provers = GPUS.map(|gpu| Prover::new(driver, gpu).unwrap());
    let [owner, reader] = GPUS.map(Location::Device);
    let stream = Stream::new(driver, 1).unwrap();
    for location in [node(driver).into(), owner] {
        let options = Growable::<u64>::on(location).max_len(8 << 20).step(2 * MIB);
        let options = options.access(owner, Access::ReadWrite);
        let mut vector = options.access(reader, Access::Read).create(driver).unwrap();
        let mut prefixes = Vec::new();
        for seed in 0..4 {
            vector.extend_unwritten(300_000).unwrap();
            provers[0].write(&vector, seed).unwrap();
            let words = vector.len() as u64;
            let all = (0..words).fold(0, |all, at| all ^ egmem::kernels::pattern(seed, at));
            assert_eq!(provers[1].read(&vector), Ok(all));
            prefixes.push(vector.prefix());
            provers[1].read(&prefixes[0]).unwrap();
            let (who, have, need) = (reader, Access::Read, Access::ReadWrite);
            let refused = Error::NotAccessible { who, have, need };
            assert_eq!(provers[1].write(&vector, 9), Err(refused.clone()));
            assert_eq!(stream.fill(&prefixes[0], 0, 8, 9), Err(refused));
            // The owner's bytes are still there.
            provers[0].check_rewrite(&vector, seed, seed).unwrap();
        }
        assert!(vector.chunks() > 2);
    }
    drop((provers, stream));
    nothing_held(driver);
}

/// A range whose stripes lie on the two in turn is the same bytes for both.
pub fn stripes_on_two_gpus_are_one_range(driver: &Driver) {
    if !are_two(driver) {
        return;
    }
    let provers = GPUS.map(|gpu| Prover::new(driver, gpu).unwrap());
    let places = GPUS.map(Location::Device);
    let plan = Stripes::over(places).stripe(2 * MIB);
    let options = plan.options(10 * MIB).unwrap().access_by(places);
    let range = options.allocate(driver).unwrap();
    let found = stripes(&range).into_iter().map(|stripe| stripe.location);
    assert!(found.eq([0, 1, 0, 1, 0].map(Location::Device)));
    for [writer, reader] in [[0, 1], [1, 0]] {
        let seed = 5 + writer as u64;
        provers[writer].write(&range, seed).unwrap();
        let words = 10 * MIB / 8;
        let all = (0..words).fold(0, |all, at| all ^ egmem::kernels::pattern(seed, at));
        assert_eq!(provers[reader].read(&range), Ok(all));
    }
    drop((provers, range));
    nothing_held(driver);
}

/// Bytes of a GPU's copy, from one address to another.
///
/// # Safety
/// Both are mapped for the GPU until this returns.
unsafe fn copy(stream: &Stream, to: DevicePtr, from: DevicePtr, bytes: u64) {
    // SAFETY: the caller's promise; the copy is waited for.
    unsafe { stream.copy_async(to, from, bytes) }.unwrap();
    stream.synchronize().unwrap();
}

/// One GPU writes a ring's records, the other reads them, through either mapping and past the end of the first.
pub fn two_gpus_reach_both_mappings_of_a_ring(driver: &Driver) {
    if !are_two(driver) {
        return;
    }
    const BATCH: u64 = 500;
    let bytes = BATCH * size_of::<Record>() as u64;
    let streams = GPUS.map(|gpu| Stream::new(driver, gpu).unwrap());
    let [from, to] = GPUS.map(|gpu| PinnedHost::new(driver, gpu, bytes).unwrap());
    for location in [Location::Device(1), node(driver).into()] {
        let options = Ring::<Record>::on(location).access_by(GPUS.map(Location::Device));
        let Ring { producer, consumer } = options.create(driver).unwrap();
        let (producer, consumer) = (producer.into_gpu(), consumer.into_gpu());
        let mapped = 2 * MIB;
        // In the first mapping, over its end, and in the second.
        for place in [0, mapped - 100, mapped, 2 * mapped - bytes] {
            let mut batch = records(BATCH);
            batch[0][0] = place;
            from.cpu().write_at(0, &batch).unwrap();
            // SAFETY: the ring and the pinned memory live longer than the copies, and are mapped for every GPU.
            unsafe {
                copy(
                    &streams[0],
                    producer.records_ptr().add(place),
                    from.device_ptr(),
                    bytes,
                );
            }
            // The same bytes, where they are in the other mapping.
            for seen in [place, (place + mapped) % (2 * mapped)] {
                if seen + bytes > 2 * mapped {
                    continue; // the batch would end behind the second mapping
                }
                to.cpu().fill(0, bytes, 0).unwrap();
                // SAFETY: as above.
                unsafe {
                    copy(
                        &streams[1],
                        to.device_ptr(),
                        consumer.records_ptr().add(seen),
                        bytes,
                    );
                }
                let mut found = vec![[0; 3]; BATCH as usize];
                to.cpu().read_at(0, &mut found).unwrap();
                assert!(found == batch, "{location}: {place}, {seen}");
            }
        }
    }
    drop((streams, from, to));
    nothing_held(driver);
}

/// A kernel of each GPU has one side: in either GPU's memory, and in the host's.
pub fn kernels_of_two_gpus_pass_records(driver: &Driver) {
    if !are_two(driver) {
        return;
    }
    let [Some(one), Some(other)] = GPUS.map(|gpu| Kernels::load_on(driver, gpu)) else {
        return;
    };
    for location in [
        Location::Device(1),
        Location::Device(0),
        node(driver).into(),
    ] {
        pass_records(driver, [&one, &other], location);
    }
}
