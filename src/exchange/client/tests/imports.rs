//! Leases' contents: grants, handles, and the proof of both ends.

use super::*;
use crate::driver::{Call, Location, NodeId};
use crate::{Machine, Mismatch, Owner, ShareError};

/// Where only TCP leads to a server of the same machine, its handles are fabric handles too.
#[tokio::test]
async fn memory_that_cannot_be_imported_is_released() {
    let (driver, mut fake, memory) = (importer(), Fake::new().await, Memory::new());
    let elsewhere = fake.welcome.boot;
    for (boot, expected) in [
        (elsewhere, crate::End::Between),
        (BootId::current().unwrap(), crate::End::SameMachine),
    ] {
        fake.welcome.boot = boot;
        let (client, mut peer) = fake.client(&driver).await;
        let serve = async {
            let (id, _) = peer.request().await.unwrap();
            let mut granted = memory.granted(9);
            granted.handles = Handles::Fabric(vec![Secret::new(&[3; 64]).unwrap()]);
            peer.answer(id, Answer::Granted(granted)).await;
            assert_eq!(peer.released().await, 9);
        };
        let (remote, ()) = within(async { tokio::join!(client.fetch("x").go(), serve) }).await;
        match expect_err(remote) {
            Error::Import { end, source, .. } => {
                assert_eq!(end, expected);
                assert!(source.driver_error().is_some());
            }
            other => panic!("{other}"),
        }
        assert!(driver.sim().unwrap().held().is_empty());
    }
}

/// Two containers of one machine, of which one does not see the other's Unix socket.
#[tokio::test]
async fn a_unix_socket_that_is_not_in_the_container_is_named_with_what_to_mount() {
    for (local, hint) in [
        ("/nowhere/socket", "mount the socket's folder"),
        ("@egmem-nowhere", "network namespace"),
    ] {
        let (driver, mut fake) = (importer(), Fake::new().await);
        fake.welcome.boot = BootId::current().unwrap();
        fake.welcome.local = Some(local.into());
        let (client, _peer) = fake.client(&driver).await;
        let fetch = client.fetch("x").via(crate::driver::HandleType::PosixFd);
        let error = expect_err(fetch.go().await).to_string();
        let names = [local, "this machine", hint];
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
    }
}

/// A server that names another's socket learns nothing there, and gets no other session.
#[tokio::test]
async fn a_session_does_not_move_to_another_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let other = crate::Server::options().listen(crate::Address::Unix(path.clone()));
    let other = other.start().await.unwrap();
    let (driver, mut fake) = (importer(), Fake::new().await);
    fake.welcome.boot = BootId::current().unwrap();
    fake.welcome.local = path.to_str().map(str::to_owned);
    let (client, mut peer) = fake.client(&driver).await;
    assert!(!client.session().terms().unix);
    assert_eq!(other.stats().sessions, 0);
    let serve = async {
        let (id, _) = peer.request().await.unwrap();
        peer.refuse(id, "not_found").await;
    };
    let (refused, ()) = within(async { tokio::join!(client.fetch("x").go(), serve) }).await;
    assert_eq!(expect_err(refused).refusal(), Some(&Refusal::NotFound));
}

#[tokio::test]
async fn grants_that_cannot_be_are_refused_and_released() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let good = memory.granted(0);
    let mut wrong = Vec::new();
    let mut with = |change: &dyn Fn(&mut Granted)| {
        let mut granted = good.clone();
        granted.lease = wrong.len() as u64;
        change(&mut granted);
        wrong.push(granted);
    };
    with(&|granted| granted.memory.len = 0);
    with(&|granted| granted.memory.parts.clear());
    with(&|granted| granted.handles = Handles::Fabric(vec![]));
    with(&|granted| granted.handles = Handles::Fabric(vec![Secret::new(&[0; 63]).unwrap()]));
    with(&|granted| granted.handles = Handles::Fds(1));
    with(&|granted| granted.probe = Some(granted.memory.padded()));
    with(&|granted| granted.probe = Some(u64::MAX));
    with(&|granted| granted.probe = Some(4));
    // Within the memory, whose bytes belong to the user.
    with(&|granted| granted.probe = Some(0));
    with(&|granted| granted.probe = Some(granted.memory.len - 8));
    with(&|granted| granted.memory.offset = Some(granted.memory.padded()));
    with(&|granted| {
        // Padding of the whole memory has room for a probe; the bytes around a window do not.
        granted.probe = Some((2 << 20) - 64);
        granted.memory.offset = Some(0);
    });
    for granted in wrong {
        let lease = granted.lease;
        let serve = async {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, Answer::Granted(granted)).await;
            assert_eq!(peer.released().await, lease);
        };
        let (remote, ()) = within(async { tokio::join!(client.fetch("x").go(), serve) }).await;
        let error = expect_err(remote);
        assert!(
            matches!(error, Error::Share(ShareError::Protocol { .. })),
            "{error}"
        );
    }
    assert!(driver.sim().unwrap().held().is_empty());
}

/// Answers the next request, which must be a probe at `at`, and writes a word there if it `writes`.
async fn probed(peer: &mut Peer, memory: &Memory, at: u64, writes: bool) {
    let (id, ask) = peer.request().await.unwrap();
    assert!(matches!(ask, Ask::Probe { .. }), "{ask:?}");
    let found = memory.shared.word(at).unwrap();
    let wrote = 0x1234_5678;
    if writes {
        memory.shared.put_word(at, wrote).unwrap();
    }
    peer.answer(id, Answer::Probed(Probed { found, wrote }))
        .await;
}

#[tokio::test]
async fn two_ends_prove_that_they_see_the_same_bytes() {
    let (driver, fake, mut memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let at = (2 << 20) - 64;
    memory.probe = Some(at);
    // By a GPU, or by the CPU of a process that grants no GPU access.
    for (gpus, by) in [(vec![0], Location::Device(0)), (vec![], Location::Host)] {
        let fetch = client
            .fetch("x")
            .access_by(gpus.into_iter().map(Location::Device));
        let serve = async {
            assert!(peer.grant(1, &memory).await.probe);
            probed(&mut peer, &memory, at, true).await;
            assert_eq!(peer.released().await, 1);
        };
        let work = async {
            let remote = fetch.go().await.unwrap();
            let proof = Proof {
                by: Some(by),
                both_ways: true,
                why_not: None,
            };
            assert_eq!(*remote.proved(), proof);
            remote.release().await.unwrap();
        };
        within(async { tokio::join!(serve, work) }).await;
    }
    let serve = async {
        peer.grant(2, &memory).await;
        probed(&mut peer, &memory, at, false).await;
        assert_eq!(peer.released().await, 2);
    };
    let (fetched, ()) = within(async { tokio::join!(client.fetch("x").go(), serve) }).await;
    let error = expect_err(fetched);
    assert!(matches!(error, Error::DataPlane { .. }), "{error}");
    nothing_held(&driver).await;
}

/// Runs a test with one thread for blocking work.
fn with_one_thread(test: impl Future<Output = ()>) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build();
    runtime.unwrap().block_on(test);
}

/// Takes a thread for blocking work until the sender is dropped.
fn take_thread() -> (std::sync::mpsc::Sender<()>, tokio::task::JoinHandle<()>) {
    let (free, taken) = std::sync::mpsc::channel();
    let wait = move || assert!(taken.recv().is_err());
    (free, tokio::task::spawn_blocking(wait))
}

/// The connection's task must go on meanwhile: unmapping takes the driver's time.
#[test]
fn memory_that_is_not_proved_is_unmapped_on_another_thread() {
    for refused in [true, false] {
        with_one_thread(async {
            let (driver, fake, mut memory) = (importer(), Fake::new().await, Memory::new());
            let (client, mut peer) = fake.client(&driver).await;
            memory.probe = Some((2 << 20) - 64);
            let mut fetch = Box::pin(client.fetch("x").go());
            let asked = async {
                peer.grant(1, &memory).await;
                peer.request().await.unwrap()
            };
            let (id, _) = tokio::select! {
                fetched = &mut fetch => panic!("{fetched:?}"),
                asked = asked => asked,
            };
            let (free, taken) = take_thread();
            if refused {
                peer.refuse(id, "internal").await;
                assert!(timeout(soon(50), &mut fetch).await.is_err());
                assert!(!driver.sim().unwrap().held().is_empty());
                drop(free);
                expect_err(within(fetch).await);
                assert!(driver.sim().unwrap().held().is_empty());
            } else {
                drop(fetch);
                assert!(!driver.sim().unwrap().held().is_empty());
                drop(free);
            }
            taken.await.unwrap();
            assert_eq!(peer.released().await, 1);
            nothing_held(&driver).await;
        });
    }
}

#[test]
fn memory_that_nobody_waits_for_any_more_is_unmapped_on_another_thread() {
    with_one_thread(async {
        let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer) = fake.client(&driver).await;
        let (free, taken) = take_thread();
        let mut fetch = Box::pin(client.fetch("x").probe(false).go());
        assert!(timeout(Duration::ZERO, &mut fetch).await.is_err());
        peer.grant(1, &memory).await;
        while client.session().lock().leases.is_empty() {
            tokio::task::yield_now().await;
        }
        // It hands the import to the thread, which ends it.
        assert!(timeout(Duration::ZERO, &mut fetch).await.is_err());
        drop(free);
        taken.await.unwrap();
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        let (free, taken) = take_thread();
        drop(fetch);
        assert!(!driver.sim().unwrap().held().is_empty());
        drop(free);
        taken.await.unwrap();
        assert_eq!(peer.released().await, 1);
        nothing_held(&driver).await;
    });
}

#[tokio::test]
async fn a_client_without_a_driver_sees_names_and_takes_no_lease() {
    let (fake, memory) = (Fake::new().await, Memory::new());
    let connect = fake.options().connect_without_driver();
    let (client, (mut peer, _)) = within(async { tokio::join!(connect, fake.greet()) }).await;
    let client = client.unwrap();
    let error = expect_err(client.fetch("x").go().await);
    assert!(error.to_string().contains("without a driver"), "{error}");
    let (list, ()) = within(async {
        tokio::join!(client.list(""), async {
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::List(_)), "{ask:?}");
            peer.answer(id, names(vec![memory.entry("x")], false)).await;
        })
    })
    .await;
    assert_eq!(list.unwrap().len(), 1);
}

#[tokio::test]
async fn handle_types_that_do_not_go_are_told() {
    let (driver, mut fake) = (importer(), Fake::new().await);
    let no_fabric = Driver::simulated(Machine::gh200x4()).unwrap();
    let (client, _peer) = tokio::join!(fake.options().connect(&no_fabric), fake.greet());
    let error = expect_err(client.unwrap().fetch("x").go().await);
    assert!(
        matches!(&error, Error::NoCommonHandle { reasons } if reasons.len() == 2),
        "{error}"
    );
    // On the same machine, fds come first, and without a Unix socket the error says what is missing.
    fake.welcome.boot = BootId::current().unwrap();
    let (client, _greeted) = tokio::join!(fake.options().connect(&no_fabric), fake.greet());
    let error = expect_err(client.unwrap().fetch("x").go().await).to_string();
    assert!(error.contains("only TCP leads to it"), "{error}");
    let (client, mut peer) = fake.client(&driver).await;
    let serve = async {
        for reason in ["no_common_handle", "not_found"] {
            let (id, ask) = peer.request().await.unwrap();
            use crate::driver::HandleType::Fabric;
            assert!(matches!(ask, Ask::Fetch(fetch) if fetch.accept == [Fabric]));
            peer.refuse(id, reason).await;
        }
    };
    let work = async {
        for (fetch, reason) in [
            (client.fetch("x"), Refusal::NoCommonHandle),
            (
                client.fetch("x").via(crate::driver::HandleType::Fabric),
                Refusal::NotFound,
            ),
        ] {
            let error = expect_err(fetch.go().await);
            assert!(
                matches!(&error, Error::Refused { reason: r, .. } if *r == reason),
                "{error}"
            );
        }
    };
    within(async { tokio::join!(serve, work) }).await;
}

/// A peer that created the name first must not get to share its memory with this client.
#[tokio::test]
async fn memory_of_an_unexpected_owner_is_released_and_never_imported() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let expected = Owner::Peer(PeerName::User(1000));
    // The fake server does not check: it grants memory of its own.
    let fetch = client.fetch("x").expect_owner(expected.clone()).go();
    let serve = async {
        let asked = peer.grant(5, &memory).await;
        assert_eq!(asked.owner, Some(expected.clone()));
        assert_eq!(peer.released().await, 5);
    };
    let (fetched, ()) = within(async { tokio::join!(fetch, serve) }).await;
    let error = fetched.map(drop).unwrap_err();
    let what = Mismatch::Owner {
        expected: "uid:1000".into(),
        found: "@server".into(),
    };
    let mismatched = matches!(&error, Error::Mismatched { name, what: found, .. } if name == "x" && **found == what);
    assert!(mismatched, "{error}");
    assert!(
        error
            .to_string()
            .contains("its owner is @server, expected uid:1000"),
        "{error}"
    );
    assert_eq!(
        driver
            .sim()
            .unwrap()
            .count(Call::MemImportFromShareableHandle),
        0
    );

    // A server that checks refuses with the owner as detail: the error is the same.
    let fetch = client.fetch("x").expect_owner(PeerName::User(1000)).go();
    let serve = async {
        let (id, _) = peer.request().await.unwrap();
        let refused = Refused {
            reason: "wrong_owner".into(),
            detail: "@server".into(),
        };
        peer.answer(id, Answer::Refused(refused)).await;
    };
    let (fetched, ()) = within(async { tokio::join!(fetch, serve) }).await;
    assert_eq!(fetched.map(drop).unwrap_err(), error);
}

#[tokio::test]
async fn every_fetch_of_a_client_expects_the_client_s_owner_unless_it_names_another() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let options = fake.options().expect_owner(PeerName::User(1000));
    let (client, mut peer) = fake.client_of(options, &driver).await;
    for (fetch, expected) in [
        (client.fetch("x"), Owner::Peer(PeerName::User(1000))),
        (
            client.fetch("x").expect_owner(PeerName::User(7)),
            Owner::Peer(PeerName::User(7)),
        ),
    ] {
        let serve = async {
            let asked = peer.grant(5, &memory).await;
            assert_eq!(asked.owner, Some(expected.clone()));
            assert_eq!(peer.released().await, 5);
        };
        let (fetched, ()) = within(async { tokio::join!(fetch.go(), serve) }).await;
        let error = expect_err(fetched);
        let what = Mismatch::Owner {
            expected: expected.to_string(),
            found: "@server".into(),
        };
        let wrong = matches!(&error, Error::Mismatched { what: found, .. } if **found == what);
        assert!(wrong, "{error}");
    }
}

#[tokio::test]
async fn existing_memory_is_taken_only_if_owner_size_and_node_match() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let own = client.peer_name().unwrap();
    let entry = |owner: Owner| Entry {
        owner,
        ..memory.entry("x")
    };
    let wrong_owner = Mismatch::Owner {
        expected: own.to_string(),
        found: "uid:7".into(),
    };
    let wrong_size = Mismatch::Size {
        expected: 5,
        found: 1 << 20,
    };
    let wrong_node = Mismatch::Node {
        expected: NodeId(3),
        found: vec![Location::HostNuma(0)],
    };
    for (owner, bytes, node, wrong) in [
        (own.clone(), 1 << 20, Some(0), None),
        (own.clone(), 1 << 20, None, None),
        (PeerName::User(7), 1 << 20, None, Some(wrong_owner)),
        (own.clone(), 5, None, Some(wrong_size)),
        (own.clone(), 1 << 20, Some(3), Some(wrong_node)),
    ] {
        let mut options = CreateOptions::new("x", bytes);
        if let Some(node) = node {
            options = options.node(NodeId(node));
        }
        let serve = async {
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::List(list) if list.prefix == "x"));
            let there = vec![entry(owner.clone().into()), memory.entry("x/1")];
            peer.answer(id, names(there, false)).await;
        };
        let (got, ()) = within(async { tokio::join!(client.create_or_get(options), serve) }).await;
        match (got, wrong) {
            (Ok(got), None) => assert_eq!(got, entry(owner.into())),
            (Err(Error::Mismatched { what, .. }), Some(wrong)) => assert_eq!(*what, wrong),
            other => panic!("{other:?}"),
        }
    }
    // A name that comes to be between the list and the request, and one that this peer may not see.
    for seen in [true, false] {
        let serve = async {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, names(vec![memory.entry("x/1")], false))
                .await;
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::Create(create) if create.name == "x"));
            peer.refuse(id, "exists").await;
            let (id, _) = peer.request().await.unwrap();
            let there = seen.then(|| entry(own.clone().into()));
            let there = there.into_iter().chain([memory.entry("x/1")]).collect();
            peer.answer(id, names(there, false)).await;
        };
        let ask = client.create_or_get(CreateOptions::new("x", 1 << 20));
        let (got, ()) = within(async { tokio::join!(ask, serve) }).await;
        match (got, seen) {
            (Ok(got), true) => assert_eq!(got, entry(own.clone().into())),
            (Err(Error::Refused { reason, .. }), false) => assert_eq!(reason, Refusal::Exists),
            other => panic!("{other:?}"),
        }
    }
}
