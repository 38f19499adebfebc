//! Memory with more parts than fds come with a message.

use egmem::Growth;
use egmem::exchange::server::Published;
use egmem::exchange::{Address, Client, End};

use super::*;

/// More fds than one message carries (32): they are sent 16 at a time.
const PARTS: u64 = 40;
const PART: u64 = 2 << 20;

/// A buffer of so many chunks, with room for a probe in the last.
fn in_parts(driver: &Driver) -> Buffer {
    let options = Buffer::on(NodeId(0)).bytes(PARTS * PART - 4096).shareable();
    let options = options.growth(Growth::steady().chunk(PART));
    let buffer = options.allocate(driver).unwrap();
    assert_eq!(buffer.physical().len() as u64, PARTS);
    buffer
}

/// Fetches the memory, and checks its bytes both ways.
async fn fetched(client: &Client, own: &Driver, published: &Published, via: HandleType) {
    let remote = within(client.fetch("x").via(via).go()).await.unwrap();
    assert_eq!(remote.via(), via);
    assert_eq!(remote.description().parts.len() as u64, PARTS);
    let proved = via == HandleType::Fabric;
    assert_eq!(remote.proved().both_ways, proved, "{:?}", remote.proved());
    verify(own, published, &remote);
    within(remote.release()).await.unwrap();
    // Handles without an import: all of them.
    let leased = within(client.fetch("x").via(via).lease()).await.unwrap();
    assert_eq!(leased.handles().len() as u64, PARTS);
    within(leased.release()).await.unwrap();
    assert!(published.importers().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_parts_go_over_each_way() {
    let folder = tempfile::tempdir().unwrap();
    let unix = Address::Unix(folder.path().join("socket"));
    for (address, via, of) in [
        (unix, HandleType::PosixFd, no_fabric as fn() -> Driver),
        (Address::loopback(0), HandleType::PosixFd, no_fabric),
        (Address::loopback(0), HandleType::Fabric, fabric),
    ] {
        let (own, other) = (of(), of());
        let server = server_at(address).await;
        let published = server.publish("x", in_parts(&own)).now().unwrap();
        let client = client(&server, &other).await;
        fetched(&client, &own, &published, via).await;
        nothing_held(&other).await;
        client.close().await;
        drop(published);
        server.close(ms(0)).await.unwrap();
        nothing_held(&own).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_parts_go_over_tls() {
    for (of, via) in [
        (fabric as fn() -> Driver, HandleType::Fabric),
        (no_fabric, HandleType::PosixFd),
    ] {
        let (own, other, ends) = (of(), of(), tls());
        let server = ends.server().await;
        let published = server.publish("x", in_parts(&own)).now().unwrap();
        let options = options(&server).security(ends.client.clone());
        let client = within(options.connect(&other)).await.unwrap();
        fetched(&client, &own, &published, via).await;
        nothing_held(&other).await;
    }
}

/// The lease ends, and neither side keeps anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_that_fails_in_the_middle_leaves_nothing() {
    let (own, other) = (no_fabric(), no_fabric());
    let server = server().await;
    let published = server.publish("x", in_parts(&own)).now().unwrap();
    let client = client(&server, &other).await;
    let before = own.sim().unwrap().held();
    for nth in [1, PARTS / 2, PARTS] {
        let sim = other.sim().unwrap();
        sim.fail(
            Call::MemImportFromShareableHandle,
            nth,
            egmem::driver::Code::UNKNOWN,
        );
        let error = within(client.fetch("x").go()).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Import {
                    end: End::There,
                    ..
                }
            ),
            "{error}"
        );
        nothing_held(&other).await;
        let_go(&published).await;
        within(async {
            while server.stats().fds > 0 {
                tokio::time::sleep(ms(2)).await;
            }
        })
        .await;
    }
    assert_eq!(own.sim().unwrap().held(), before);
    fetched(&client, &own, &published, HandleType::PosixFd).await;
}
