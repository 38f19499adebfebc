//! GPUs of one process pass their data round a ring: after one step less than there are GPUs, each has the data of
//! all.
//!
//! ```text
//! cargo run --example ring-exchange
//! ```
//! Each GPU reads its left neighbour's memory, which is granted to it and to no other GPU. On all GPUs of the
//! machine; a single GPU is every rank of the ring. Where there is no GPU, on a simulated machine.

use std::error::Error;
use std::sync::Arc;

use egmem::driver::Location;
use egmem::{Buffer, Driver, Machine, Stream, Topology};

/// The bytes of each rank.
const SLOT: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::h200x8()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let topology = Topology::discover(&driver)?;
    let gpus = topology.gpus();
    let ranks = gpus.len().max(2);
    let gpu = |rank: usize| &gpus[rank % gpus.len()];

    let mut memory = Vec::new();
    let mut streams = Vec::new();
    for rank in 0..ranks {
        let (own, right) = (gpu(rank), gpu(rank + 1));
        // The right neighbour reads this memory. Where it cannot, both use memory of the host.
        let is_reached = own.ordinal == right.ordinal || right.peer_link(own.ordinal)?.access;
        let place = match is_reached {
            true => Location::from(own),
            false => own.host_node()?.into(),
        };
        let buffer = Buffer::on(place)
            .access_by([own, right])
            .bytes(ranks as u64 * SLOT)
            .allocate(&driver)?;
        let stream = Stream::new(&driver, own.ordinal)?;
        stream.fill(&buffer, rank as u64 * SLOT, SLOT, 1 + rank as u8)?;
        memory.push(Arc::new(buffer));
        streams.push(stream);
    }

    for step in 1..ranks {
        let mut copies = Vec::new();
        for (rank, stream) in streams.iter().enumerate() {
            // The left neighbour's data from the last step, or its own data in the first.
            let left = (rank + ranks - 1) % ranks;
            let slot = ((rank + ranks - step) % ranks) as u64 * SLOT;
            let (to, from) = (Arc::clone(&memory[rank]), Arc::clone(&memory[left]));
            copies.push(stream.start_copy((to, slot), (from, slot), SLOT)?);
        }
        for copy in copies {
            copy.wait()?; // no rank reads on before all have written
        }
    }

    let seen = Buffer::near(&driver, 0, ranks as u64 * SLOT)?;
    for (rank, stream) in streams.iter().enumerate() {
        stream.copy(&seen, 0, &*memory[rank], 0, ranks as u64 * SLOT)?;
        for of in 0..ranks {
            let last: u8 = seen.get((of as u64 + 1) * SLOT - 1)?;
            assert_eq!(last, 1 + of as u8, "rank {rank}, data of rank {of}");
        }
    }
    for rank in 0..ranks {
        let (own, left) = (gpu(rank), gpu(rank + ranks - 1));
        let way = match own.peer_link(left.ordinal) {
            Ok(link) if link.access => format!("GPU {}: {}", link.gpu, link.kind),
            Ok(link) => format!("GPU {}, through host memory", link.gpu),
            Err(_) => "its own memory".into(),
        };
        println!("rank {rank}: GPU {} from {way}", own.ordinal);
    }
    println!("each of {ranks} ranks has the data of all");
    Ok(())
}
