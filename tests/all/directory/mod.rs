//! The directory in etcd, against a real etcd-server that is killed and restarted.
//!
//! Without an `etcd` in PATH the tests say that they are skipped; with EGMEM_REQUIRE_ETCD=1 they
//! fail. The last two need `etcdctl`.

mod etcd;
mod servers;
mod trust;

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use egmem::exchange::directory::{Directory, EtcdOptions, Exporter, Registration};
use egmem::exchange::{Address, Error, Reconnect};
use egmem::share::{BootId, InstanceId};
use egmem_tests::child;
use etcd::Etcd;
use tokio::time::{Instant, sleep, timeout};

/// Far beyond every deadline of these tests.
const LONG: Duration = Duration::from_secs(300);
/// The lease of a test's exporters.
const LEASE: Duration = Duration::from_secs(4);

fn options(etcd: &Etcd) -> EtcdOptions {
    EtcdOptions::new([etcd.endpoint()])
        .lease(LEASE)
        .timeout(Duration::from_secs(3))
        .retry(Reconnect::backoff(
            Duration::from_millis(50),
            Duration::from_millis(400),
        ))
}

fn directory(etcd: &Etcd) -> Directory {
    Directory::etcd(options(etcd)).unwrap()
}

fn exporter(port: u16) -> Exporter {
    Exporter {
        addresses: vec![Address::loopback(port)],
        instance: InstanceId::random().unwrap(),
        boot: BootId::current().unwrap(),
    }
}

async fn registered(registration: &Registration) {
    timeout(LONG, registration.wait_for(true))
        .await
        .expect("not registered");
}

/// Asks until the name's exporters are these.
async fn becomes(directory: &Directory, name: &str, expected: &[&Exporter]) {
    let before = Instant::now();
    loop {
        let found = directory.resolve(name).await;
        if let Ok(found) = &found
            && found.iter().eq(expected.iter().copied())
        {
            return;
        }
        assert!(before.elapsed() < LONG, "{name}: {found:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_come_and_go() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    let directory = directory(&etcd);
    let first = exporter(1);
    let second = exporter(2);
    let one = directory.register(first.clone()).unwrap();
    one.add("a/1").unwrap();
    one.add("a/10").unwrap();
    registered(&one).await;
    assert_eq!(
        directory.resolve("a/1").await.unwrap(),
        std::slice::from_ref(&first)
    );
    assert_eq!(directory.resolve("a").await.unwrap(), []);
    // A second one that claims the name comes after the first.
    let two = directory.register(second.clone()).unwrap();
    two.add("a/1").unwrap();
    registered(&two).await;
    becomes(&directory, "a/1", &[&first, &second]).await;
    becomes(&directory, "a/10", &[&first]).await;
    one.remove("a/1");
    registered(&one).await;
    becomes(&directory, "a/1", &[&second]).await;
    // More than fit into one transaction.
    for number in 0..2500 {
        two.add(&format!("many/{number}")).unwrap();
    }
    registered(&two).await;
    for number in [0, 1000, 2499] {
        becomes(&directory, &format!("many/{number}"), &[&second]).await;
    }
    two.close().await.unwrap();
    assert_eq!(directory.resolve("a/1").await.unwrap(), []);
    drop(one);
    becomes(&directory, "a/10", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_killed_and_comes_back() {
    let Some(mut etcd) = Etcd::start(None) else {
        return;
    };
    let directory = directory(&etcd);
    let first = exporter(1);
    let one = directory.register(first.clone()).unwrap();
    one.add("a").unwrap();
    one.add("b").unwrap();
    registered(&one).await;

    etcd.kill();
    let before = Instant::now();
    let error = directory.resolve("a").await.unwrap_err();
    assert!(matches!(error, Error::Directory { .. }), "{error}");
    assert!(before.elapsed() < LONG);
    timeout(LONG, one.wait_for(false)).await.unwrap();
    // Changes made meanwhile reach etcd later.
    one.remove("b");
    one.add("c").unwrap();
    // Longer than the lease.
    sleep(LEASE + Duration::from_secs(1)).await;
    assert!(!one.is_registered());

    etcd.restart();
    registered(&one).await;
    becomes(&directory, "a", &[&first]).await;
    becomes(&directory, "b", &[]).await;
    becomes(&directory, "c", &[&first]).await;
    // And the lease is kept alive again; on a busy machine it may expire and be replaced by a new one.
    sleep(LEASE + Duration::from_secs(1)).await;
    becomes(&directory, "a", &[&first]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exporter_registers_when_etcd_comes_up() {
    let Some(mut etcd) = Etcd::start(None) else {
        return;
    };
    etcd.kill();
    let directory = directory(&etcd);
    let first = exporter(1);
    let one = directory.register(first.clone()).unwrap();
    one.add("a").unwrap();
    sleep(LEASE).await;
    assert!(!one.is_registered());
    etcd.restart();
    registered(&one).await;
    becomes(&directory, "a", &[&first]).await;
    // Closing while etcd is away ends in time, and says so.
    etcd.kill();
    let closed = timeout(LONG, one.close()).await.unwrap();
    assert!(matches!(closed, Err(Error::Directory { .. })), "{closed:?}");
}

/// Run as a process of its own by the next test.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn child_exporter() {
    let Ok(endpoint) = std::env::var("EGMEM_TEST_ETCD") else {
        return;
    };
    let directory = Directory::etcd(EtcdOptions::new([endpoint]).lease(LEASE)).unwrap();
    let exporter = exporter(7);
    let registration = directory.register(exporter.clone()).unwrap();
    registration.add("of/the/dead").unwrap();
    registered(&registration).await;
    println!("registered {}", exporter.instance);
    // Until it is killed, or its test is dead.
    sleep(LONG).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_exporters_names_go_with_its_lease() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    let directory = directory(&etcd);
    let mut child = child(module_path!(), "child_exporter")
        .env("EGMEM_TEST_ETCD", etcd.endpoint())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let instance = lines
        .map(Result::unwrap)
        .find_map(|line| Some(line.split_once("registered ")?.1.trim().to_owned()))
        .expect("the child has not registered");
    let found = directory.resolve("of/the/dead").await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].instance.to_string(), instance);
    child.kill().unwrap();
    child.wait().unwrap();
    // Not at once: etcd cannot tell a dead exporter from a slow one.
    becomes(&directory, "of/the/dead", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_of_other_writers_are_passed_over() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    let directory = directory(&etcd);
    let first = exporter(1);
    let id = first.instance;
    let other = InstanceId::random().unwrap();
    for (key, value) in [
        ("a@x".to_owned(), "{}"),
        ("a@".to_owned(), ""),
        (format!("a@{other}"), "not JSON"),
        (format!("a@{other}@{other}"), "{}"),
        (
            format!("a@{id}"),
            r#"{"addresses":["a:1"],"instance":"00000000000000000000000000000000"}"#,
        ),
    ] {
        let key = format!("/egmem/v1/names/{key}");
        if etcd.ctl(None, &["put", &key, value]).is_none() {
            return;
        }
    }
    assert_eq!(directory.resolve("a").await.unwrap(), []);
    let one = directory.register(first.clone()).unwrap();
    one.add("a").unwrap();
    registered(&one).await;
    assert_eq!(directory.resolve("a").await.unwrap(), [first]);
}
