//! Requests and fetches that fail, and the states that the caller gets meanwhile.

use super::*;
use crate::driver::Access;
use crate::{Owner, Refusal};

/// Lets the follow look the name up again, as after a new connection.
fn look_again(client: &Client) {
    client.session().tell(Notified::Fresh);
}

async fn look_refused(peer: &mut Peer, reason: &str) {
    let (id, ask) = peer.request().await.unwrap();
    assert!(matches!(ask, Ask::Watch(_)), "{ask:?}");
    peer.refuse(id, reason).await;
}

/// Waits until the follow has taken in all notices: the requests that come meanwhile are no fetches.
async fn nothing_is_fetched(client: &Client, peer: &mut Peer) {
    for _ in 0..2 {
        let (list, ()) = within(async {
            tokio::join!(client.list(""), async {
                let (id, ask) = peer.request().await.unwrap();
                assert!(matches!(ask, Ask::List(_)), "{ask:?}");
                peer.answer(id, names(vec![], false)).await;
            })
        })
        .await;
        list.unwrap();
        tokio::time::sleep(soon(20)).await;
    }
}

async fn until_offered(follow: &Follow) {
    within(async {
        while !matches!(follow.slot.view().offered, slot::Offered::Memory(_)) {
            tokio::time::sleep(soon(2)).await;
        }
    })
    .await;
}

/// A follow whose memory, under lease 1, waits to be returned.
async fn offering(fake: &Fake, driver: &Driver, first: &Memory) -> (Client, Peer, Follow) {
    let (client, mut peer) = fake.client(driver).await;
    let mut follow = unproved(&client);
    let waits = tokio::time::timeout(soon(5), follow.next()).await;
    assert!(waits.is_err(), "nobody has answered");
    watched(&mut peer, vec![first.entry("x")]).await;
    peer.grant(1, first).await;
    until_offered(&follow).await;
    (client, peer, follow)
}

#[tokio::test]
async fn a_failed_look_up_says_nothing_of_memory_that_is_held() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    let (next, ()) = while_serving(&mut follow, async {
        // In a row they would end it.
        for _ in 0..5 {
            look_again(&client);
            look_refused(&mut peer, "closing").await;
            look_refused(&mut peer, "internal").await;
            watched(&mut peer, vec![first.entry("x")]).await;
        }
        look_again(&client);
        watched(&mut peer, vec![second.entry("x")]).await;
        peer.grant(2, &second).await;
    })
    .await;
    assert!(matches!(next.unwrap(), Followed::Memory(_)));
    assert_eq!(got.state(), LeaseState::Held);
}

#[tokio::test]
async fn a_failed_look_up_is_told_to_a_caller_without_memory_and_three_in_a_row_end_it() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, look_refused(&mut peer, "closing")).await;
    assert!(matches!(
        next.unwrap(),
        Followed::Gone(Absence::Unavailable(_))
    ));
    let (next, ()) = while_serving(&mut follow, async {
        for _ in 0..3 {
            look_refused(&mut peer, "internal").await;
        }
    })
    .await;
    let error = expect_err(next);
    assert!(matches!(error, Error::Refused { .. }), "{error}");
}

#[tokio::test]
async fn memory_that_this_client_cannot_have_is_fetched_again_once_its_entry_changes() {
    for reason in ["read_only", "wrong_owner", "no_common_handle"] {
        let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer) = fake.client(&driver).await;
        let mut follow = client.fetch("x").probe(false).read_write().follow();
        let mut entry = first.entry("x");
        entry.memory.access = Access::Read;
        let (next, ()) = while_serving(&mut follow, async {
            watched(&mut peer, vec![entry.clone()]).await;
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::Fetch(_)), "{ask:?}");
            peer.refuse(id, reason).await;
        })
        .await;
        let next = next.unwrap();
        let why = Refusal::from_word(reason);
        assert!(
            matches!(
                &next,
                Followed::Gone(Absence::Unavailable(Error::Refused { reason, .. })) if *reason == why
            ),
            "{next:?}"
        );
        let waits = tokio::time::timeout(soon(5), follow.next()).await;
        assert!(waits.is_err(), "{waits:?}");
        // How many hold it makes no difference.
        entry.leases = 3;
        peer.notice(Event::Published(entry.clone())).await;
        nothing_is_fetched(&client, &mut peer).await;
        // Another right, or another owner.
        match reason {
            "wrong_owner" => entry.owner = Owner::Peer("node-b".parse().unwrap()),
            _ => entry.memory.access = Access::ReadWrite,
        }
        let (next, _) = while_serving(&mut follow, async {
            peer.notice(Event::Published(entry)).await;
            peer.grant(1, &first).await
        })
        .await;
        assert!(matches!(next.unwrap(), Followed::Memory(_)), "{reason}");
    }
}

#[tokio::test]
async fn grants_of_other_memory_than_is_listed_are_told() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, other) = (Memory::new(), Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, async {
        for lease in 1..4 {
            watched(&mut peer, vec![first.entry("x")]).await;
            peer.grant(lease, &other).await;
            assert_eq!(peer.released().await, lease);
        }
    })
    .await;
    let next = next.unwrap();
    assert!(
        matches!(
            &next,
            Followed::Gone(Absence::Unavailable(Error::Stale { .. }))
        ),
        "{next:?}"
    );
    let (next, ()) = while_serving(&mut follow, async {
        watched(&mut peer, vec![other.entry("x")]).await;
        peer.grant(4, &other).await;
    })
    .await;
    assert!(matches!(next.unwrap(), Followed::Memory(_)));
}

#[tokio::test]
async fn memory_that_waits_is_let_go_while_a_look_up_is_not_answered() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer, follow) = offering(&fake, &driver, &first).await;
    look_again(&client);
    let (_unanswered, ask) = peer.request().await.unwrap();
    assert!(matches!(ask, Ask::Watch(_)), "{ask:?}");
    let withdrawing = Withdrawing { lease: 1, ms: 9000 };
    peer.notice(Event::Withdrawing(withdrawing)).await;
    assert_eq!(within(peer.released()).await, 1);
    nothing_held(&driver).await;
    drop(follow);
}

/// Runs a test on one async thread and one blocking thread.
fn on_two_threads(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(1)
        .enable_all()
        .build()
        .unwrap()
        .block_on(test);
}

/// Occupies the blocking thread until the sender is dropped.
fn occupied() -> std::sync::mpsc::Sender<()> {
    let (free, wait) = std::sync::mpsc::channel();
    drop(tokio::task::spawn_blocking(move || wait.recv()));
    free
}

fn holds(driver: &Driver) -> bool {
    !driver.sim().unwrap().held().is_empty()
}

#[test]
fn dropped_it_unmaps_memory_on_a_blocking_thread() {
    on_two_threads(async {
        let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
        let (_client, mut peer, follow) = offering(&fake, &driver, &first).await;
        let busy = occupied();
        drop(follow);
        // The task, which is aborted, unmaps nothing either.
        tokio::time::sleep(soon(5)).await;
        assert!(holds(&driver));
        drop(busy);
        assert_eq!(within(peer.released()).await, 1);
        nothing_held(&driver).await;
    });
}

#[test]
fn at_its_end_it_unmaps_memory_on_a_blocking_thread() {
    on_two_threads(async {
        let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer, mut follow) = offering(&fake, &driver, &first).await;
        let busy = occupied();
        within(async {
            tokio::join!(client.close(), async {
                assert_eq!(peer.request().await, None);
            });
            while matches!(follow.slot.view().offered, slot::Offered::Memory(_)) {
                tokio::time::sleep(soon(2)).await;
            }
        })
        .await;
        assert!(holds(&driver));
        let error = expect_err(within(follow.next()).await);
        assert!(error.to_string().contains("was closed"), "{error}");
        drop(busy);
        nothing_held(&driver).await;
    });
}

#[tokio::test]
async fn a_client_that_is_closing_says_so() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (client, _peer) = fake.client(&driver).await;
    client.session().close();
    let error = expect_err(within(client.list("")).await);
    assert!(error.to_string().contains("was closed"), "{error}");
}

#[test]
fn it_ends_with_the_runtime_of_its_client() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    };
    let (first, other) = (runtime(), runtime());
    let (mut begun, mut fresh, _client) = first.block_on(async {
        let (driver, fake) = (importer(), Fake::new().await);
        let (client, _peer) = fake.client(&driver).await;
        let mut begun = unproved(&client);
        let waits = tokio::time::timeout(soon(5), begun.next()).await;
        assert!(waits.is_err(), "nobody has answered");
        (begun, unproved(&client), client)
    });
    drop(first);
    for follow in [&mut begun, &mut fresh] {
        let error = expect_err(other.block_on(async { within(follow.next()).await }));
        assert!(error.to_string().contains("runtime has ended"), "{error}");
    }
}
