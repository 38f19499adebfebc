//! The names that a peer may have, and how these end.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletion_waits_for_holders_and_goes_on_by_itself() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let memory = create(&a, "one", 4 * MIB).await.unwrap();
    let error = a
        .delete("one", Duration::from_millis(150))
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Refused {
                reason: Refusal::TimedOut,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("a.test"), "{error}");
    // Closed for new fetches, still there for its holder, and still charged.
    assert!(a.fetch("one").go().await.is_err());
    memory.put(0, 7_u64).unwrap();
    assert_eq!(metric(&service, "egmem_owners"), 1);
    memory.release().await.unwrap();
    until(&service, "egmem_owners", 0).await;
    // With the memory that was added for probes.
    until(&service, "egmem_kept_bytes", 6 * MIB).await;
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_are_each_peers_own_and_invalid_requests_are_refused() {
    let peers = Peers::new();
    let driver = driver();
    let config = peers.config("[[buffer]]\nname = \"kept\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"*.test\"]\naccess = \"read\"");
    let service = Service::start(config, &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let ask = |name: &str, bytes| CreateOptions::new(name, bytes);
    a.create(ask("a/1", 28 * MIB)).await.unwrap();
    assert_eq!(refused(create(&a, "a/2", 4 * MIB).await), Refusal::Quota);
    b.create(ask("b/1", 28 * MIB)).await.unwrap();
    // A refused request is charged to no peer.
    a.create(ask("a/2", 2 * MIB)).await.unwrap();
    a.delete("a/1", PATIENCE).await.unwrap();
    for name in ["a/3", "a/4", "a/5"] {
        a.create(ask(name, 1)).await.unwrap();
    }
    assert_eq!(refused(create(&a, "a/6", 1).await), Refusal::Quota);

    assert_eq!(refused(create(&b, "", 1).await), Refusal::Invalid);
    assert_eq!(refused(create(&b, "x", 0).await), Refusal::Invalid);
    assert_eq!(refused(create(&b, "x", u64::MAX).await), Refusal::Invalid);
    assert_eq!(refused(create(&b, "kept", 1).await), Refusal::Exists);
    let nowhere = b.create(ask("x", 1).node(NodeId(99))).await.unwrap_err();
    assert!(
        matches!(
            nowhere,
            Error::Refused {
                reason: Refusal::Invalid,
                ..
            }
        ),
        "{nowhere}"
    );
    // No peer may delete the names that the configuration creates.
    assert_eq!(
        refused(b.delete("kept", PATIENCE).await),
        Refusal::Configured
    );
    let kept = b.fetch("kept").go().await.unwrap();
    assert_eq!(kept.description().access, Access::Read);
    kept.release().await.unwrap();
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_of_peers_change_while_it_runs() {
    let peers = Peers::new();
    let driver = driver();
    let buffer = |who: &str| {
        peers.config(&format!(
            "[[buffer]]\nname = \"kept\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"{who}\"]"
        ))
    };
    let service = Service::start(buffer("a.test"), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    assert_eq!(a.list("").await.unwrap().len(), 1);
    assert_eq!(b.list("").await.unwrap().len(), 0);
    let mut config = buffer("b.test");
    config.create = None;
    assert!(service.reload(config).unwrap().is_empty());
    // No list names `a.test` any more: its session ends, and another one has no rights either.
    match a.list("").await {
        Ok(entries) => assert!(entries.is_empty()),
        Err(error) => assert_eq!(refused::<()>(Err(error)), Refusal::Forbidden),
    }
    let reason = loop {
        match create(&a, "x", 1).await {
            // Its connection broke before the reason arrived.
            Err(Error::Share(egmem::share::Error::PeerLost { .. })) => {}
            result => break refused(result),
        }
    };
    assert_eq!(reason, Refusal::Forbidden);
    assert_eq!(b.list("").await.unwrap().len(), 1);
    // Certificates that cannot be read leave the old ones.
    std::fs::write(peers.folder.path().join("node.pem"), "nothing").unwrap();
    assert!(matches!(
        service.reload(buffer("a.test")),
        Err(Error::Tls { .. })
    ));
    assert_eq!(b.list("").await.unwrap().len(), 1);
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}
