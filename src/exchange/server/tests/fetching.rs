use super::*;
use crate::driver::{FabricHandle, ShareableHandle};
use crate::server::HolderState;
use crate::share::ImportOptions;

#[tokio::test]
async fn fabric_handles_are_imported_and_proved() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    assert_eq!(raw.welcome().instance, server.instance());
    let (granted, fds) = raw.fetch(fetch("a")).await.unwrap();
    assert!(fds.is_empty());
    let Handles::Fabric(secrets) = &granted.handles else {
        panic!("{:?}", granted.handles);
    };
    let handle = |secret: &Secret| {
        let bytes = secret.expose().try_into().unwrap();
        ShareableHandle::Fabric(FabricHandle::from_bytes(bytes))
    };
    let handles = secrets.iter().map(handle).collect();
    // Stands for another process: the same memory is imported once.
    let imported = ImportOptions::new()
        .import(&driver, &granted.memory, handles)
        .unwrap();
    let place = granted.probe.unwrap();
    assert!(place >= MIB && place % 8 == 0);
    imported.put_word(place, 42).unwrap();
    let lease = granted.lease;
    let Answer::Probed(probed) = raw.ask(Ask::Probe { lease }).await.0 else {
        panic!()
    };
    assert_eq!(probed.found, 42);
    assert_eq!(imported.word(place).unwrap(), probed.wrote);
    drop(imported);

    let holders = published.importers();
    assert_eq!(holders.len(), 1);
    assert_eq!(
        (holders[0].lease, holders[0].state),
        (granted.lease, HolderState::Held)
    );
    raw.release(granted.lease).await;
    assert!(published.importers().is_empty());
    let release = Ask::Release { lease };
    assert_eq!(raw.refusal(release).await, Refusal::NotFound);
    let stats = server.stats();
    assert_eq!((stats.fetches, stats.released), (1, 1));
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn over_a_unix_socket_fds_come_with_the_answer() {
    let driver = driver();
    let (_directory, address, server) = start_at_unix(options()).await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let (granted, fds) = raw.fetch(fetch_fds("a")).await.unwrap();
    assert_eq!(granted.handles, Handles::Fds(1));
    assert_eq!(granted.no_fabric, None, "none was wanted");
    let handles = fds.into_iter().map(ShareableHandle::PosixFd).collect();
    let imported = ImportOptions::new()
        .import(&driver, &granted.memory, handles)
        .unwrap();
    imported.put_word(0, 7).unwrap();
    assert_eq!(published.shared().unwrap().word(0).unwrap(), 7);
    drop(imported);
    raw.release(granted.lease).await;
    drop(published);
    close(server, &driver).await;
    assert!(!PathBuf::from(address.to_string().trim_start_matches("unix:")).exists());
}

/// Memory with so many parts.
fn in_parts(driver: &Driver, parts: u64) -> Buffer {
    let options = Buffer::on(NodeId(0)).bytes(parts * 2 * MIB).shareable();
    let options = options.growth(egmem_core::Growth::steady().chunk(2 * MIB));
    options.allocate(driver).unwrap()
}

#[tokio::test]
async fn fds_of_many_parts_alone_come_through_a_queue() {
    let driver = driver();
    let (_directory, address, server) = start_at_unix(options()).await;
    let few = server.publish("few", in_parts(&driver, 32)).now().unwrap();
    let many = server.publish("many", in_parts(&driver, 33)).now().unwrap();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    for (name, handles, count) in [("few", Handles::Fds(32), 32), ("many", Handles::Queue, 1)] {
        let (granted, fds) = raw.fetch(fetch_fds(name)).await.unwrap();
        assert_eq!(granted.handles, handles);
        assert_eq!(fds.len(), count);
        raw.release(granted.lease).await;
    }
    drop(raw);
    drop((few, many));
    close(server, &driver).await;
}

/// A client that closes its queue, or does not read from it, keeps no fds of the server.
#[tokio::test]
async fn a_queue_ends_with_its_client_or_with_its_time() {
    let driver = driver();
    let limits = Limits {
        write: short(),
        fds_per_peer: 18,
        ..Limits::default()
    };
    let options = options().limits(limits);
    let (_directory, address, server) = start_at_unix(options).await;
    let published = server.publish("a", in_parts(&driver, 200)).now().unwrap();
    let hello = hello();
    for dies in [true, false] {
        let mut raw = Raw::open_at(&address, &Security::Plain, &hello).await;
        let (granted, queue) = raw.fetch(fetch_fds("a")).await.unwrap();
        assert_eq!(granted.handles, Handles::Queue);
        // The server waits with the next of them: there is no room for a second queue.
        let refused = raw.fetch(fetch_fds("a")).await.unwrap_err();
        assert_eq!(refused, Refusal::Limit);
        assert_eq!(published.importers().len(), 1, "no lease without a queue");
        let kept = (!dies).then_some(queue);
        until("the fds are closed", || server.stats().fds == 0).await;
        raw.release(granted.lease).await;
        drop(kept);
    }
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn an_importer_whose_server_ends_gets_an_error_and_no_part() {
    let driver = driver();
    let (_directory, address, server) = start_at_unix(options()).await;
    let published = server.publish("a", in_parts(&driver, 200)).now().unwrap();
    let hello = hello();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello).await;
    let (granted, mut fds) = raw.fetch(fetch_fds("a")).await.unwrap();
    // It does not wait for the lease.
    let _ = server.close(Duration::ZERO).await;
    drop((published, server));
    let handles = crate::share::PartHandles::from_queue(fds.pop().unwrap());
    let importing = move || ImportOptions::new().import_from(&driver, &granted.memory, handles);
    let imported = tokio::task::spawn_blocking(importing).await.unwrap();
    let error = imported.unwrap_err().to_string();
    assert!(error.contains("the exporter has ended"), "{error}");
}

#[tokio::test]
async fn impossible_requests_are_refused_with_the_reason() {
    let driver = driver();
    let server = loopback().local_socket(false).start().await.unwrap();
    let published = server.publish("a", memory(&driver));
    let published = published.access(Access::Read).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let read = Fetch {
        access: Some(Access::Read),
        ..fetch("a")
    };
    for (ask, refusal) in [
        (fetch("b"), Refusal::NotFound),
        (fetch("a"), Refusal::ReadOnly),
        (fetch("a b"), Refusal::Invalid),
        (
            Fetch {
                access: Some(Access::None),
                ..read.clone()
            },
            Refusal::Invalid,
        ),
        (
            Fetch {
                instance: Some(crate::share::InstanceId::random().unwrap()),
                ..read.clone()
            },
            Refusal::Stale,
        ),
        (
            Fetch {
                owner: Some(PeerName::User(7).into()),
                ..read.clone()
            },
            Refusal::WrongOwner,
        ),
        // There is no Unix socket.
        (
            Fetch {
                accept: vec![HandleType::PosixFd],
                ..read.clone()
            },
            Refusal::NoCommonHandle,
        ),
        (
            Fetch {
                accept: vec![],
                ..read.clone()
            },
            Refusal::NoCommonHandle,
        ),
    ] {
        assert_eq!(
            raw.fetch(ask.clone()).await.unwrap_err(),
            refusal,
            "{ask:?}"
        );
    }
    let (granted, _) = raw.fetch(read).await.unwrap();
    assert_eq!(granted.memory.access, Access::Read);
    raw.release(granted.lease).await;
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn without_fabric_the_reason_goes_with_the_fds() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await.moved().await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    assert!(matches!(granted.handles, Handles::Fds(_)));
    let why = granted.no_fabric.unwrap();
    assert!(why.contains("IMEX"), "{why}");
    // From another machine it gets neither.
    let elsewhere = Hello {
        boot: BootId::from_bytes([7; 16]),
        ..hello()
    };
    let mut far = Raw::open_at(&server.addresses()[0], &Security::Plain, &elsewhere).await;
    let refused = far.fetch(fetch("a")).await.unwrap_err();
    assert_eq!(refused, Refusal::NoCommonHandle);
    raw.release(granted.lease).await;
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn an_export_that_fails_leads_to_the_next_type() {
    use crate::driver::{Call, Code};
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await.moved().await;
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemExportToShareableHandle, 1, Code::NOT_PERMITTED);
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    assert!(matches!(granted.handles, Handles::Fds(_)));
    assert!(granted.no_fabric.is_some());
    raw.release(granted.lease).await;
    // Only that once.
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    assert!(matches!(granted.handles, Handles::Fabric(_)));
    raw.release(granted.lease).await;
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn entries_and_grants_name_the_owner() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let shared = memory(&driver);
    let mut raw = Raw::open(&server).await;
    let (owner, other) = (PeerName::User(7), PeerName::User(8));
    let owned = server.publish("owned", shared.clone()).owner(owner.clone());
    let owned = owned.now().unwrap();
    let own = server.publish("own", shared).now().unwrap();
    let Answer::Names(names) = raw.ask(Ask::List(List::default())).await.0 else {
        panic!()
    };
    let owners: Vec<_> = names.entries.iter().map(|entry| &entry.owner).collect();
    assert_eq!(owners, [&Owner::Server, &Owner::Peer(owner.clone())]);
    let expect = |name, owner: Owner| Fetch {
        owner: Some(owner),
        ..fetch(name)
    };
    let granted = raw
        .fetch(expect("owned", owner.clone().into()))
        .await
        .unwrap();
    assert_eq!(granted.0.owner, Owner::Peer(owner.clone()));
    for (name, wrong) in [
        ("owned", other.into()),
        ("owned", Owner::Server),
        ("own", owner.into()),
    ] {
        let refused = raw.fetch(expect(name, wrong)).await.unwrap_err();
        assert_eq!(refused, Refusal::WrongOwner, "{name}");
    }
    assert!(raw.fetch(expect("own", Owner::Server)).await.is_ok());
    drop((owned, own, raw));
    close(server, &driver).await;
}
