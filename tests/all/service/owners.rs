//! Which peer owns a name, which names it may create, and the content of refusals to others.

use egmem::exchange::{Mismatch, Owner};

use super::*;

fn detail<T: std::fmt::Debug>(result: Result<T>) -> (Refusal, String) {
    match result {
        Err(Error::Refused { reason, detail, .. }) => (reason, detail),
        other => panic!("{other:?}"),
    }
}

fn mismatch<T: std::fmt::Debug>(result: Result<T>) -> Mismatch {
    match result {
        Err(Error::Mismatched { what, .. }) => *what,
        other => panic!("{other:?}"),
    }
}

fn owner(name: &str) -> Owner {
    name.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_creates_names_under_its_own_prefixes_alone_and_is_told_which() {
    let peers = Peers::new();
    let driver = driver();
    let own = peers.config_of_names("", LEASES_STAY, "");
    let service = Service::start(own.clone(), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let ask = |name: &str| CreateOptions::new(name, 1).node(NodeId(0));
    a.create(ask("a.test/1")).await.unwrap();
    for name in ["b.test/1", "one", "a.test", "a.test2/1", "node.test/1"] {
        let (reason, why) = detail(a.create(ask(name)).await);
        assert_eq!(reason, Refusal::WrongPrefix, "{name}");
        assert!(why.ends_with("under a.test/"), "{name}: {why}");
    }
    // Nothing is charged for a refused request.
    b.create(ask("b.test/1")).await.unwrap();

    let rule = "[[create.prefix]]\npeers = [\"b.test\"]\nnames = [\"kv/\", \"jobs/{peer}/\"]\n";
    let ruled = peers.config_of_names("", LEASES_STAY, rule);
    assert!(service.reload(ruled).unwrap().is_empty());
    b.create(ask("kv/1")).await.unwrap();
    b.create(ask("jobs/b.test/1")).await.unwrap();
    let (reason, why) = detail(b.create(ask("b.test/2")).await);
    assert_eq!(reason, Refusal::WrongPrefix);
    assert!(why.ends_with("under kv/, jobs/b.test/"), "{why}");
    assert_eq!(refused(a.create(ask("kv/2")).await), Refusal::WrongPrefix);
    // A name that it may not create any more is still its own to delete.
    b.delete("b.test/1", PATIENCE).await.unwrap();
    assert!(service.reload(own).unwrap().is_empty());
    b.create(ask("b.test/2")).await.unwrap();
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_and_memory_name_the_owner_of_a_name() {
    let peers = Peers::new();
    let driver = driver();
    let kept = "[[buffer]]\nname = \"kept\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"*.test\"]";
    let service = Service::start(peers.config(kept), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let ask = CreateOptions::new("one", MIB).share_with("b.test");
    assert_eq!(a.create(ask).await.unwrap().owner, owner("a.test"));
    let owners: Vec<_> = b.list("").await.unwrap();
    let owners: Vec<_> = owners.iter().map(|e| (&*e.name, e.owner.clone())).collect();
    assert_eq!(owners, [("kept", Owner::Server), ("one", owner("a.test"))]);

    // A client that expects its own memory gets nothing of another's.
    let own = b.peer_name().unwrap();
    for (name, found) in [("one", "a.test"), ("kept", "@server")] {
        let fetched = b.fetch(name).expect_owner(own.clone()).go().await;
        let wrong = Mismatch::Owner {
            expected: "b.test".into(),
            found: found.into(),
        };
        assert_eq!(mismatch(fetched), wrong);
    }
    assert_eq!(metric(&service, "egmem_leases"), 0);
    assert_eq!(metric(&service, "egmem_fetches_total"), 0);
    for (name, expected) in [("one", owner("a.test")), ("kept", Owner::Server)] {
        let memory = b.fetch(name).expect_owner(expected.clone()).go().await;
        let memory = memory.unwrap();
        assert_eq!(*memory.owner(), expected);
        memory.release().await.unwrap();
    }
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn existing_memory_is_taken_only_by_its_owner_with_its_size_and_node() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let ask = |name: &str, bytes| CreateOptions::new(name, bytes).node(NodeId(0));
    let first = a.create_or_get(ask("one", MIB).share_with("b.test")).await;
    let first = first.unwrap();
    assert_eq!(a.create_or_get(ask("one", MIB)).await.unwrap(), first);
    let again = a.create_or_get(CreateOptions::new("one", MIB)).await;
    assert_eq!(again.unwrap(), first);
    let wrong = Mismatch::Size {
        expected: 2 * MIB,
        found: MIB,
    };
    assert_eq!(mismatch(a.create_or_get(ask("one", 2 * MIB)).await), wrong);
    let wrong = Mismatch::Owner {
        expected: "b.test".into(),
        found: "a.test".into(),
    };
    assert_eq!(mismatch(b.create_or_get(ask("one", MIB)).await), wrong);
    // The refusal says only that a name is taken, because the peer may not see that name.
    a.create(ask("hidden", MIB)).await.unwrap();
    let hidden = b.create_or_get(ask("hidden", MIB)).await;
    assert_eq!(refused(hidden), Refusal::Exists);
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_creation_does_not_tell_which_names_exist() {
    let peers = Peers::new();
    let driver = driver();
    let kept = "[[buffer]]\nname = \"kept\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"a.test\"]";
    let service = Service::start(peers.config(kept), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let outsider = peers.client(&service, "c.other", &driver).await;
    let ask = |name: &str, bytes| CreateOptions::new(name, bytes).node(NodeId(0));
    a.create(ask("a.test/hidden", MIB)).await.unwrap();
    let probe = async |client: &Client, bytes| {
        let [hidden, kept, free] = [
            detail(client.create(ask("a.test/hidden", bytes)).await),
            detail(client.create(ask("kept", bytes)).await),
            detail(client.create(ask("free", bytes)).await),
        ];
        assert_eq!((&hidden, &kept), (&free, &free));
        free.0
    };
    // Without a right, with a request that cannot be right, and without quota: bytes, then names.
    assert_eq!(probe(&outsider, MIB).await, Refusal::Forbidden);
    assert_eq!(probe(&b, 0).await, Refusal::Invalid);
    assert_eq!(probe(&b, 64 * MIB).await, Refusal::Quota);
    for name in ["b/1", "b/2", "b/3", "b/4"] {
        b.create(ask(name, 1)).await.unwrap();
    }
    assert_eq!(probe(&b, 1).await, Refusal::Quota);
    // With a right under its own prefixes alone.
    let own = peers.config_of_names(kept, LEASES_STAY, "");
    assert!(service.reload(own).unwrap().is_empty());
    assert_eq!(probe(&b, 1).await, Refusal::WrongPrefix);

    // Nor do the other requests reveal it: for a peer, a name that it may not see does not exist.
    for name in ["a.test/hidden", "kept", "free"] {
        assert_eq!(refused(b.fetch(name).go().await), Refusal::NotFound);
        let deleted = detail(b.delete(name, PATIENCE).await);
        assert_eq!(deleted, detail(b.delete("free", PATIENCE).await));
        let waited = b.wait(name, Duration::from_millis(1)).await;
        assert!(
            matches!(
                waited,
                Err(Error::Share(egmem::share::Error::TimedOut { .. }))
            ),
            "{name}"
        );
        assert!(b.list(name).await.unwrap().is_empty());
    }
    let _ = (a.close().await, b.close().await, outsider.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}
