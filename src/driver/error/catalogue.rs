//! Every error with an example: the test compares their texts with tests/data/errors/driver.txt.

use std::io::ErrorKind;
use std::time::Duration;

use super::{BlockInfo, Damage, DamageKind, DamageReport, Seen, Site, WrongBytes};
use super::{Distrust, DriverError, End, Error, Mismatch, NoRoom, Refusal, Unreachable};
use crate::{Access, Call, Code, CudaVersion, Location, NodeId};

#[macro_use]
#[path = "listing.rs"]
mod listing;

use listing::{Example, compare};

variants!(Errors: Error {
    NoDriver, DriverTooOld, MissingLibrary, MissingSymbol, Driver, NoImexChannel, PlatformUnsupported,
    TooManyReferences, OutOfMemory, NodeTooFull, NodesTooFull, NodeUnknown, NoSuchNode, NoSuchGpu,
    InvalidArgument, OutOfRange, NotAccessible, ContextLost, WrongBytes, ProbeDied, System, Topology,
    NotTrusted, Insecure, Tls, Refused, Mismatched, Unreachable, PeerLost, Protocol, TimedOut, StillHeld, Stale, Import,
    DataPlane, NoCommonHandle, HeapDamaged, HeapFull, OutOfAddresses, LimitReached, Directory,
});
variants!(Refusals: Refusal {
    NotFound, Forbidden, ReadOnly, Configured, NotTrusted, Unsupported, Version, Invalid, Limit, Quota, Exists, WrongOwner, Closing,
    NoCommonHandle, RanksDisagree, Expired, Stale, NoMemory, TimedOut, Internal, Other,
});
variants!(NoRooms: NoRoom { Limit, Fragments, Alignment, Share, SoftLimit });
variants!(Mismatches: Mismatch { Owner, Size, Node });
variants!(Distrusts: Distrust { User, Name, Validity, Revoked, Authority, RevocationList, Certificate, ByPeer });
variants!(Unreachables: Unreachable { NobodyListens, NoSocket, Denied, UnknownHost, Network });
variants!(Ends: End { Here, There, Between });

fn failed(call: Call, code: Code) -> DriverError {
    DriverError { call, code }
}

/// Errors of this machine: its driver, its topology, its system.
fn of_the_machine() -> Vec<Error> {
    let create = |code| failed(Call::MemCreate, code);
    let choices = || vec![NodeId(0), NodeId(1)];
    let mut errors = vec![
        Error::NoDriver {
            detail: "libcuda.so.1: cannot open shared object file".into(),
        },
        Error::DriverTooOld {
            what: "host-NUMA memory pools",
            have: CudaVersion(12040),
            need: CudaVersion(12060),
        },
        Error::MissingLibrary {
            library: "libcudart",
            detail: "libcudart.so.13: cannot open shared object file".into(),
        },
        Error::MissingSymbol {
            symbol: "cuMemCreate",
            library: "libcuda.so.1",
        },
    ];
    for code in [
        Code::NO_DEVICE,
        Code::STUB_LIBRARY,
        Code::SYSTEM_DRIVER_MISMATCH,
        Code::SYSTEM_NOT_READY,
    ] {
        errors.push(failed(Call::Init, code).into());
    }
    for code in [
        Code::NOT_PERMITTED,
        Code::OUT_OF_MEMORY,
        Code::INVALID_VALUE,
        Code(12345),
    ] {
        errors.push(create(code).into());
    }
    errors.extend([
        Error::NoImexChannel {
            path: "/dev/nvidia-caps-imex-channels/channel0".into(),
            source: create(Code::NOT_PERMITTED),
        },
        Error::PlatformUnsupported {
            what: "host-NUMA memory through VMM",
            source: Some(create(Code::NOT_SUPPORTED)),
        },
        Error::TooManyReferences {
            source: failed(Call::MemSetAccess, Code::UNKNOWN),
        },
        Error::OutOfMemory {
            location: Location::HostNuma(1),
            requested: 64 << 20,
            source: create(Code::OUT_OF_MEMORY),
        },
        Error::NodeTooFull {
            node: NodeId(1),
            requested: 64 << 30,
            free: 10 << 30,
        },
        Error::NodesTooFull {
            nodes: choices(),
            requested: 64 << 30,
            free: 10 << 30,
        },
        Error::NodeUnknown {
            gpu: 0,
            choices: choices(),
        },
        Error::NoSuchNode {
            node: NodeId(7),
            gpu: None,
            choices: choices(),
        },
        Error::NoSuchNode {
            node: NodeId(4),
            gpu: Some(0),
            choices: choices(),
        },
        Error::NoSuchGpu { gpu: 4, count: 4 },
        Error::NoSuchGpu { gpu: 0, count: 0 },
        Error::ContextLost {
            device: 0,
            source: failed(Call::StreamSynchronize, Code::ILLEGAL_ADDRESS),
        },
        Error::ProbeDied {
            what: "VMM on node 0 with GPU 0".into(),
            how: "signal 11 (SIGSEGV)".into(),
        },
        Error::Topology {
            detail: "/sys/devices/system/node/online holds 'x'".into(),
        },
        Error::OutOfAddresses {
            requested: 1 << 46,
            source: failed(Call::MemAddressReserve, Code::OUT_OF_MEMORY),
        },
    ]);
    errors.extend(of_the_system());
    errors
}

/// One error of each kind whose remedy is its own, and one of another.
fn of_the_system() -> Vec<Error> {
    [
        (ErrorKind::NotFound, "cannot read ca.pem"),
        (ErrorKind::PermissionDenied, "/run/egmem/egmem.sock"),
        (ErrorKind::AddrInUse, "listening at tcp://10.0.3.7:7740"),
        (
            ErrorKind::AddrNotAvailable,
            "listening at tcp://10.9.9.9:7740",
        ),
        (ErrorKind::AlreadyExists, "cannot make node1.pem"),
        (ErrorKind::IsADirectory, "cannot read /etc/egmem"),
        (ErrorKind::NotADirectory, "cannot read ca.pem/ca.pem"),
        (ErrorKind::StorageFull, "cannot write trace.svg"),
        (ErrorKind::QuotaExceeded, "cannot write trace.svg"),
        (ErrorKind::ReadOnlyFilesystem, "cannot write /usr/trace.svg"),
        (ErrorKind::OutOfMemory, "cannot start a thread"),
        (ErrorKind::InvalidData, "cannot read egmem.toml"),
        (ErrorKind::Other, "socketpair"),
    ]
    .map(|(kind, what)| Error::System {
        what: what.into(),
        kind,
        detail: kind.to_string(),
    })
    .into()
}

fn damage() -> DamageReport {
    let allocated = Site {
        place: Some("src/main.rs:10:5".into()),
        thread: "main".into(),
        ..Site::default()
    };
    let overrun = Damage {
        kind: DamageKind::Overrun,
        address: 0x7f00_0000_0040,
        block: Some(BlockInfo {
            number: 3,
            offset: 0,
            bytes: 64,
            align: 8,
            allocated,
            freed: None,
        }),
        bytes: Some(WrongBytes {
            first: 64,
            last: 64,
            count: 1,
            expected: 0xfd,
            found: vec![0],
        }),
        seen: Seen::Freed,
        by: None,
    };
    DamageReport {
        damage: vec![overrun],
        more: 1,
    }
}

/// Errors of memory and its users.
fn of_memory() -> Vec<Error> {
    let full = |why| Error::HeapFull {
        requested: 3 << 20,
        align: 4096,
        guards: 0,
        why,
        limit: 64 << 20,
        used: 60 << 20,
        free: 4 << 20,
        largest_free: 2 << 20,
    };
    let mut errors = vec![
        Error::invalid_of("size", "it is 0", "1 byte or more"),
        Error::invalid(
            "publication",
            "it was withdrawn, which gave its memory back",
        ),
        Error::OutOfRange {
            offset: 4096,
            len: 8,
            size: 4096,
        },
        Error::NotAccessible {
            who: Location::Device(1),
            have: Access::Read,
            need: Access::ReadWrite,
        },
        Error::WrongBytes {
            by: Location::Device(0),
            offset: 8,
            expected: 0x0123_4567_89ab_cdef,
            found: 0,
        },
        Error::HeapDamaged {
            report: Box::new(damage()),
        },
    ];
    let rooms = [
        NoRoom::Limit,
        NoRoom::Fragments,
        NoRoom::Alignment,
        NoRoom::Share { most: 1 << 20 },
        NoRoom::SoftLimit { bytes: 32 << 20 },
    ];
    let reasons: Vec<_> = rooms.iter().map(NoRooms::of).collect();
    assert_eq!(reasons, NoRooms::ALL, "examples of HeapFull");
    errors.extend(rooms.map(full));
    errors.push(Error::LimitReached {
        what: "thread caches",
        limit: 1024,
    });
    errors
}

/// Errors of a peer that is not reached or not trusted.
fn of_connecting(peer: &str) -> Vec<Error> {
    let distrusts = [
        (Distrust::User, "user 1001 is not on the list"),
        (
            Distrust::Name,
            "its certificate is for node-a, not for 10.0.3.7",
        ),
        (Distrust::Validity, "its certificate has expired"),
        (Distrust::Revoked, "its certificate is revoked"),
        (
            Distrust::Authority,
            "its certificate is from an authority that is not trusted here",
        ),
        (
            Distrust::RevocationList,
            "the revocation list here has expired",
        ),
        (Distrust::Certificate, "no TLS 1.3 connection to it"),
        (
            Distrust::ByPeer,
            "it does not trust this process: the certificate is revoked",
        ),
    ];
    let causes: Vec<_> = distrusts
        .iter()
        .map(|(cause, _)| Distrusts::of(cause))
        .collect();
    assert_eq!(causes, Distrusts::ALL, "examples of NotTrusted");
    let unreachables = [
        (
            Unreachable::NobodyListens,
            "Connection refused (os error 111)",
        ),
        (
            Unreachable::NoSocket,
            "No such file or directory (os error 2)",
        ),
        (Unreachable::Denied, "Permission denied (os error 13)"),
        (Unreachable::UnknownHost, "Name or service not known"),
        (Unreachable::Network, "No route to host (os error 113)"),
    ];
    let causes: Vec<_> = unreachables
        .iter()
        .map(|(cause, _)| Unreachables::of(cause))
        .collect();
    assert_eq!(causes, Unreachables::ALL, "examples of Unreachable");
    let distrusted = distrusts.map(|(cause, why)| Error::NotTrusted {
        peer: peer.into(),
        cause,
        why: why.into(),
    });
    let unreached = unreachables.map(|(cause, why)| Error::Unreachable {
        peer: peer.into(),
        cause,
        why: why.into(),
    });
    distrusted.into_iter().chain(unreached).collect()
}

/// Errors between processes: trust, connections, what peers said.
fn of_peers() -> Vec<Error> {
    let peer = || "node-a (10.0.3.7:7740)".to_owned();
    let name = || "weights".to_owned();
    let mut errors = vec![
        Error::Insecure {
            address: "10.0.3.7:7740".into(),
        },
        Error::Tls {
            what: "certs/node-a.pem".into(),
            detail: "no certificate in it".into(),
        },
        Error::PeerLost {
            peer: peer(),
            why: "Connection reset by peer (os error 104)".into(),
        },
        Error::Protocol {
            peer: peer(),
            detail: "a frame of 16777217 bytes".into(),
        },
        Error::TimedOut {
            what: "the fetch of weights".into(),
            after: Duration::from_secs(5),
        },
        Error::StillHeld {
            name: name(),
            holders: vec!["node-b".into(), "uid 1000".into()],
        },
        Error::Stale {
            what: "the lease of weights".into(),
            why: "the exporter has restarted".into(),
        },
        Error::DataPlane {
            what: name(),
            peer: peer(),
            detail: "words written here do not arrive there".into(),
        },
        Error::NoCommonHandle {
            reasons: vec!["rank 1 has no IMEX channel".into()],
        },
        Error::Directory {
            directory: "etcd at 10.0.3.9:2379".into(),
            detail: "it does not answer".into(),
        },
    ];
    let mismatches = [
        Mismatch::Owner {
            expected: "node-a".into(),
            found: "node-c".into(),
        },
        Mismatch::Size {
            expected: 4 << 20,
            found: 2 << 20,
        },
        Mismatch::Node {
            expected: NodeId(0),
            found: vec![Location::HostNuma(1)],
        },
    ];
    let kinds: Vec<_> = mismatches.iter().map(Mismatches::of).collect();
    assert_eq!(kinds, Mismatches::ALL, "examples of Mismatched");
    errors.extend(mismatches.map(|what| Error::Mismatched {
        name: name(),
        peer: peer(),
        what: Box::new(what),
    }));
    errors.extend(of_connecting(&peer()));
    let ends = [End::Here, End::There, End::Between];
    let places: Vec<_> = ends.iter().map(Ends::of).collect();
    assert_eq!(places, Ends::ALL, "examples of Import");
    errors.extend(ends.map(|end| Error::Import {
        what: name(),
        peer: peer(),
        end,
        source: Box::new(failed(Call::MemImportFromShareableHandle, Code::INVALID_VALUE).into()),
    }));
    errors
}

/// Every reason for which a peer refuses a request, in the order of the enum.
fn refusals() -> Vec<Refusal> {
    let known = Refusal::WORDS.into_iter().map(|(reason, ..)| reason);
    let reasons: Vec<_> = known
        .chain([Refusal::Other("of_tomorrow".into())])
        .collect();
    let names: Vec<_> = reasons.iter().map(Refusals::of).collect();
    assert_eq!(names, Refusals::ALL, "Refusal::WORDS");
    reasons
}

#[test]
fn the_listing_shows_every_error_as_it_reads() {
    let mut errors = [of_the_machine(), of_memory(), of_peers()].concat();
    errors.extend(refusals().into_iter().map(|reason| Error::Refused {
        peer: "node-a (10.0.3.7:7740)".into(),
        what: "the fetch of weights".into(),
        reason,
        detail: String::new(),
    }));
    let examples: Vec<_> = errors
        .iter()
        .map(|error| Example {
            variant: Errors::of(error),
            reason: match error {
                Error::Refused { reason, .. } => Some(reason.word().into()),
                _ => None,
            },
            text: error.to_string(),
            remedy: error.remedy(),
        })
        .collect();
    compare("driver", "egmem::Error", Errors::ALL, &examples);
}
