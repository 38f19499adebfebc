//! Of each message: what a server keeps for it is bounded by what was received, and given back.

use std::sync::Arc;
use std::time::Duration;

use egmem::driver::{Access, HandleType, Location, NodeId};
use egmem::exchange::protocol::*;
use egmem::exchange::server::{Allocate, Allocation, Published};
use egmem::exchange::{Address, Limits, PeerName, Server, Who};
use egmem::share::{BootId, Description, Identity, InstanceId, Part};
use egmem::{Buffer, Driver, Machine, Refusal};

use crate::counting::{live, peak, reset, resident};
use crate::flood::{PATIENCE, dial, flood, greet, hello, requests, until};
use crate::{alone, runtime};

/// A name of the usual length: a lease is of the same size whatever it is.
const NAME: &str = "job-7/rank:0/weights/layer-12/part-3";
const CONNECTIONS: usize = 8;
/// Bytes that are sent on each connection.
const EACH: usize = 256 << 10;
/// The most that is kept for a byte that was received,
const RATIO: usize = 8;
/// beside so much for each connection with its session,
const CONNECTION: usize = 64 << 10;
/// and so much for each request that is being answered.
const REQUEST: usize = 8 << 10;
/// What runtime and tables may keep for later.
const SLACK: usize = 1 << 20;

/// Never answers.
struct Hesitant;

impl Allocate for Hesitant {
    fn may_create(&self, _: &PeerName, _: &str) -> Result<(), (Refusal, String)> {
        Ok(())
    }

    fn create<'a>(&'a self, _: &'a PeerName, _: &'a Create) -> Allocation<'a> {
        Box::pin(std::future::pending())
    }

    fn delete<'a>(&'a self, _: &'a PeerName, _: &'a str, _: Duration) -> Allocation<'a> {
        Box::pin(std::future::pending())
    }
}

struct Setting {
    runtime: tokio::runtime::Runtime,
    server: Server,
    driver: Driver,
}

impl Setting {
    fn new() -> Self {
        let runtime = runtime();
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let mut limits = Limits::default();
        (limits.frame, limits.handshake) = (PATIENCE, PATIENCE);
        let server = Server::options()
            .listen(Address::loopback(0))
            .allocator(Arc::new(Hesitant))
            .groups("*", Who::anyone())
            // Sessions are to end soon after their connections.
            .heartbeat(Duration::from_secs(1))
            .lease(Duration::from_secs(2))
            .limits(limits);
        let server = runtime.block_on(server.start()).unwrap();
        let this = Self {
            runtime,
            server,
            driver,
        };
        // What is made once.
        for _ in 0..2 {
            drop(greet(&this.server, &hello(None, None)));
            until("gone", || this.server.stats().sessions == 0);
        }
        this
    }

    fn publish(&self) -> Published {
        let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable();
        let buffer = buffer.allocate(&self.driver).unwrap();
        let _entered = self.runtime.enter();
        self.server.publish(NAME, buffer).now().unwrap()
    }

    /// What the server has read is answered, or waits.
    fn settle(&self) {
        let (mut before, mut quiet) = (u64::MAX, 0);
        until("quiet", || {
            std::thread::sleep(Duration::from_millis(50));
            let now = self.server.stats().requests;
            quiet = match std::mem::replace(&mut before, now) == now {
                true => quiet + 1,
                false => 0,
            };
            quiet >= 6
        });
    }

    /// All that was kept is given back.
    fn back_to(&self, what: &str, before: usize) {
        let gone = || {
            let stats = self.server.stats();
            (stats.connections, stats.sessions, stats.peer_bytes) == (0, 0, 0)
        };
        until(format_args!("{what}: all gone"), gone);
        until(
            format_args!("{what}: {before} bytes before, now {}", live()),
            || live() <= before + SLACK,
        );
    }

    /// Floods the server from several sessions at once.
    fn floods(&self, what: &str, bytes: &[u8]) {
        let published = self.publish();
        let hello = hello(None, None);
        let before = live();
        let mut streams: Vec<_> = (0..CONNECTIONS)
            .map(|_| greet(&self.server, &hello).0)
            .collect();
        reset();
        let received = flood(&mut streams, bytes) + CONNECTIONS * hello.len();
        self.settle();
        let grown = peak().saturating_sub(before);
        let kept = self.server.stats().peer_bytes;
        let each = CONNECTION + REQUEST * Limits::default().requests_in_flight;
        let most = received * RATIO + CONNECTIONS * each;
        println!("{what}: {received} received, at most {grown} kept, {kept} charged");
        assert!(grown <= most, "{what}: {grown} bytes for {received}");
        drop((streams, published));
        self.back_to(what, before);
    }
}

fn name(id: u64) -> String {
    format!("{id:0>255}")
}

fn memory(parts: u64) -> Description {
    let part = |allocation| Part {
        identity: Identity {
            boot: BootId::from_bytes([1; 16]),
            instance: InstanceId::from_bytes([2; 16]),
            allocation,
            generation: 1,
        },
        bytes: 2 << 20,
        location: Location::HostNuma(0),
    };
    Description {
        len: parts * (2 << 20),
        offset: None,
        access: Access::ReadWrite,
        parts: (0..parts).map(part).collect(),
    }
}

fn join(id: u64) -> Join {
    Join {
        group: format!("{id}"),
        rank: 0,
        size: 2,
        admission: Admission::Secret(Secret::new(&[7; 32]).unwrap()),
        can: vec![HandleType::Fabric, HandleType::PosixFd],
        cannot: vec!["x".repeat(300); 8],
        memory: Some(memory(40)),
        ms: 600_000,
    }
}

#[test]
fn what_is_kept_for_a_message_is_bounded_by_its_bytes() {
    let _alone = alone();
    let setting = Setting::new();
    let secret = |len| Secret::new(&vec![9; len]).unwrap();
    let create = |id, peer: &str, peers| Create {
        name: name(id),
        bytes: 1,
        node: None,
        peers: vec![peer.to_owned(); peers],
    };
    type Make<'a> = Box<dyn Fn(u64) -> Ask + 'a>;
    let all: [(&str, Make<'_>); 16] = [
        ("ping", Box::new(|_| Ask::Ping(Empty {}))),
        (
            "list",
            Box::new(|id| {
                Ask::List(List {
                    prefix: name(id),
                    after: Some(name(id)),
                })
            }),
        ),
        (
            "list after much",
            Box::new(|_| {
                Ask::List(List {
                    prefix: String::new(),
                    after: Some("x".repeat(EACH)),
                })
            }),
        ),
        (
            "wait",
            Box::new(|id| {
                Ask::Wait(Wait {
                    name: name(id),
                    ms: 600_000,
                })
            }),
        ),
        (
            "fetch",
            Box::new(|_| {
                Ask::Fetch(Fetch {
                    name: NAME.into(),
                    accept: vec![HandleType::Fabric],
                    access: Access::Read,
                    probe: false,
                    instance: None,
                    owner: None,
                })
            }),
        ),
        (
            "redeem",
            Box::new(|_| Ask::Redeem(Redeem { ticket: secret(64) })),
        ),
        ("release", Box::new(|lease| Ask::Release(Release { lease }))),
        (
            "probe",
            Box::new(|lease| {
                Ask::Probe(Probe {
                    lease,
                    wrote: Some(1),
                })
            }),
        ),
        (
            "watch",
            Box::new(|id| Ask::Watch(Watch { prefix: name(id) })),
        ),
        (
            "create",
            Box::new(|id| {
                Ask::Create(create(
                    id,
                    "a-node-with-a-long-name.rack-17.cluster.test",
                    1024,
                ))
            }),
        ),
        (
            "create for many short names",
            Box::new(|id| Ask::Create(create(id, "ab", 1024))),
        ),
        (
            "delete",
            Box::new(|id| {
                Ask::Delete(Delete {
                    name: name(id),
                    ms: 600_000,
                })
            }),
        ),
        ("join", Box::new(|id| Ask::Join(join(id)))),
        (
            "join in vain",
            Box::new(|id| {
                Ask::Join(Join {
                    rank: 2,
                    ..join(id)
                })
            }),
        ),
        (
            "offer",
            Box::new(|round| {
                let (group, fabric) = ("g".into(), vec![secret(64); 4096]);
                Ask::Offer(Offer {
                    group,
                    round,
                    fabric,
                    first: 0,
                })
            }),
        ),
        (
            "leave",
            Box::new(|round| {
                Ask::Leave(Leave {
                    group: name(1),
                    round,
                    ms: 600_000,
                })
            }),
        ),
    ];
    for (what, ask) in all {
        setting.floods(what, &requests(EACH, ask));
    }
    let unknown = [
        b"\xa2\x62id\x01\x65dance\x5a\x00\x01\x00\x00".to_vec(),
        vec![0; 1 << 16],
    ];
    let unknown = crate::flood::framed(&unknown.concat());
    setting.floods("a request of a later version", &unknown.repeat(4));
    let unfinished = [&(4_u32 << 20).to_be_bytes()[..], &vec![0; EACH]].concat();
    setting.floods("an unfinished frame", &unfinished);
}

/// Sessions are resumed with leases that they never had, again and again, by a peer that may do nothing.
#[test]
fn a_peer_without_rights_cannot_grow_the_server() {
    let _alone = alone();
    let setting = Setting::new();
    let server = &setting.server;
    let before = live();
    let resident_before = resident();
    let held: Vec<u64> = (1 << 20..(1 << 20) + 45_000).collect();
    let vain = requests(1, |id| {
        Ask::Join(Join {
            rank: 2,
            ..join(id)
        })
    });
    let new = hello(None, None);
    let mut received = 0;
    let mut streams = Vec::new();
    reset();
    for _ in 0..16 {
        let (mut stream, welcome) = greet(server, &new);
        // It is refused, and keeps no session.
        received += flood(std::slice::from_mut(&mut stream), &vain);
        for _ in 0..2 {
            let again = hello(Some(welcome.session.clone()), Some(held.clone()));
            let mut stream = dial(server);
            received += flood(std::slice::from_mut(&mut stream), &again);
            streams.push(stream);
        }
        streams.push(stream);
    }
    setting.settle();
    let own = 3 * held.len() * 16;
    let grown = peak().saturating_sub(before);
    let most = received * RATIO + streams.len() * CONNECTION + own;
    assert!(grown <= most, "{grown} bytes for {received}");
    if let (Some(before), Some(now)) = (resident_before, resident()) {
        let grown = now.saturating_sub(before);
        assert!(
            grown <= most + (64 << 20),
            "{grown} resident bytes for {received}"
        );
    }
    drop(streams);
    setting.back_to("resumed in vain", before + 2 * held.len() * 8);
}
