//! Servers that do not answer.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::*;
use crate::CreateOptions;
use crate::client::tests::fake::{Fake, Memory};
use crate::protocol::Ask;

/// Runs a scripted server on a thread of its own; returns options for its client, and the script's result.
fn scripted<T: Send + 'static, F: Future<Output = T>>(
    script: impl FnOnce(Fake) -> F + Send + 'static,
) -> (ClientOptions, JoinHandle<T>) {
    let (sender, options) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let fake = Fake::new().await.times(20, 600_000);
            sender.send(fake.options()).unwrap();
            script(fake).await
        })
    });
    (options.recv().unwrap(), thread)
}

#[test]
fn a_program_ends_although_the_server_does_not_answer() {
    // More than are sent at a time while the program runs.
    for leases in [1, 20] {
        let (options, script) = scripted(async move |fake: Fake| {
            let (mut peer, _) = fake.greet().await;
            let memory = Memory::new();
            for lease in 0..leases {
                peer.grant(lease, &memory).await;
            }
            let mut released = Vec::new();
            while let Some((_, ask)) = peer.request().await {
                match ask {
                    Ask::Release { lease } => released.push(lease),
                    other => panic!("{other:?}"),
                }
            }
            released
        });
        let driver = driver();
        let client = Client::connect(options, &driver).unwrap();
        let fetch = |_| client.fetch("x").unwrap();
        let held: Vec<_> = (0..leases).map(fetch).collect();
        drop(client);
        drop(held);
        let mut released = script.join().unwrap();
        released.sort_unstable();
        assert_eq!(released, (0..leases).collect::<Vec<_>>());
        assert!(driver.sim().unwrap().held().is_empty());
    }
}

#[test]
fn a_program_ends_although_the_server_is_gone() {
    let (fetched, told) = oneshot::channel();
    let (options, script) = scripted(async move |fake: Fake| {
        let (mut peer, _) = fake.greet().await;
        let memory = Memory::new();
        peer.grant(1, &memory).await;
        told.await.unwrap();
    });
    let driver = driver();
    let client = Client::connect(options, &driver).unwrap();
    let held = client.fetch("x").unwrap();
    fetched.send(()).unwrap();
    script.join().unwrap();
    let state = held.changed(LONG).unwrap();
    assert!(matches!(state, Some(LeaseState::Lost(_))), "{state:?}");
    drop((client, held));
    assert!(driver.sim().unwrap().held().is_empty());
}

#[test]
fn each_wait_is_broken_off_when_the_check_says_so() {
    let asked = Arc::new(AtomicBool::new(false));
    let check: Check = Arc::new({
        let asked = Arc::clone(&asked);
        move || match asked.load(Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    let (options, script) = scripted({
        let asked = Arc::clone(&asked);
        async move |fake: Fake| {
            let (mut peer, _) = fake.greet().await;
            let memory = Memory::new();
            peer.grant(1, &memory).await;
            // It answers no other request.
            let mut count = 0;
            while peer.request().await.is_some() {
                asked.store(true, Relaxed);
                count += 1;
            }
            count
        }
    });
    let hour = Duration::from_secs(3600);
    let options = options.timeout(hour);
    let driver = driver();
    let client = Client::connect_interruptible(options, &driver, check.clone()).unwrap();
    let held = client.fetch("x").unwrap();
    let create = || CreateOptions::new("x", 1);
    let calls: [&dyn Fn() -> Result<()>; 6] = [
        &|| client.list("").map(drop),
        &|| client.wait("x", hour).map(drop),
        &|| client.fetch("x").map(drop),
        &|| client.create(create()).map(drop),
        &|| client.create_or_get(create()).map(drop),
        &|| client.delete("x", hour),
    ];
    for call in calls {
        assert_eq!(call(), Err(Error::Interrupted));
        asked.store(false, Relaxed);
    }
    assert_eq!(held.release(), Err(Error::Interrupted));
    drop(client);
    // The last one lists what the client holds: the fetch has had no answer.
    assert_eq!(script.join().unwrap(), 7 + 1);
    assert!(driver.sim().unwrap().held().is_empty());

    // A process that listens and never accepts.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string().parse().unwrap();
    let options = exchange::Client::options(address).timeout(hour);
    let connected = Client::connect_interruptible(options, &driver, check);
    assert_eq!(connected.map(drop), Err(Error::Interrupted));
}
