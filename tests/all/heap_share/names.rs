//! Blocks under names.

use egmem::driver::{Access, Call, HandleType};
use egmem::exchange::{Address, Client, Server};
use egmem::{Driver, Machine};
use tokio::time::timeout;

use super::{KIB, PATIENCE, block, count, heap, nothing_held, share};

/// Each block has a lease of its own; the chunk is one import.
#[tokio::test]
async fn published_blocks_are_fetched_and_given_back() {
    let [own, other] = [(); 2].map(|()| Driver::simulated(Machine::gh200()).unwrap());
    let heap = heap(&own);
    for (via, address) in [
        // No peer's name is proved here, so each import is separate.
        (HandleType::Fabric, Address::loopback(0)),
        (HandleType::PosixFd, unix()),
    ] {
        let server = Server::options().listen(address).start();
        let server = server.await.unwrap();
        let blocks: Vec<_> = (0..20).map(|_| block(&heap, 3 * KIB)).collect();
        let publish = |(index, block)| {
            let name = format!("blocks/{index}");
            server.publish(&name, share(block)).now().unwrap()
        };
        let published: Vec<_> = blocks.iter().enumerate().map(publish).collect();
        let client = Client::options(server.addresses().remove(0));
        let client = client.connect(&other).await.unwrap();
        let before = count(&other, Call::MemImportFromShareableHandle).unwrap();
        let mut fetched = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            let fetch = client.fetch(format!("blocks/{index}")).via(via);
            let remote = timeout(PATIENCE, fetch.go()).await.unwrap().unwrap();
            assert_eq!((remote.via(), remote.len()), (via, 3 * KIB));
            remote.fill(index as u8 + 1).unwrap();
            assert_eq!(block.get::<u8>(3 * KIB - 1).unwrap(), index as u8 + 1);
            fetched.push(remote);
        }
        let imports = count(&other, Call::MemImportFromShareableHandle).unwrap() - before;
        assert_eq!(imports, if via == HandleType::PosixFd { 1 } else { 20 });
        for (index, block) in blocks.iter().enumerate() {
            let mut bytes = vec![0_u8; 3 * KIB as usize];
            block.read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == index as u8 + 1));
        }
        // Only names and leases hold them now.
        drop(blocks);
        assert_eq!(heap.stats().live_blocks, 20);
        let mut left = 20;
        for (remote, published) in fetched.into_iter().zip(&published) {
            published.withdraw(super::Duration::ZERO).await.unwrap_err();
            timeout(PATIENCE, remote.release()).await.unwrap().unwrap();
            let shared = timeout(PATIENCE, published.withdraw(PATIENCE)).await;
            let shared = shared.unwrap().unwrap();
            assert_eq!(shared.describe(Access::Read).unwrap().len, 3 * KIB);
            assert_eq!(heap.stats().live_blocks, left);
            drop(shared);
            // Though the publications are there.
            left -= 1;
            assert_eq!(heap.stats().live_blocks, left);
            published.shared().unwrap_err();
            published.withdraw(PATIENCE).await.unwrap_err();
        }
        drop(published);
        client.close().await;
        server.close(PATIENCE).await.unwrap();
    }
    drop(heap);
    nothing_held(&own);
    nothing_held(&other);
}

fn unix() -> Address {
    // Removed with the process's other files: the test is over by then.
    let folder = tempfile::tempdir().unwrap().keep();
    Address::Unix(folder.join("socket"))
}
