//! Messages with arbitrary values.

use egmem::driver::{Access, HandleType, Location, NodeId};
use egmem::exchange::protocol::*;
use egmem::exchange::{Owner, PeerName};
use egmem::share::{BootId, Description, Identity, InstanceId, Part};
use egmem::text::{MAX_TEXT, bounded};
use proptest::collection::{btree_set, vec};
use proptest::option::of;
use proptest::prelude::*;

fn secret() -> impl Strategy<Value = Secret> {
    vec(any::<u8>(), 0..=MAX_SECRET).prop_map(|bytes| Secret::new(&bytes).expect("short enough"))
}

/// Texts of any kind: a server checks names of requests itself.
fn text() -> impl Strategy<Value = String> {
    any::<String>()
}

/// Names, as a server may send them.
fn name() -> impl Strategy<Value = String> {
    "[A-Za-z0-9._/:-]{1,40}"
}

/// Words for people, as a client keeps them.
fn words() -> impl Strategy<Value = String> {
    any::<String>().prop_map(|text| bounded(&text, MAX_TEXT))
}

/// Paths of sockets.
fn path() -> impl Strategy<Value = String> {
    "/[a-zA-Z0-9 ä.-]{0,40}"
}

fn boot() -> impl Strategy<Value = BootId> {
    any::<[u8; 16]>().prop_map(BootId::from_bytes)
}

fn instance() -> impl Strategy<Value = InstanceId> {
    any::<[u8; 16]>().prop_map(InstanceId::from_bytes)
}

fn handle_types() -> impl Strategy<Value = Vec<HandleType>> {
    vec(
        prop_oneof![Just(HandleType::Fabric), Just(HandleType::PosixFd)],
        0..4,
    )
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![
        Just(Access::None),
        Just(Access::Read),
        Just(Access::ReadWrite)
    ]
}

fn part() -> impl Strategy<Value = Part> {
    let location = prop_oneof![
        any::<i32>().prop_map(Location::Device),
        Just(Location::Host),
        any::<i32>().prop_map(Location::HostNuma),
        Just(Location::HostNumaCurrent),
    ];
    let identity = (boot(), instance(), any::<u64>(), any::<u64>());
    (identity, any::<u64>(), location).prop_map(
        |((boot, instance, allocation, generation), bytes, location)| Part {
            identity: Identity {
                boot,
                instance,
                allocation,
                generation,
            },
            bytes,
            location,
        },
    )
}

fn description() -> impl Strategy<Value = Description> {
    let bytes = (any::<u64>(), of(any::<u64>()));
    (bytes, access(), vec(part(), 0..4)).prop_map(|((len, offset), access, parts)| Description {
        len,
        offset,
        access,
        parts,
    })
}

fn handles() -> impl Strategy<Value = Handles> {
    prop_oneof![
        vec(secret(), 0..4).prop_map(Handles::Fabric),
        any::<u32>().prop_map(Handles::Fds),
        Just(Handles::Queue),
    ]
}

fn refused() -> impl Strategy<Value = Refused> {
    (words(), words()).prop_map(|(reason, detail)| Refused { reason, detail })
}

fn owner() -> impl Strategy<Value = Owner> {
    prop_oneof![
        Just(Owner::Server),
        any::<u32>().prop_map(|uid| Owner::Peer(PeerName::User(uid))),
        Just(Owner::Peer(PeerName::Local)),
        "[a-z0-9_-]{1,9}(\\.[a-z0-9_-]{1,9}){1,3}"
            .prop_map(|name| Owner::Peer(PeerName::certificate(&name).expect("a DNS name"))),
    ]
}

fn entry() -> impl Strategy<Value = Entry> {
    (name(), description(), any::<u32>(), owner()).prop_map(|(name, memory, leases, owner)| Entry {
        name,
        memory,
        leases,
        owner,
    })
}

/// In ascending order, each once.
fn leases() -> impl Strategy<Value = Vec<u64>> {
    btree_set(any::<u64>(), 0..9).prop_map(|leases| leases.into_iter().collect())
}

pub fn hello() -> impl Strategy<Value = Hello> {
    let first = (text(), any::<u16>(), any::<u16>(), boot());
    let last = (text(), any::<bool>());
    (first, of(secret()), last).prop_map(
        |((magic, oldest, newest, boot), resume, (agent, moves))| Hello {
            magic,
            oldest,
            newest,
            boot,
            resume,
            agent,
            moves,
            fabric: false,
        },
    )
}

pub fn greeting() -> impl Strategy<Value = Greeting> {
    let ids = (any::<u16>(), instance(), boot(), secret());
    let numbers = (any::<bool>(), any::<u64>(), any::<u64>(), any::<u32>());
    let welcome = (ids, numbers, words(), of(path())).prop_map(
        |((version, instance, boot, session), numbers, peer, local)| Welcome {
            version,
            instance,
            boot,
            session,
            resumed: numbers.0,
            peer,
            heartbeat_ms: numbers.1,
            lease_ms: numbers.2,
            frame_bytes: numbers.3,
            local,
        },
    );
    prop_oneof![
        welcome.prop_map(Greeting::Welcome),
        refused().prop_map(Greeting::Refused),
    ]
}

fn ask() -> impl Strategy<Value = Ask> {
    let fetch = (
        text(),
        handle_types(),
        of(access()),
        any::<bool>(),
        of(instance()),
        of(owner()),
    );
    let create = (text(), any::<u64>(), of(any::<i32>()), text());
    prop_oneof![
        Just(Ask::Ping),
        (text(), of(text())).prop_map(|(prefix, after)| Ask::List(List { prefix, after })),
        (text(), any::<u64>()).prop_map(|(name, ms)| Ask::Wait { name, ms }),
        fetch.prop_map(
            |(name, accept, access, probe, instance, owner)| Ask::Fetch(Fetch {
                name,
                accept,
                access,
                probe,
                instance,
                owner
            })
        ),
        (leases(), of(any::<u64>()), any::<bool>()).prop_map(|(leases, after, more)| Ask::Held(
            Held {
                leases,
                after,
                more
            }
        )),
        any::<u64>().prop_map(|lease| Ask::Release { lease }),
        any::<u64>().prop_map(|lease| Ask::Probe { lease }),
        create.prop_map(|(name, bytes, node, peers)| Ask::Create(Create {
            name,
            bytes,
            node: node.map(NodeId),
            peers
        })),
        (text(), any::<u64>()).prop_map(|(name, ms)| Ask::Delete { name, ms }),
    ]
}

pub fn request() -> impl Strategy<Value = Request> {
    (any::<u64>(), ask())
}

fn answer() -> impl Strategy<Value = Answer> {
    let granted = (
        any::<u64>(),
        description(),
        handles(),
        of(any::<u64>()),
        of(words()),
        owner(),
    );
    prop_oneof![
        Just(Answer::Done),
        refused().prop_map(Answer::Refused),
        (vec(entry(), 0..3), any::<bool>())
            .prop_map(|(entries, more)| Answer::Names(Names { entries, more })),
        granted.prop_map(
            |(lease, memory, handles, probe, no_fabric, owner)| Answer::Granted(Granted {
                lease,
                memory,
                handles,
                probe,
                no_fabric,
                owner
            })
        ),
        leases().prop_map(|leases| Answer::Expired { leases }),
        (any::<u64>(), any::<u64>())
            .prop_map(|(found, wrote)| Answer::Probed(Probed { found, wrote })),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (any::<u64>(), any::<u64>()).prop_map(|(lease, ms)| Event::Withdrawing { lease, ms }),
        (any::<u64>(), refused()).prop_map(|(lease, why)| Event::Ended { lease, why }),
        any::<u64>().prop_map(|ms| Event::Closing { ms }),
        refused().prop_map(Event::Dismissed),
    ]
}

pub fn from_server() -> impl Strategy<Value = FromServer> {
    prop_oneof![
        (any::<u64>(), answer()).prop_map(|(id, answer)| FromServer::Reply(id, answer)),
        event().prop_map(FromServer::Event),
    ]
}
