//! Extended GPU Memory: the CPU's memory of NVIDIA Grace-Hopper and Grace-Blackwell machines, pinned on a
//! chosen NUMA node, read and written by the CPU and by every GPU.
//!
//! The same calls work on x86 machines with discrete GPUs, where the link is PCIe, and on no GPU at all
//! against a simulated driver.
//!
//! ```text
//! discover ─▶ choose a node ─▶ create physical memory ─▶ map ─▶ grant access ─▶ use
//! Topology    Gpu::host_node   vmm::PhysicalMemory       vmm::Mapping           CPU: CpuView
//!                              └──────────── Buffer: all of it in one call ─┘   GPU: device_ptr
//!                              └──────────── Pool: the same, stream-ordered ─┘
//! ```
//!
//! ```
//! use egmem::{Buffer, Driver, Machine, Topology, proof::Prover};
//!
//! // CUDA where there is a GPU, a simulated four-socket GH200 node elsewhere.
//! let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200x4()))?;
//! let topology = Topology::discover(&driver)?;
//!
//! for gpu in topology.gpus() {
//!     // 64 MiB on the GPU's own host node, for the CPU and for every GPU.
//!     let buffer = Buffer::on(gpu.host_node()?)
//!         .access_by(topology.gpus())
//!         .bytes(64 << 20)
//!         .allocate(&driver)?;
//!     buffer.write_at(0, &[1.0_f32, 2.0, 3.0])?; // by the CPU
//!     Prover::new(&driver, gpu.ordinal)?.read(&buffer)?; // by a kernel on the GPU
//! }
//! # Ok::<(), egmem::Error>(())
//! ```
//!
//! # Two ways to allocate
//! - [`Buffer`] and [`vmm`]: `cuMemCreate` and its family. Shareable; in units of 2 MiB.
//! - [`Pool`]: `cuMemPoolCreate` or `cudaMemPoolCreate`, then allocations in the order of a stream.
//!
//! And on top of the first, [`Heap`]: blocks of any size in nanoseconds, without a driver call.
//!
//! # When something is refused
//! Every error says what failed and why; [`Error::remedy`] says what to do. [`capability`] finds out by
//! trials which features work on this machine, and the command `egmem doctor` shows the result as a table.
//!
//! [`Error`] has the failures of memory. `share::Error`, `kv::Error` and `exchange::Error` have their own failures, and each
//! carries the error of the layer below: `?` converts, and `memory()` returns the [`Error`] inside.
//!
//! # Features
//!
//! | feature | default | what for |
//! |---|---|---|
//! | `hwloc` | no | topology through hwloc, and lstopo's XML; without it, what the driver and the kernel report |
//! | `allocator-api2` | yes | a heap as the allocator of collections, with allocator-api2's trait |
//! | `nightly` | no | the same with std's trait; needs a nightly compiler |
//! | `pictures` | no | drawings of which parts of a heap are used, as SVG |
//! | `async` | no | copies and fills as futures ([`Transfer`]), for any async runtime |
//! | `simulator` | yes | `Driver::simulated` and `Machine`; without it, the CUDA driver and your own backends |
//! | `ledger` | yes | whose memory it is, over all processes of a user: tables, drawings, `egmem ps` |
//! | `nvml` | no | GPU memory of each process in the ledger's reports, from NVML if it is installed |
//! | `shapes` | yes | vectors that grow in place at one address; ranges in stripes over nodes and GPUs; queues between CPU and GPUs; output of kernels |
//! | `doctor` | no | what works on this machine: the report of `egmem doctor`, with trials in child processes |
//! | `share` | yes | sharing between processes of one machine, as POSIX fds over Unix sockets |
//! | `kv` | no | a KV-cache tier for serving engines: pages by key in host memory, copied to and from GPUs in batches |
//! | `interop` | no | memory in cudarc's copies and launches, with the CUDA version that the program chose for cudarc |
//! | `exchange` | no | sharing by name, also between nodes: server, client, leases; mutual TLS; the memory of all ranks |
//! | `certs` | no | creating certificates for the exchange |
//! | `service` | no | a node's allocator service |
//! | `etcd` | no | finding exporters through etcd |
//!
//! # Non-goals
//! Managed (unified) memory beside [`pinned::ManagedMemory`], multicast objects, Windows, and kernels beyond those that prove
//! memory, copy pages of a KV-cache tier, and serve rings and appenders.
#![deny(missing_docs)]

/// The crate that defines the `Allocator` trait of [`Heap`]: its `Vec` and `Box`, in the matching version.
#[cfg(feature = "allocator-api2")]
pub use allocator_api2;
#[cfg(feature = "simulator")]
#[doc(inline)]
pub use egmem_core::Machine;
#[doc(inline)]
pub use egmem_core::error::{DriverError, Explain, Explained, Language, NoRoom};
#[cfg(feature = "interop")]
#[doc(inline)]
pub use egmem_core::interop;
#[doc(inline)]
pub use egmem_core::{
    Backing, Buffer, BufferOptions, Driver, Error, Event, GrowingBuffer, Growth, GrowthState,
    Memory, Pool, PoolBuffer, Progress, Result, Stream, Topology, Transfer, backing, capability,
    kernels, pinned, pool, proof, size, text, topology, vmm,
};
#[cfg(feature = "doctor")]
#[doc(inline)]
pub use egmem_doctor::host;
#[cfg(feature = "certs")]
#[doc(inline)]
pub use egmem_exchange::certs;
#[doc(inline)]
pub use egmem_heap::{self as heap, Block, Heap, HeapOptions};
#[cfg(feature = "kv")]
#[doc(inline)]
pub use egmem_kv as kv;
#[cfg(feature = "service")]
#[doc(inline)]
pub use egmem_service as service;
#[cfg(feature = "shapes")]
#[doc(inline)]
pub use egmem_shapes as shapes;

// Everything else in these crates and modules is for egmem's own crates alone (docs/stability.md).

/// The driver's calls one by one, on CUDA or simulated: the trait [`Backend`](driver::Backend), its types, and the
/// simulator.
pub mod driver {
    #[doc(inline)]
    pub use egmem_core::driver::{
        Access, AccessDesc, AllocationProps, Backend, Call, CaptureMode, Code, CudaVersion,
        DeviceAttribute, DevicePtr, Driver, EventHandle, FabricHandle, FunctionHandle,
        GranularityKind, HandleType, HandleTypes, IpcEventHandle, LaunchDims, Location, MemcpyDesc,
        ModuleHandle, NodeId, P2pAttribute, PhysicalHandle, PointerAttribute, PoolApi,
        PoolAttribute, PoolCalls, PoolHandle, PoolProps, PoolPtrExport, ShareableHandle,
        SimulatedHost, SimulatedNode, StreamHandle, versions,
    };
    #[cfg(feature = "simulator")]
    #[doc(inline)]
    pub use egmem_core::driver::{Machine, sim};
    #[doc(hidden)] // for the Python package
    pub use egmem_core::fork::PerProcess;
}

/// Reports what works on this machine, why the rest does not, and what to do about it.
///
/// [`Report::gather`](doctor::Report::gather) collects everything that `egmem doctor` shows. A
/// [`Prober`](doctor::Prober) runs the trials: [`Children`](doctor::Children) in child processes, because drivers have
/// crashed inside such calls, [`InProcess`](doctor::InProcess) in this process.
#[cfg(feature = "doctor")]
pub mod doctor {
    #[doc(inline)]
    pub use egmem_doctor::{
        Advice, Answer, AutoBacking, Children, DriverFacts, GpuHints, InProcess, Prober, Reason,
        Report, Survey, Tried, answer_trials, measure, survey, to_text,
    };
}

/// The traits of all memory, and the CPU's safe access to it.
pub mod memory {
    #[doc(inline)]
    pub use egmem_core::memory::{
        AccessChecks, CpuMemory, CpuView, Engine, GrantUse, Memory, ParallelCopy,
    };
}

/// The ledger: every live allocation of this process, and whose memory is at an address.
///
/// Each allocation has an entry exactly as long as it lives: its size, node or GPU, path, access, age, name, and
/// where it was exported to or imported from. Blocks of a heap have none, since their chunks have.
pub mod ledger {
    #[doc(inline)]
    pub use egmem_core::ledger::{
        AllocPath, Allocation, BACKTRACES, CallSite, Foreign, Imported, Label, Located,
        MAX_PARTIES, MappedAt, Party, all_allocations, allocations, called_from,
        capture_backtraces, captures_backtraces, count, locate,
    };
    #[cfg(feature = "ledger")]
    #[doc(inline)]
    pub use egmem_core::ledger::{MAX_TIERS, TierStats, TierUse};
    #[cfg(feature = "ledger")]
    #[doc(inline)]
    pub use egmem_ledger::{
        Cause, Exporter, GpuUse, Holder, Holders, Importer, Kept, LEAKS, Ledger, MAX_HOLDERS,
        MAX_TEXT, NodeUse, NvmlGpu, NvmlProcess, Offer, OnGpu, PS, Part, Process, Report, Silent,
        Total, Why, offer, processes, report_leaks_at_exit,
    };
}

/// Streams and events, and the copies and fills that run on them.
pub mod stream {
    #[doc(inline)]
    pub use egmem_core::stream::{BatchCopy, NotStarted, Started, TransferError, TransferFailed};

    #[doc(inline)]
    pub use crate::{Event, Stream, Transfer};
}

/// Memory of other processes of this machine, as POSIX fds over Unix sockets.
#[cfg(feature = "share")]
pub mod share {
    #[cfg(fuzzing)]
    #[doc(hidden)]
    pub use egmem_share::fuzzing;
    #[doc(inline)]
    pub use egmem_share::{
        BootId, Channel, Closer, Credentials, DEFAULT_TIMEOUT, Description, Distrust, Error,
        GrowingImport, Identity, ImportOptions, ImportedBuffer, ImportedParts, InstanceId,
        LentPoolBuffer, Link, Listener, MAX_PARTS, Offer, Origin, Part, PartHandles, Peers, Result,
        Shareable, Shared, Unreachable, best_handle_types, queue,
    };
}

/// Memory exchanged by name, within a machine and between machines.
#[cfg(feature = "exchange")]
pub mod exchange {
    #[cfg(feature = "certs")]
    #[doc(inline)]
    pub use egmem_exchange::certs;
    #[cfg(fuzzing)]
    #[doc(hidden)]
    pub use egmem_exchange::fuzzing;
    #[doc(inline)]
    pub use egmem_exchange::{
        Absence, Address, Client, ClientOptions, CreateOptions, End, Error, FetchOptions, Follow,
        Followed, LeaseState, Leased, Limits, MAX_PATTERNS, Mismatch, Namespaces, Owner, PeerList,
        PeerName, Proof, Reconnect, Refusal, RemoteBuffer, Result, Security, Server, Tls, TlsFiles,
        TlsPem, blocking, directory, group, protocol, server, tls,
    };
}

/// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles and runs the examples of a documentation page.
#[cfg(all(doctest, feature = "share", feature = "allocator-api2"))]
#[doc = include_str!("../docs/heap.md")]
struct HeapPage;

/// See [`HeapPage`].
#[cfg(all(doctest, feature = "shapes"))]
#[doc = include_str!("../docs/shapes.md")]
struct ShapesPage;

/// See [`HeapPage`].
#[cfg(all(doctest, feature = "kv"))]
#[doc = include_str!("../docs/kv.md")]
struct KvPage;

/// See [`HeapPage`].
#[cfg(all(doctest, feature = "ledger"))]
#[doc = include_str!("../docs/ledger.md")]
struct LedgerPage;

/// See [`HeapPage`].
#[cfg(doctest)]
#[doc = include_str!("../docs/coming-from.md")]
struct ComingFromPage;

/// See [`HeapPage`].
#[cfg(doctest)]
#[doc = include_str!("../docs/async-copies.md")]
struct AsyncCopiesPage;

/// See [`HeapPage`].
#[cfg(doctest)]
#[doc = include_str!("../docs/host-memory.md")]
struct HostMemoryPage;

/// See [`HeapPage`].
#[cfg(doctest)]
#[doc = include_str!("../docs/peer-memory.md")]
struct PeerMemoryPage;

/// See [`HeapPage`].
#[cfg(all(doctest, feature = "exchange"))]
#[doc = include_str!("../docs/sharing.md")]
struct SharingPage;
