//! The fate of memory that was in use.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_peer_sees_anothers_bytes_and_each_gets_its_own_memory_back_zeroed() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;

    let memory = create(&a, "one", 8 * MIB).await.unwrap();
    memory.fill(0xaa).unwrap();
    let first = allocations(&memory);
    memory.release().await.unwrap();
    a.delete("one", PATIENCE).await.unwrap();
    // With the memory that was added for probes.
    until(&service, "egmem_kept_bytes", 10 * MIB).await;
    assert_eq!(metric(&service, "egmem_scrubbed_bytes_total"), 10 * MIB);

    // Another peer gets other memory.
    let memory = create(&b, "two", 8 * MIB).await.unwrap();
    assert_eq!(only_byte(&memory), 0);
    let others = allocations(&memory);
    assert!(
        first
            .iter()
            .all(|(id, _)| others.iter().all(|(other, _)| other != id))
    );
    memory.fill(0xbb).unwrap();
    memory.release().await.unwrap();

    // The first gets its own again: zeroed, and under another identity.
    let memory = create(&a, "three", 8 * MIB).await.unwrap();
    assert_eq!(only_byte(&memory), 0);
    let again = allocations(&memory);
    let renewed = first.iter().map(|(id, generation)| (*id, generation + 1));
    assert_eq!(again, renewed.collect::<Vec<_>>());
    memory.release().await.unwrap();

    // Names are their owners' alone.
    assert_eq!(refused(b.fetch("three").go().await), Refusal::NotFound);
    assert_eq!(
        refused(b.delete("three", PATIENCE).await),
        Refusal::NotFound
    );
    assert_eq!(refused(create(&b, "three", MIB).await), Refusal::Exists);

    a.close().await;
    b.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_others_could_fetch_is_not_kept() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let ask = CreateOptions::new("shared", 4 * MIB).share_with("b.test");
    a.create(ask).await.unwrap();
    let memory = b.fetch("shared").go().await.unwrap();
    memory.fill(0xbb).unwrap();
    memory.release().await.unwrap();
    a.delete("shared", PATIENCE).await.unwrap();
    // With the memory that was added for probes.
    until(&service, "egmem_discarded_policy_bytes_total", 6 * MIB).await;
    until(&service, "egmem_pinned_bytes", 0).await;
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_a_holder_that_fell_silent_is_never_given_out_again() {
    let peers = Peers::new();
    let driver = driver();
    let config = peers.config_with("", &leases_end());
    let service = Service::start(config, &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    // A second process of the same peer, which stops saying anything while it has memory mapped.
    let silent = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let options = Client::options(service.addresses()[0].clone())
        .security(peers.tls("a.test"))
        .timeout(PATIENCE);
    let held = {
        let driver = driver.clone();
        let work = silent.spawn(async move {
            let client = options.connect(&driver).await?;
            create(&client, "one", 8 * MIB).await
        });
        work.await.unwrap().unwrap()
    };
    held.fill(0xaa).unwrap();
    let first = allocations(&held);
    silent.shutdown_background();
    until(&service, "egmem_expired_total", 1).await;

    // The bytes are there for the peer's next process.
    let memory = a.fetch("one").go().await.unwrap();
    assert_eq!(only_byte(&memory), 0xaa);
    memory.release().await.unwrap();
    a.delete("one", PATIENCE).await.unwrap();
    until(&service, "egmem_discarded_tainted_bytes_total", 10 * MIB).await;
    assert_eq!(metric(&service, "egmem_unconfirmed_bytes"), 10 * MIB);
    assert_eq!(metric(&service, "egmem_kept_bytes"), 0);
    let memory = create(&a, "two", 8 * MIB).await.unwrap();
    assert_eq!(only_byte(&memory), 0);
    let second = allocations(&memory);
    assert!(
        first
            .iter()
            .all(|(id, _)| second.iter().all(|(other, _)| other != id))
    );
    // A peer that still has the old memory mapped sees nothing of the new.
    memory.fill(0xcc).unwrap();
    assert_eq!(only_byte(&held), 0xaa);
    memory.release().await.unwrap();
    drop(held);
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_without_padding_has_room_for_probes_that_the_quota_counts() {
    let peers = Peers::new();
    let driver = driver();
    let buffer = |name, more| {
        format!(
            "[[buffer]]\nname = \"{name}\"\nbytes = \"4MiB\"\nnode = 0\nwho = [\"*.test\"]\n{more}\n"
        )
    };
    let reserve = "[[reserve]]\nnode = 0\nbytes = \"60MiB\"\nchunk = \"30MiB\"";
    let config = buffer("probed", "") + &buffer("plain", "probe = false") + reserve;
    let service = Service::start(peers.config(&config), &driver)
        .await
        .unwrap();
    service.ready().await;
    let a = peers.client(&service, "a.test", &driver).await;
    // All of the quota, and from the reserve.
    a.create(CreateOptions::new("asked", 30 * MIB).node(NodeId(0)))
        .await
        .unwrap();
    let error = a.create(CreateOptions::new("more", 1)).await.unwrap_err();
    let quota = Refusal::Quota;
    assert!(
        matches!(&error, Error::Refused { reason, .. } if *reason == quota),
        "{error}"
    );
    for (name, len, parts) in [
        ("probed", 4 * MIB, &[4 * MIB, 2 * MIB][..]),
        ("asked", 30 * MIB, &[30 * MIB, 2 * MIB]),
        ("plain", 4 * MIB, &[4 * MIB]),
    ] {
        let memory = a.fetch(name).go().await.unwrap();
        let description = memory.description();
        let sizes: Vec<_> = description.parts.iter().map(|part| part.bytes).collect();
        assert_eq!(
            (memory.len(), description.len, &sizes[..]),
            (len, len, parts)
        );
        assert_eq!(only_byte(&memory), 0);
        memory.release().await.unwrap();
    }
    a.delete("asked", PATIENCE).await.unwrap();
    until(&service, "egmem_kept_bytes", 32 * MIB).await;
    // Where the quota has no room for it there is none.
    a.create(CreateOptions::new("more", 32 * MIB))
        .await
        .unwrap();
    let memory = a.fetch("more").go().await.unwrap();
    assert_eq!(memory.description().padded(), 32 * MIB);
    memory.release().await.unwrap();
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}
