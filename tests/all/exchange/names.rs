//! Names and leases over time: listed, withdrawn, restarted.

use egmem::exchange::{Address, Error, LeaseState, Refusal, Server};
use egmem::ledger::{self, Allocation};

use super::{LONG, buffer, client, fabric, ms, nothing_held, server, server_at, within};
use crate::refused::assert_refused;

#[tokio::test]
async fn names_are_listed_waited_for_and_withdrawn() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let late = async {
        tokio::time::sleep(ms(50)).await;
        server
            .publish("a/late", buffer(&own, 1 << 20))
            .now()
            .unwrap()
    };
    let (entry, published) =
        within(async { tokio::join!(client.wait("a/late", LONG), late) }).await;
    assert_eq!(entry.unwrap().name, "a/late");
    let error = within(client.wait("never", ms(40))).await.unwrap_err();
    assert!(
        matches!(error, Error::Share(egmem::share::Error::TimedOut { .. })),
        "{error}"
    );
    let names: Vec<_> = (0..600).map(|i| format!("b/{i:03}")).collect();
    let shared = egmem::share::Shared::from(buffer(&own, 1 << 20));
    let all: Vec<_> = names
        .iter()
        .map(|name| server.publish(name, shared.clone()).now().unwrap())
        .collect();
    let list = within(client.list("b/")).await.unwrap();
    assert!(list.iter().map(|entry| &entry.name).eq(&names));
    drop(all);

    let remote = within(client.fetch("a/late").go()).await.unwrap();
    // Both ends' ledgers have it.
    let exported = |entry: &Allocation| !entry.exported_to.is_empty();
    assert!(ledger::allocations(&own).iter().any(exported));
    let [import] = &ledger::allocations(&other)[..] else {
        panic!("one import");
    };
    assert_eq!(import.label.as_deref(), Some("a/late"));
    let from = import.imported.as_ref().unwrap();
    assert!(from.from.is_some() && from.identity.is_some(), "{from:?}");
    let holder = async {
        let state = remote.changed().await;
        assert!(matches!(state, LeaseState::Withdrawing { .. }), "{state}");
        remote.release().await.unwrap();
    };
    let (taken, ()) = within(async { tokio::join!(published.withdraw(LONG), holder) }).await;
    taken.unwrap();
    drop(published);
    assert!(within(client.list("")).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_holder_that_stays_loses_its_lease() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let published = server.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let remote = within(client.fetch("x").go()).await.unwrap();
    let error = within(published.withdraw(ms(50))).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Share(egmem::share::Error::Memory(egmem::Error::StillHeld { .. }))
        ),
        "{error}"
    );
    remote.put(0, 5_u64).unwrap();
    drop(published);
    within(async { while !remote.changed().await.is_lost() {} }).await;
    assert_eq!(remote.get::<u64>(0).unwrap(), 5);
    drop(remote);
    nothing_held(&other).await;
}

#[tokio::test]
async fn what_is_held_when_the_server_ends_is_not_given_back() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let client = client(&server, &other).await;
    let published = server.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let free = server.publish("y", buffer(&own, 1 << 20)).now().unwrap();
    let remote = within(client.fetch("x").go()).await.unwrap();
    let mut withdrawn = Box::pin(published.withdraw(LONG));
    let waited = tokio::time::timeout(ms(0), &mut withdrawn).await;
    waited.expect_err("it is held");
    let error = within(server.close(ms(0))).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Share(egmem::share::Error::Memory(egmem::Error::StillHeld { .. }))
        ),
        "{error}"
    );
    // The server has dropped the leases, but the holder still has the memory mapped.
    let again = published.withdraw(LONG);
    for error in [within(withdrawn).await, within(again).await] {
        let error = error.unwrap_err();
        let Error::Share(egmem::share::Error::Memory(egmem::Error::StillHeld { holders, .. })) =
            &error
        else {
            panic!("{error}");
        };
        assert_eq!(holders.len(), 1, "{error}");
    }
    within(free.withdraw(LONG)).await.unwrap();
    drop(remote);
}

#[tokio::test]
async fn a_restarted_server_is_another_one() {
    let (own, other) = (fabric(), fabric());
    // An address of its own: while no server listens there, no other test takes the port, nor does one
    // of the connections that are tried.
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let host = std::net::Ipv4Addr::new(127, 0x80 | a, b, c).to_string();
    let first = server_at(Address::Tcp { host, port: 0 }).await;
    let address = first.addresses().remove(0);
    let client = client(&first, &other).await;
    let published = first.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let remote = within(client.fetch("x").go()).await.unwrap();
    remote.put(0, 9_u64).unwrap();
    let before = client.instance();
    drop(published);
    assert!(within(remote.changed()).await.is_lost());
    drop(first);
    let second = within(async {
        loop {
            match Server::options().listen(address.clone()).start().await {
                Ok(server) => break server,
                Err(_) => tokio::time::sleep(ms(10)).await,
            }
        }
    })
    .await;
    let _published = second.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let again = within(client.wait("x", LONG)).await;
    assert_eq!(again.unwrap().name, "x");
    assert_ne!(client.instance(), before);
    let error = within(client.fetch("x").instance(before).go())
        .await
        .unwrap_err();
    assert_refused(&error, Refusal::Stale);
    assert_eq!(remote.get::<u64>(0).unwrap(), 9);
    assert_eq!(
        within(client.fetch("x").go())
            .await
            .unwrap()
            .get::<u64>(0)
            .unwrap(),
        0
    );
}

#[tokio::test]
async fn the_exporter_sees_peers_come_and_go() {
    let (own, other) = (fabric(), fabric());
    let server = server().await;
    let published = server.publish("x", buffer(&own, 1 << 20)).now().unwrap();
    let client = client(&server, &other).await;
    let remote = within(client.fetch("x").go()).await.unwrap();
    assert_eq!(published.importers().len(), 1);
    drop(remote);
    drop(client);
    within(async {
        while !published.importers().is_empty() || server.stats().sessions > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
    let stats = server.stats();
    assert_eq!((stats.fetches, stats.released), (1, 1));
    within(server.close(LONG)).await.unwrap();
    assert_eq!(server.stats().tasks, 0);
    drop(published);
}
