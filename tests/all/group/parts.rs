//! Ranks whose memory has more parts than fds come with a message.

use std::time::Instant;

use egmem::Growth;

use super::*;

const PARTS: u64 = 60;
const PART: u64 = 2 << 20;

/// A buffer in so many chunks, each with a mark.
fn in_parts(driver: &Driver, parts: u64, mark: u64) -> Buffer {
    let options = Buffer::on(NodeId(0)).bytes(parts * PART).shareable();
    let options = options.growth(Growth::steady().chunk(PART));
    let buffer = options.allocate(driver).unwrap();
    for part in 0..parts {
        buffer.put(part * PART, mark + part).unwrap();
    }
    buffer
}

/// Rank 0 brings few parts, the others many; all find all marks, when they join and when they gather.
async fn exchange_and_gather(driver: Driver, map: Map, via: HandleType, address: Address) {
    const SIZE: u32 = 3;
    let results = all(SIZE, |rank| {
        let (driver, address) = (driver.clone(), address.clone());
        async move {
            let parts = |rank| if rank == 0 { 2 } else { PARTS };
            let mark = |rank: u32, round: u64| round * 1000 * u64::from(rank + 1);
            let has_marks = |memory: &egmem::share::ImportedBuffer, rank: u32, round: u64| {
                assert_eq!(memory.description().parts.len() as u64, parts(rank));
                for part in 0..parts(rank) {
                    assert_eq!(memory.get(part * PART), Ok(mark(rank, round) + part));
                }
            };
            let own = in_parts(&driver, parts(rank), mark(rank, 1));
            let group = options(rank, SIZE, &address).memory(own).map(map);
            let group = group.join(&driver).await?;
            assert_eq!(group.via(), via);
            for other in (0..SIZE).filter(|other| *other != rank) {
                has_marks(group.rank(other)?, other, 1);
            }
            for round in 2..4 {
                let own = in_parts(&driver, parts(rank), mark(rank, round));
                let gathered = group.gather_memory(Some(own.into()), LONG).await?;
                for other in (0..SIZE).filter(|other| *other != rank) {
                    has_marks(gathered.rank(other)?, other, round);
                }
                // All have mapped all.
                group.barrier(LONG).await?;
            }
            group.leave(LONG).await.map(drop)
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
    // Threads that serve handles end once no rank has any.
    let sim = driver.sim().unwrap();
    let end = Instant::now() + LONG;
    while !sim.held().is_empty() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(sim.held().is_empty(), "{}", sim.held());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_with_many_parts_exchange_them_by_fds() {
    for map in [Map::All, Map::Lazy] {
        exchange_and_gather(no_fabric(), map, HandleType::PosixFd, free_address()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_with_many_parts_exchange_them_by_fabric_handles() {
    exchange_and_gather(fabric(), Map::All, HandleType::Fabric, free_address()).await;
}
