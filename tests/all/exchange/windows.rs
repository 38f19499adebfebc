//! Windows of one memory under names of their own.

use std::sync::Arc;

use egmem::Driver;
use egmem::driver::{Access, Call, HandleType};
use egmem::exchange::server::Published;
use egmem::exchange::{Address, Error};
use egmem::share::Shared;

use super::{
    LONG, buffer, client, fabric, let_go, ms, no_fabric, nothing_held, options, server, server_at,
    tls, within,
};

fn imports(driver: &Driver) -> u64 {
    let sim = driver.sim().unwrap();
    sim.count(Call::MemImportFromShareableHandle)
}

fn exports(driver: &Driver) -> u64 {
    driver
        .sim()
        .unwrap()
        .count(Call::MemExportToShareableHandle)
}

/// Names `0`, `1` … for windows of 4 KiB, side by side.
fn publish(server: &egmem::exchange::Server, shared: &Shared, count: u64) -> Vec<Published> {
    let publish = |index: u64| {
        let window = shared.window(index * 4096, 4096).unwrap();
        server.publish(index.to_string(), window).now().unwrap()
    };
    (0..count).map(publish).collect()
}

#[tokio::test]
async fn a_hundred_windows_are_one_import() {
    let (own, other) = (fabric(), fabric());
    let folder = tempfile::tempdir().unwrap();
    let server = server_at(Address::Unix(folder.path().join("socket"))).await;
    let shared = Shared::from(buffer(&own, 3 << 20));
    // The allocation tried an export to find out whether it can be shared.
    let exported = exports(&own);
    let published = publish(&server, &shared, 100);
    let client = client(&server, &other).await;
    let mut fetched = Vec::new();
    for index in 0..100 {
        let remote = within(client.fetch(index.to_string()).go()).await.unwrap();
        assert_eq!((remote.len(), remote.via()), (4096, HandleType::PosixFd));
        // Its neighbours' bytes are not for trying.
        let proof = remote.proved();
        assert!(proof.by.is_none(), "{proof:?}");
        remote.fill(index as u8 + 1).unwrap();
        fetched.push(remote);
    }
    assert_eq!(imports(&other), 1);
    assert_eq!(exports(&own), exported + 1);
    let mut bytes = vec![0_u8; 3 << 20];
    shared.buffer().unwrap().read_at(0, &mut bytes).unwrap();
    let expected = (0..100).flat_map(|index| [index + 1; 4096]);
    assert!(
        bytes
            .iter()
            .copied()
            .eq(expected.chain(std::iter::repeat_n(0, (3 << 20) - 409_600)))
    );
    // The server counts the bytes of the windows, not the memory a hundred times.
    assert_eq!(server.stats().bytes, 409_600);
    let entry = within(client.list("7")).await.unwrap().remove(0);
    assert_eq!(
        (entry.memory.offset, entry.memory.len),
        (Some(7 * 4096), 4096)
    );
    // Leases are each window's own.
    let remote = fetched.remove(7);
    within(remote.release()).await.unwrap();
    assert!(published[7].importers().is_empty());
    within(published[7].withdraw(LONG)).await.unwrap();
    let error = within(published[8].withdraw(ms(20))).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Share(egmem::share::Error::Memory(egmem::Error::StillHeld { .. }))
        ),
        "{error}"
    );
    drop(fetched);
    nothing_held(&other).await;
}

#[tokio::test]
async fn windows_go_by_fabric_handle() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let shared = Shared::from(buffer(&own, 3 << 20));
    let exported = exports(&own);
    let published = publish(&server, &shared, 3);
    let client = client(&server, &other).await;
    for (index, published) in published.iter().enumerate() {
        let fetch = client.fetch(index.to_string()).via(HandleType::Fabric);
        let remote = within(fetch.go()).await.unwrap();
        assert_eq!(remote.via(), HandleType::Fabric);
        remote.put(4088, index as u64 + 5).unwrap();
        let window = published.shared().unwrap();
        assert_eq!(window.word(4088).unwrap(), index as u64 + 5);
        within(remote.release()).await.unwrap();
    }
    assert_eq!(exports(&own), exported + 1);
    nothing_held(&other).await;
}

/// By fd, from a server with a proved name.
#[tokio::test]
async fn windows_go_by_fd_over_tls() {
    let (own, other) = (no_fabric(), no_fabric());
    let ends = tls();
    let server = ends.server().await;
    let shared = Shared::from(buffer(&own, 3 << 20));
    let published = publish(&server, &shared, 5);
    let options = options(&server).security(ends.client.clone());
    let client = within(options.connect(&other)).await.unwrap();
    let mut fetched = Vec::new();
    for index in 0..5 {
        fetched.push(within(client.fetch(index.to_string())).await.unwrap());
    }
    assert_eq!(imports(&other), 1);
    for (index, remote) in fetched.iter().enumerate() {
        assert_eq!(remote.via(), HandleType::PosixFd);
        remote.put(0, index as u64 + 9).unwrap();
        let buffer = shared.buffer().unwrap();
        let found: u64 = buffer.get(index as u64 * 4096).unwrap();
        assert_eq!(found, index as u64 + 9);
    }
    drop(fetched);
    nothing_held(&other).await;
    for published in &published {
        let_go(published).await;
    }
}

/// A value that the window holds for the memory lives as long as the name is there, or a holder's lease.
#[tokio::test]
async fn a_published_window_keeps_its_owner() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let owner = Arc::new(());
    let window = Shared::from(buffer(&own, 1 << 20)).window(64, 64).unwrap();
    let window = window.holding(Arc::clone(&owner));
    let published = server
        .publish("x", window)
        .access(Access::Read)
        .now()
        .unwrap();
    let client = client(&server, &other).await;
    let remote = within(client.fetch("x").go()).await.unwrap();
    assert!(remote.put(0, 1_u8).is_err());
    let held = || Arc::strong_count(&owner) == 2;
    within(published.withdraw(ms(20))).await.unwrap_err();
    assert!(held());
    within(remote.release()).await.unwrap();
    let window = within(published.withdraw(LONG)).await.unwrap();
    drop(published);
    assert!(held());
    drop(window);
    within(async {
        while held() {
            tokio::time::sleep(ms(2)).await;
        }
    })
    .await;
}
