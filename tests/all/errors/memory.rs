//! Errors of memory.

use std::io::ErrorKind;

use egmem::driver::{Access, Call, Code, CudaVersion, Location, NodeId};
use egmem::heap::debug::{BlockInfo, Damage, DamageKind, DamageReport, Seen, Site, WrongBytes};
use egmem::{DriverError, Error, NoRoom};

use crate::errors::listing::{compare, expect_all};

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
        Error::TooManyMappings {
            mappings: 65_528,
            limit: 65_530,
            source: failed(Call::MemSetAccess, Code::OUT_OF_MEMORY),
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
        Error::NoPeerAccess {
            gpu: 2,
            owner: 0,
            source: failed(Call::MemSetAccess, Code::INVALID_DEVICE),
        },
        Error::ContextLost {
            device: 0,
            source: failed(Call::StreamSynchronize, Code::ILLEGAL_ADDRESS),
        },
        Error::ContextLost {
            device: 0,
            source: failed(Call::CtxPushCurrent, Code::INVALID_CONTEXT),
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
    let mut report = DamageReport::default();
    report.damage = vec![overrun];
    report.more = 1;
    report
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
        Error::Cancelled {
            done: 3 << 30,
            total: 8 << 30,
        },
        Error::StillHeld {
            name: "weights".into(),
            holders: vec!["node-b".into(), "uid 1000".into()],
        },
        Error::CursorDamaged {
            what: "the head of a ring",
            found: u64::MAX,
            least: 40,
            most: 1064,
        },
    ];
    let rooms = [
        NoRoom::Limit,
        NoRoom::Fragments,
        NoRoom::Alignment,
        NoRoom::Share { most: 1 << 20 },
        NoRoom::SoftLimit { bytes: 32 << 20 },
    ];
    expect_all("driver/error/heap.rs", "NoRoom", &rooms);
    errors.extend(rooms.map(full));
    errors
}

#[test]
fn the_listing_shows_every_error_as_it_reads() {
    let errors = [of_the_machine(), of_memory()].concat();
    let file = "driver/error/mod.rs";
    compare("driver", "egmem", file, &errors, |_| None);
}

/// Returns errors of every kind that contains text from elsewhere.
pub fn with_text(t: &str) -> Vec<Error> {
    let s = || t.to_owned();
    let list = || vec![s(), s()];
    let system = || Error::failed(s(), s());
    vec![
        Error::NoDriver { detail: s() },
        Error::MissingLibrary {
            library: "lib",
            detail: s(),
        },
        Error::invalid("argument", t),
        Error::ProbeDied {
            what: s(),
            how: s(),
        },
        system(),
        Error::Topology { detail: s() },
        Error::invalid_of("argument", t, t),
        Error::StillHeld {
            name: s(),
            holders: list(),
        },
    ]
}
