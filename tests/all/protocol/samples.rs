//! One of each message: the fuzzers' seeds, and docs/protocol.md's example.

use egmem::driver::{Access, HandleType, Location, NodeId};
use egmem::exchange::protocol::*;
use egmem::exchange::{Owner, PeerName};
use egmem::share::{BootId, Description, Identity, InstanceId, Part};

fn secret(byte: u8) -> Secret {
    Secret::new(&[byte; 64]).expect("64 bytes")
}

pub fn memory() -> Description {
    let part = |allocation, node| Part {
        identity: Identity {
            boot: BootId::from_bytes(*b"boot-of-machine1"),
            instance: InstanceId::from_bytes(*b"life-of-process1"),
            allocation,
            generation: 0,
        },
        bytes: 4 << 20,
        location: Location::HostNuma(node),
    };
    Description {
        len: 5 << 20,
        offset: None,
        access: Access::ReadWrite,
        parts: vec![part(3, 0), part(4, 1)],
    }
}

/// Of the second of its parts.
pub fn window() -> Description {
    let mut memory = memory();
    Description {
        len: 4096,
        offset: Some(1 << 20),
        parts: vec![memory.parts.remove(1)],
        ..memory
    }
}

pub fn hellos() -> Vec<(&'static str, Hello)> {
    let new = Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: BootId::from_bytes(*b"boot-of-machine2"),
        resume: None,
        agent: "sample".into(),
        moves: false,
        fabric: false,
    };
    let again = Hello {
        resume: Some(secret(1)),
        ..new.clone()
    };
    let moves = Hello {
        moves: true,
        ..again.clone()
    };
    vec![
        ("hello", new),
        ("hello-again", again),
        ("hello-moves", moves),
    ]
}

pub fn greetings() -> Vec<(&'static str, Greeting)> {
    let welcome = Welcome {
        version: VERSION,
        instance: InstanceId::from_bytes(*b"life-of-server-1"),
        boot: BootId::from_bytes(*b"boot-of-machine1"),
        session: secret(2),
        resumed: false,
        peer: "node7.cluster".into(),
        heartbeat_ms: 2000,
        lease_ms: 10_000,
        frame_bytes: 4 << 20,
        local: Some("/run/egmem/local".into()),
    };
    let refused = Refused {
        reason: "version".into(),
        detail: "versions 2 to 2 are spoken here".into(),
    };
    let back = Welcome {
        resumed: true,
        ..welcome.clone()
    };
    vec![
        ("welcome", Greeting::Welcome(welcome)),
        ("welcome-back", Greeting::Welcome(back)),
        ("refused", Greeting::Refused(refused)),
    ]
}

pub fn requests() -> Vec<(&'static str, Request)> {
    let name = || "job-7/rank:0".to_owned();
    let both = vec![HandleType::Fabric, HandleType::PosixFd];
    let asks = vec![
        ("ping", Ask::Ping),
        (
            "list",
            Ask::List(List {
                prefix: "job-7/".into(),
                after: Some(name()),
            }),
        ),
        (
            "wait",
            Ask::Wait {
                name: name(),
                ms: 60_000,
            },
        ),
        (
            "fetch",
            Ask::Fetch(Fetch {
                name: name(),
                accept: both.clone(),
                access: Some(Access::ReadWrite),
                probe: true,
                instance: Some(InstanceId::from_bytes(*b"life-of-server-1")),
                owner: Some(Owner::Server),
            }),
        ),
        (
            "held",
            Ask::Held(Held {
                leases: vec![1, 300],
                after: Some(0),
                more: true,
            }),
        ),
        ("release", Ask::Release { lease: 9 }),
        ("probe", Ask::Probe { lease: 9 }),
        (
            "create",
            Ask::Create(Create {
                name: name(),
                bytes: 1 << 30,
                node: Some(NodeId(1)),
                peers: "*.cluster, uid:1000".into(),
            }),
        ),
        (
            "delete",
            Ask::Delete {
                name: name(),
                ms: 5000,
            },
        ),
    ];
    let request = |(index, (name, ask)): (usize, (&'static str, Ask))| {
        let id = index as u64 + 1;
        (name, (id, ask))
    };
    asks.into_iter().enumerate().map(request).collect()
}

pub fn from_server() -> Vec<(&'static str, FromServer)> {
    let refused = || Refused {
        reason: "forbidden".into(),
        detail: "not for node7.cluster".into(),
    };
    let entry = || Entry {
        name: "job-7/rank:0".into(),
        memory: memory(),
        leases: 2,
        owner: Owner::Peer(PeerName::User(1000)),
    };
    let granted = |handles| {
        Answer::Granted(Granted {
            lease: 9,
            memory: memory(),
            handles,
            probe: Some(6 << 20),
            no_fabric: Some("no IMEX channel".into()),
            owner: Owner::Peer(PeerName::Certificate("node7.cluster".into())),
        })
    };
    let fabric = || Handles::Fabric(vec![secret(6), secret(7)]);
    let answers = vec![
        ("done", Answer::Done),
        ("refused", Answer::Refused(refused())),
        (
            "names",
            Answer::Names(Names {
                entries: vec![entry()],
                more: true,
            }),
        ),
        ("granted-fabric", granted(fabric())),
        ("granted-fds", granted(Handles::Fds(2))),
        ("expired", Answer::Expired { leases: vec![300] }),
        (
            "probed",
            Answer::Probed(Probed {
                found: 0x1122_3344_5566_7788,
                wrote: 0x8877_6655_4433_2211,
            }),
        ),
        ("granted-queue", granted(Handles::Queue)),
        (
            "granted-window",
            Answer::Granted(Granted {
                lease: 10,
                memory: window(),
                handles: Handles::Fds(1),
                probe: None,
                no_fabric: None,
                owner: Owner::Server,
            }),
        ),
    ];
    let events = vec![
        ("withdrawing", Event::Withdrawing { lease: 9, ms: 5000 }),
        (
            "ended",
            Event::Ended {
                lease: 9,
                why: refused(),
            },
        ),
        ("closing", Event::Closing { ms: 5000 }),
        ("dismissed", Event::Dismissed(refused())),
    ];
    let reply = |(index, (name, answer)): (usize, (&'static str, Answer))| {
        (name, FromServer::Reply(index as u64 + 1, answer))
    };
    let notice = |(name, event)| (name, FromServer::Event(event));
    let answers = answers.into_iter().enumerate().map(reply);
    answers.chain(events.into_iter().map(notice)).collect()
}
