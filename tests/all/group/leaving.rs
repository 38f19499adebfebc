//! Ranks that leave, are dropped, or come back.

use std::time::Duration;

use egmem::Driver;
use egmem::exchange::group::{Error, Group, Host};
use egmem::exchange::{self, Address, Server, Who};

use super::{LONG, all, buffer, fabric, free_address, options, server, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_do_not_leave_are_named_and_dropped_ones_have_left() {
    let server = server().await;
    let address = server.addresses()[0].clone();
    let driver = fabric();
    let join = |rank| {
        let options = options(rank, 3, &address).host(Host::Elsewhere);
        let (options, driver) = (options.memory(buffer(&driver, 1)), driver.clone());
        async move { options.join(&driver).await.unwrap() }
    };
    let (mut first, second, third) = tokio::join!(join(0), join(1), join(2));
    // A rank that is dropped has left: it is not lost.
    drop(third);
    until("the third has left", || server.stats().connections == 2).await;
    let error = second.leave(Duration::from_millis(300)).await.unwrap_err();
    let Error::Exchange(exchange::Error::Share(egmem::share::Error::Memory(
        egmem::Error::StillHeld { holders, .. },
    ))) = &error
    else {
        panic!("{error}");
    };
    assert_eq!(holders, &["rank 0"]);
    let news = tokio::time::timeout(Duration::from_millis(200), first.changed()).await;
    assert!(news.is_err(), "{news:?}");
    first.leave(LONG).await.unwrap();
}

/// Longer than a server that ends waits for departing ranks, and than a thread without async
/// goes on for an operation that was begun.
const STRAGGLERS: Duration = Duration::from_secs(6);

/// Three ranks, and rank 0's driver, which no other rank has.
async fn three(address: &Address, linger: Duration) -> ([Group; 3], Driver) {
    let drivers = [0, 1, 2].map(|_| fabric());
    let join = |rank: u32| {
        let driver = drivers[rank as usize].clone();
        let options = options(rank, 3, address).linger(linger);
        async move {
            let memory = buffer(&driver, rank.into());
            options.memory(memory).join(&driver).await.unwrap()
        }
    };
    let (first, second, third) = tokio::join!(join(0), join(1), join(2));
    let [own, ..] = drivers;
    ([first, second, third], own)
}

/// Waits until no server listens at a TCP address.
async fn nobody_listens(address: &Address) {
    let address = address.to_string();
    let address = address.trim_start_matches("tcp://");
    until("the server has ended", || {
        std::net::TcpStream::connect(address).is_err()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_of_a_dropped_rank_lingers_for_the_others() {
    let address = free_address();
    let ([first, second, third], own) = three(&address, LONG).await;
    // From a thread that is not the runtime's.
    std::thread::spawn(|| drop(first)).join().unwrap();
    until("rank 0's memory is let go", || {
        own.sim().unwrap().held().is_empty()
    })
    .await;
    assert_eq!((second.state(), third.state()), Default::default());
    assert_eq!(second.rank(2).unwrap().get::<u64>(0).unwrap(), 2);
    tokio::time::sleep(STRAGGLERS).await;
    // Leaving needs the server: each waits for the other.
    let (second, third) = tokio::join!(second.leave(LONG), third.leave(LONG));
    second.unwrap();
    third.unwrap();
    nobody_listens(&address).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_of_a_dropped_rank_does_not_linger_for_ever() {
    let address = free_address();
    let ([first, mut second, third], _) = three(&address, Duration::from_millis(100)).await;
    drop(first);
    let state = tokio::time::timeout(LONG, second.changed()).await.unwrap();
    assert!(state.server_lost.is_some(), "{state:?}");
    // The mapped memory stays mapped.
    assert_eq!(second.rank(2).unwrap().get::<u64>(0).unwrap(), 2);
    nobody_listens(&address).await;
    drop(third);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_gives_up_leaving_has_left_like_a_dropped_one() {
    let address = free_address();
    let ([first, second, third], _) = three(&address, LONG).await;
    let leaving = first.leave(LONG);
    let given_up = tokio::time::timeout(Duration::from_millis(50), leaving).await;
    assert!(given_up.is_err());
    tokio::time::sleep(STRAGGLERS).await;
    let (second, third) = tokio::join!(second.leave(LONG), third.leave(LONG));
    second.unwrap();
    third.unwrap();
    nobody_listens(&address).await;
}

#[test]
fn who_gives_up_leaving_has_not_left_before_all_is_unmapped() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let server = server().await;
        let address = server.addresses()[0].clone();
        let driver = fabric();
        let join = |rank| {
            let options = options(rank, 2, &address).host(Host::Elsewhere);
            let (options, driver) = (options.memory(buffer(&driver, 1)), driver.clone());
            async move { options.join(&driver).await.unwrap() }
        };
        let (first, second) = tokio::join!(join(0), join(1));
        // The thread that is to unmap has something else to do.
        let (busy, is_busy) = tokio::sync::oneshot::channel();
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        tokio::task::spawn_blocking(move || {
            let _ = busy.send(());
            let _ = wait.recv();
        });
        is_busy.await.unwrap();
        let given_up = tokio::time::timeout(Duration::ZERO, first.leave(LONG)).await;
        given_up.expect_err("nothing is unmapped");
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(server.stats().connections, 2, "it still has it mapped");
        drop(go_on);
        until("it has left", || server.stats().connections == 1).await;
        second.leave(LONG).await.unwrap();
    });
}

#[test]
fn a_rank_without_async_that_leaves_where_it_may_not_lingers_too() {
    a_rank_without_async_lingers(|first| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _context = runtime.enter();
        let error = first.leave(LONG).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Exchange(exchange::Error::Share(egmem::share::Error::Memory(
                    egmem::Error::InvalidArgument { .. }
                )))
            ),
            "{error}"
        );
    });
}

#[test]
fn a_rank_without_async_that_is_dropped_lingers_too() {
    a_rank_without_async_lingers(drop);
}

fn a_rank_without_async_lingers(end: fn(egmem::exchange::blocking::Group)) {
    let address = free_address();
    let join = |rank| {
        let driver = fabric();
        let options = options(rank, 2, &address).linger(LONG);
        let options = options.memory(buffer(&driver, 1));
        egmem::exchange::blocking::Group::join(options, &driver).unwrap()
    };
    let (second, first) = std::thread::scope(|scope| {
        let first = scope.spawn(|| join(0));
        (join(1), first.join().unwrap())
    });
    end(first);
    std::thread::sleep(STRAGGLERS);
    second.leave(LONG).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_joins_again_begins_a_new_round() {
    let server = server().await;
    let address = server.addresses()[0].clone();
    for round in 0..3 {
        let results = all(2, |rank| {
            let join = options(rank, 2, &address).host(Host::Elsewhere);
            async move {
                let driver = fabric();
                let mark = 10 * round + u64::from(rank);
                let group = join.memory(buffer(&driver, mark)).join(&driver).await?;
                let other = u64::from(1 - rank);
                assert_eq!(group.rank(1 - rank)?.get::<u64>(0)?, 10 * round + other);
                group.leave(LONG).await.map(|_| ())
            }
        })
        .await;
        for result in results {
            result.unwrap();
        }
    }
}

/// Forwards bytes between TCP connections until they are cut.
pub struct Wire {
    pub address: Address,
    pub cut: std::sync::Arc<tokio::sync::Notify>,
}

impl Wire {
    pub async fn to(port: u16) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::loopback(listener.local_addr().unwrap().port());
        let cut = std::sync::Arc::new(tokio::sync::Notify::new());
        let cutting = cut.clone();
        tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let far = tokio::net::TcpStream::connect(("127.0.0.1", port));
                let mut far = far.await.unwrap();
                let cut = cutting.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        () = cut.notified() => {}
                    }
                });
            }
        });
        Self { address, cut }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_leaves_though_its_connection_breaks() {
    let server = Server::options()
        .listen(Address::loopback(0))
        .local_socket(false);
    let server = server.groups("job", Who::anyone());
    let server = server.start().await.unwrap();
    let address = server.addresses()[0].clone();
    let Address::Tcp { port, .. } = address else {
        panic!("{address}");
    };
    let wire = Wire::to(port).await;
    let driver = fabric();
    let join = |rank, address: &Address| {
        let options = options(rank, 2, address).host(Host::Elsewhere);
        let (options, driver) = (options.memory(buffer(&driver, 1)), driver.clone());
        async move { options.join(&driver).await.unwrap() }
    };
    let (first, second) = tokio::join!(join(0, &address), join(1, &wire.address));
    let second = tokio::spawn(second.leave(LONG));
    // Long enough for it to wait for the other; if not, there is less to see.
    tokio::time::sleep(Duration::from_millis(500)).await;
    wire.cut.notify_waiters();
    // The rank gets its answer whether it asks again before or after the round has ended.
    first.leave(LONG).await.unwrap();
    second.await.unwrap().unwrap();
    server.close(Duration::ZERO).await.unwrap();
}
