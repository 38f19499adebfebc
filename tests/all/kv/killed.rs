//! Processes that are killed in the middle of stores, and others that find their pages.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use egmem::driver::NodeId;
use egmem::exchange::{self, Address, blocking};
use egmem::kv::{AttachOptions, Error, Key, Load, Tier};
use egmem::{Buffer, Driver, Machine};
use fastrand::Rng;

use crate::kv::setup::{Cache, is_emulated, key};

const PAGE: u64 = 4096;
const PAGES: u64 = 64;
const KEYS: u64 = 300;
/// The sizes of pages of a tier that several processes have.
const SIZES: [u64; 2] = [PAGE, 3 * PAGE];
/// The variable that says how many processes are killed of those that have one tier.
const KILLS: &str = "EGMEM_KV_KILLS";
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
    let group = key.group();
    let mut random = Rng::with_seed(seed << 1 | u64::from(group));
    let mut bytes = vec![0; SIZES[usize::from(group)] as usize];
    random.fill(&mut bytes);
    bytes
}

fn options(at: &str, driver: &Driver) -> AttachOptions {
    let client = exchange::Client::options(at.parse::<Address>().unwrap());
    let client = blocking::Client::connect(client, driver).unwrap();
    let memory = client.fetch("kv").unwrap();
    Tier::attach(Arc::new(memory))
}

fn attach(at: &str, driver: &Driver) -> Result<Tier, Error> {
    let options = options(at, driver);
    options.pages(PAGES).page_bytes(PAGE).open()
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
        check(&tier.prepare_load(&[*key]).unwrap(), &[*key]);
    }
    ready.len() as u64
}

/// Checks every byte of the pages of a load.
fn check(load: &Load, keys: &[Key]) {
    for (index, key) in keys.iter().enumerate() {
        let expected = contents(key);
        let mut bytes = vec![0; expected.len()];
        load.view(index).unwrap().read_at(0, &mut bytes).unwrap();
        assert!(bytes == expected, "the page of {key:?} has other bytes");
    }
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

/// One of several processes with one tier: stores, loads, checks and removes random keys until it is killed. Says a word after each few.
#[test]
fn member() {
    let Ok(at) = std::env::var(AT) else { return };
    let driver = driver();
    let tier = options(&at, &driver).page_sizes(SIZES).open().unwrap();
    let mut random = Rng::new();
    for turn in 0_u64.. {
        if turn.is_multiple_of(20) {
            println!("\nturn {turn}");
        }
        let first = random.u64(0..KEYS);
        let keys = first..first + random.u64(1..8);
        let keys: Vec<Key> = keys
            .map(|number| key(number).in_group(random.u8(0..2)))
            .collect();
        match random.u32(0..8) {
            // Others may have everything pinned for a moment.
            0..4 => {
                if let Ok(mut store) = tier.prepare_store(&keys) {
                    for (index, key) in store.keys().iter().enumerate() {
                        let view = store.view(index).unwrap();
                        view.write_at(0, &contents(key)).unwrap();
                    }
                    if random.u32(0..8) > 0 {
                        store.commit().unwrap();
                    }
                }
            }
            4..6 => {
                let found = tier.lookup(&keys);
                if let Ok(load) = tier.prepare_load(&keys[..found]) {
                    check(&load, &keys[..found]);
                }
            }
            6 => tier.touch(&keys),
            _ => drop(tier.remove(&keys[..1]).unwrap()),
        }
    }
}

/// Starts a member; returns it with its words.
fn start_member(at: &str) -> (Child, Receiver<()>) {
    let mut child = egmem_tests::child(module_path!(), "member")
        .env(AT, at)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let mut lines = lines
            .map_while(Result::ok)
            .filter(|line| line.starts_with("turn "));
        lines.try_for_each(|_| tell.send(()))
    });
    (child, told)
}

/// Four processes have a tier of two groups. They are killed one after the other, and others come: those that are there go on at once, and
/// every page has its key's bytes in the end.
#[test]
fn killed_members_harm_no_other() {
    if is_emulated() {
        return;
    }
    let kills = std::env::var(KILLS).map_or(20, |kills| kills.parse().unwrap());
    let driver = driver();
    let server = exchange::Server::options().listen(Address::loopback(0));
    let server = blocking::Server::start(server).unwrap();
    let at = server.addresses().remove(0).to_string();
    let node = crate::kv::drivers::node(&driver);
    let buffer = Buffer::on(NodeId(node.0)).bytes(1 << 20).shareable();
    let published = server
        .publish("kv", buffer.allocate(&driver).unwrap())
        .unwrap();
    let tier = options(&at, &driver).page_sizes(SIZES).open().unwrap();
    let mut members: Vec<_> = (0..4).map(|_| start_member(&at)).collect();
    for kill in 0..kills {
        // Each goes on after the others were killed. It ends only if it has failed.
        for (member, words) in &mut members {
            while words.try_recv().is_ok() {}
            words.recv().unwrap();
            assert!(member.try_wait().unwrap().is_none());
        }
        std::thread::sleep(Duration::from_micros(fastrand::u64(0..3000)));
        let (mut killed, _) = members.swap_remove(fastrand::usize(0..members.len()));
        killed.kill().unwrap();
        killed.wait().unwrap();
        members.push(start_member(&at));
        if kill % 8 == 0 {
            println!("{kill}: {:?}", tier.stats());
        }
    }
    for (mut member, _) in members {
        member.kill().unwrap();
        member.wait().unwrap();
    }
    // Nobody else is left, and nothing of theirs once this member has looked for those that have ended.
    let more: Vec<Key> = (1000..1100).map(key).collect();
    assert!(tier.prepare_store(&more).is_ok());
    assert_eq!(tier.members().len(), 1);
    let stats = loop {
        let stats = tier.stats();
        if (stats.writing, stats.pinned) == (0, 0) {
            break stats;
        }
        std::thread::yield_now();
    };
    assert_eq!(stats.free + stats.ready, stats.usable);
    assert_eq!(verify(&tier), stats.ready);
    drop(tier);
    let tier = options(&at, &driver).open().unwrap();
    assert_eq!((tier.found().ready, tier.found().damaged), (stats.ready, 0));
    assert_eq!(verify(&tier), stats.ready);
    drop(published);
}
