//! What comes with a lease: grants, handles, and the proof of both ends.

use super::*;

#[tokio::test]
async fn memory_that_cannot_be_imported_is_released() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
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
            assert_eq!(end, crate::End::Between);
            assert!(source.driver_error().is_some());
        }
        other => panic!("{other}"),
    }
    assert!(driver.sim().unwrap().held().is_empty());
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
    with(&|granted| granted.handles = Handles::Fds(Fds { count: 1 }));
    with(&|granted| granted.handles = Handles::Ticket(Secret::new(&[0; 16]).unwrap()));
    with(&|granted| granted.probe = Some(granted.memory.padded()));
    with(&|granted| granted.probe = Some(u64::MAX));
    with(&|granted| granted.probe = Some(4));
    with(&|granted| granted.memory.offset = Some(granted.memory.padded()));
    with(&|granted| {
        // Where there is room for a probe in all of it, there is none around a window.
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
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    }
    assert!(driver.sim().unwrap().held().is_empty());
}

#[tokio::test]
async fn two_ends_prove_that_they_see_the_same_bytes() {
    let (driver, fake, mut memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let at = (2 << 20) - 64;
    memory.probe = Some(at);
    let words = async |peer: &mut Peer, right: bool| {
        let mut rounds = 0;
        loop {
            let (id, ask) = peer.request().await.unwrap();
            match ask {
                Ask::Probe(probe) => {
                    let found = memory.shared.word(at).unwrap();
                    assert_eq!(probe.wrote, Some(found));
                    rounds += 1;
                    let wrote = 0x1234_5678 + rounds;
                    if right {
                        memory.shared.put_word(at, wrote).unwrap();
                    }
                    peer.answer(id, Answer::Probed(Probed { found, wrote }))
                        .await;
                }
                Ask::Release(release) => {
                    peer.done(id).await;
                    return (rounds, release.lease);
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let serve = async {
        assert!(peer.grant(1, &memory).await.probe);
        assert_eq!(
            words(&mut peer, true).await,
            (2, 1),
            "by the CPU and by a GPU"
        );
        peer.grant(2, &memory).await;
        words(&mut peer, false).await.1
    };
    let work = async {
        let remote = client.fetch("x").go().await.unwrap();
        assert_eq!(
            *remote.proved(),
            Proof {
                cpu: true,
                gpu: Some(0),
                both_ways: true,
                why_not: None
            }
        );
        remote.release().await.unwrap();
        expect_err(client.fetch("x").go().await)
    };
    let (lease, error) = within(async { tokio::join!(serve, work) }).await;
    assert_eq!(lease, 2);
    assert!(matches!(error, Error::DataPlane { .. }), "{error}");
    nothing_held(&driver).await;
}

#[tokio::test]
async fn handle_types_that_do_not_go_are_told() {
    let (driver, mut fake) = (importer(), Fake::new().await);
    let options = fake.options().fabric(false);
    let (client, greeted) = tokio::join!(options.connect(&driver), fake.greet());
    assert!(!greeted.1.fabric);
    let error = expect_err(client.unwrap().fetch("x").go().await);
    assert!(
        matches!(&error, Error::NoCommonHandle { reasons } if reasons.len() == 2),
        "{error}"
    );
    // On the same machine, fds come first.
    fake.welcome.boot = BootId::current().unwrap();
    fake.welcome.door = Some("/nowhere/door".into());
    let (client, mut peer) = fake.client(&driver).await;
    let serve = async {
        let (id, ask) = peer.request().await.unwrap();
        let Ask::Fetch(fetch) = ask else {
            panic!("{ask:?}")
        };
        use crate::driver::HandleType::{Fabric, PosixFd};
        assert_eq!(fetch.accept, [PosixFd, Fabric]);
        peer.refuse(id, "no_common_handle").await;
        let (id, ask) = peer.request().await.unwrap();
        assert!(matches!(ask, Ask::Fetch(fetch) if fetch.accept == [Fabric]));
        peer.refuse(id, "not_found").await;
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
