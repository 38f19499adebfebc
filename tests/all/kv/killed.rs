//! Processes that are killed in the middle of stores, and others that find their pages.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use egmem::driver::NodeId;
use egmem::exchange::{self, Address, blocking};
use egmem::kv::{Error, Key, Tier};
use egmem::{Buffer, Driver, Machine};
use fastrand::Rng;

use crate::kv::setup::{Cache, is_emulated, key};

const PAGE: u64 = 4096;
const PAGES: u64 = 64;
const KEYS: u64 = 300;
/// The child's variable: where the server listens.
const AT: &str = "EGMEM_TEST_KV_AT";

fn driver() -> Driver {
    match crate::kv::drivers::is_cuda_required() {
        true => Driver::open().unwrap(),
        false => Driver::simulated(Machine::gh200()).unwrap(),
    }
}

/// Returns the content of a key's page: every word differs.
fn contents(key: &Key) -> Vec<u8> {
    let seed = u64::from_le_bytes(key.as_bytes()[..8].try_into().unwrap());
    let mut random = Rng::with_seed(seed);
    let mut bytes = vec![0; PAGE as usize];
    random.fill(&mut bytes);
    bytes
}

fn attach(at: &str, driver: &Driver) -> Result<Tier, Error> {
    let client = exchange::Client::options(at.parse::<Address>().unwrap());
    let client = blocking::Client::connect(client, driver).unwrap();
    let memory = client.fetch("kv").unwrap();
    Tier::attach(Arc::new(memory))
        .pages(PAGES)
        .page_bytes(PAGE)
        .open()
}

/// Stores random keys until it is killed: half of them through a GPU, half by the CPU.
#[test]
fn child() {
    let Ok(at) = std::env::var(AT) else { return };
    let driver = driver();
    let tier = attach(&at, &driver).unwrap();
    let cache = Cache::new(&driver, 1, 8, (PAGE, PAGE));
    let mut random = Rng::new();
    println!("\nready {}", tier.found().ready);
    loop {
        let first = random.u64(0..KEYS);
        let keys: Vec<Key> = (first..first + random.u64(1..8)).map(key).collect();
        let mut store = tier.prepare_store(&keys).unwrap();
        if random.bool() {
            let bytes: Vec<u8> = store.keys().iter().flat_map(contents).collect();
            cache.write(0, &bytes);
            let blocks: Vec<u64> = (0..store.pages().len() as u64).collect();
            let pairs = store.pairs(&blocks).unwrap();
            tier.store(&cache.stream, &pairs, &cache.pages)
                .unwrap()
                .wait()
                .unwrap();
        } else {
            for (index, key) in store.keys().iter().enumerate() {
                store
                    .view(index)
                    .unwrap()
                    .write_at(0, &contents(key))
                    .unwrap();
            }
        }
        if random.u32(0..8) > 0 {
            store.commit().unwrap();
        }
        tier.touch(&keys);
    }
}

/// Starts the child; returns it, and how many pages it found.
fn start(at: &str) -> (Child, u64) {
    let mut child = egmem_tests::child(module_path!(), "child")
        .env(AT, at)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let ready = lines.find_map(|line| line.strip_prefix("ready ")?.parse().ok());
    (child, ready.expect("the child attached the tier"))
}

/// Checks every byte of every ready page. Returns how many there are.
fn verify(tier: &Tier) -> u64 {
    let ready = tier.keys();
    for (key, _) in &ready {
        let load = tier.prepare_load(std::slice::from_ref(key)).unwrap();
        let mut bytes = vec![0; PAGE as usize];
        load.view(0).unwrap().read_at(0, &mut bytes).unwrap();
        assert!(
            bytes == contents(key),
            "the page of {key:?} has other bytes"
        );
    }
    ready.len() as u64
}

#[test]
fn a_killed_process_leaves_whole_pages() {
    if is_emulated() {
        return;
    }
    let driver = driver();
    let server = exchange::Server::options().listen(Address::loopback(0));
    let server = blocking::Server::start(server).unwrap();
    let at = server.addresses().remove(0).to_string();
    let node = crate::kv::drivers::node(&driver);
    let buffer = Buffer::on(NodeId(node.0)).bytes(Tier::bytes_needed(PAGES, PAGE).unwrap());
    let buffer = buffer.shareable().allocate(&driver).unwrap();
    let published = server.publish("kv", buffer).unwrap();
    let (mut kept, mut unfinished) = (0, 0);
    // Until one was killed in the middle of a store. On a busy machine a child may not come that far for long.
    for round in 0..2000 {
        if round >= 8 && kept > 0 && unfinished > 0 {
            break;
        }
        let (mut child, found) = start(&at);
        assert_eq!(found, kept, "round {round}");
        std::thread::sleep(Duration::from_micros(fastrand::u64(1000..60_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let tier = attach(&at, &driver).unwrap();
        assert_eq!(tier.found().damaged, 0);
        unfinished += tier.found().unfinished;
        kept = verify(&tier);
        assert_eq!(tier.found().ready, kept);
        println!("round {round}: {:?}", tier.found());
    }
    assert!(
        kept > 0 && unfinished > 0,
        "no child was killed in the middle of a store"
    );
    drop(published);
}
