/*
 * egmem for C: Extended GPU Memory, the CPU's memory that is pinned on a chosen NUMA node and that the CPU and every GPU
 * read and write. docs/c.md is the guide; egmem.hpp is for C++.
 *
 * Every call returns a status. EGM_OK is 0. A result is written only if the call succeeds. The place of a result overlaps no
 * other argument's memory; of two results of one call at one place, one overwrites the other, whose object or text is lost. A
 * handle is destroyed by the function with its name and _destroy; each function says which threads may call it and how long
 * its results are valid.
 * The library never unwinds into the program, and never ends the process.
 *
 * Made by cbindgen from src/capi: do not change it by hand.
 */

#ifndef EGMEM_H
#define EGMEM_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/// The major version of this interface in the upper 16 bits, the minor one in the lower. A program that was built for
/// a version runs with a library of the same major version and the same or a higher minor version. These are not the
/// library's numbers: a new soname has a new major version.
#define EGM_ABI_VERSION 1

/// A GPU's own memory; `id` is its CUDA ordinal.
#define EGM_LOCATION_DEVICE 1

/// The CPU, and its memory on no particular node.
#define EGM_LOCATION_HOST 2

/// A host NUMA node; `id` is the operating system's number.
#define EGM_LOCATION_HOST_NUMA 3

/// No access.
#define EGM_ACCESS_NONE 0

/// Read only.
#define EGM_ACCESS_READ 1

/// Read and write.
#define EGM_ACCESS_READ_WRITE 3

/// Shareable as a POSIX file descriptor, with processes of the machine.
#define EGM_HANDLE_POSIX_FD 1

/// Shareable as a fabric handle, with the nodes of an IMEX domain.
#define EGM_HANDLE_FABRIC 8

/// For `backing`: the default of the type.
#define EGM_BACKING_DEFAULT 0

/// Memory that the driver creates on the node: cuMemCreate.
#define EGM_BACKING_DRIVER 1

/// Pages of the process on the node, which the driver pins chunk by chunk: cuMemHostRegister. Other code's copies by the
/// driver, of addresses alone, must end where a chunk ends.
#define EGM_BACKING_REGISTERED 2

/// Registered pages where they are as good or better, else the driver's memory.
#define EGM_BACKING_AUTO 3

/// The link between a GPU and the CPU is unknown.
#define EGM_LINK_UNKNOWN 0

/// The link between a GPU and the CPU is NVLink-C2C: coherent.
#define EGM_LINK_NVLINK_C2C 1

/// The link between a GPU and the CPU is PCI Express.
#define EGM_LINK_PCIE 2

/// For `flags`: shareable as widely as the machine allows.
#define EGM_SHAREABLE 1

/// For `flags`: ask the driver for more memory than the node has free.
#define EGM_OVERCOMMIT 2

/// For `flags` of a buffer: with room for the proof that importers see the same memory.
#define EGM_ROOM_FOR_PROBES 4

/// For `flags` of a heap: overwrite blocks with zeros when they are freed.
#define EGM_SCRUB_ON_FREE 8

/// For `flags` of a heap: an allocation that would fail waits for the GPU work that blocks were freed after.
#define EGM_WAIT_FOR_GPU 16

/// For `flags` of a heap: find writes beside blocks and to freed blocks. For tests: it is slow.
#define EGM_DEBUG 32

/// For `flags` of a client: connect to other machines without TLS. Anyone on the network path can read the handles.
#define EGM_PLAIN_ANYWHERE 64

/// For `flags` of a client: memory is fetched read-only.
#define EGM_READ_ONLY 128

/// For `flags` of a creation: memory that this peer created before with the same size and node will do.
#define EGM_EXIST_OK 256

/// A side that writes records.
#define EGM_RING_PRODUCER 1

/// A side that reads records.
#define EGM_RING_CONSUMER 2

/// The result of a call: ::EGM_OK, or the reason for a failure. The values never change; later versions may add some.
///
/// egm_last_error_message() and egm_last_error_remedy() say more.
enum egm_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /// The call succeeded.
    EGM_OK = 0,
    /// An argument is invalid: a null pointer, a size of 0, a pointer that is no block, a string that is not UTF-8.
    EGM_INVALID_ARGUMENT = 1,
    /// A range extends beyond its memory.
    EGM_OUT_OF_RANGE = 2,
    /// There is no usable CUDA driver library.
    EGM_NO_DRIVER = 3,
    /// The driver is too old for the request.
    EGM_DRIVER_TOO_OLD = 4,
    /// A library, or a function in it, was not found.
    EGM_MISSING_LIBRARY = 5,
    /// A driver call failed; egm_last_error_cuda_code() returns its result.
    EGM_DRIVER_FAILED = 6,
    /// A GPU's context is lost to an earlier fault. Only a new process gets a new one.
    EGM_CONTEXT_LOST = 7,
    /// The machine, its GPU or its driver does not support the request.
    EGM_UNSUPPORTED = 8,
    /// There is no IMEX channel, so no fabric handles.
    EGM_NO_IMEX_CHANNEL = 9,
    /// The driver had no memory left.
    EGM_OUT_OF_MEMORY = 10,
    /// The request exceeds the free memory of its host nodes and was not passed to the driver.
    EGM_NODE_TOO_FULL = 11,
    /// A heap has no room and may not have more memory.
    EGM_HEAP_FULL = 12,
    /// The address space has no hole for a reservation.
    EGM_OUT_OF_ADDRESSES = 13,
    /// Exports, imports and CPU mappings of a memory are too many.
    EGM_TOO_MANY_REFERENCES = 14,
    /// A GPU's host node is unknown: choose one.
    EGM_NODE_UNKNOWN = 15,
    /// There is no such NUMA node.
    EGM_NO_SUCH_NODE = 16,
    /// There is no such GPU.
    EGM_NO_SUCH_GPU = 17,
    /// A GPU cannot access the memory of another one.
    EGM_NO_PEER_ACCESS = 18,
    /// A location lacks the access that the operation needs.
    EGM_NOT_ACCESSIBLE = 19,
    /// Bytes read back differ from the bytes written.
    EGM_WRONG_BYTES = 20,
    /// The operating system refused an operation.
    EGM_SYSTEM = 21,
    /// The machine's topology cannot be read.
    EGM_TOPOLOGY = 22,
    /// Something is to be given back but is still in use: a heap with blocks.
    EGM_STILL_HELD = 23,
    /// A heap in debug mode has found damage, or a ring a counter that cannot be.
    EGM_DAMAGED = 24,
    /// A probe in a child process died.
    EGM_PROBE_DIED = 25,
    /// A peer is not trusted, or does not trust this process.
    EGM_NOT_TRUSTED = 40,
    /// No connection to a peer was established.
    EGM_UNREACHABLE = 41,
    /// A connected peer has disconnected, fallen silent, or become unreachable.
    EGM_PEER_LOST = 42,
    /// A peer violated the protocol.
    EGM_PROTOCOL = 43,
    /// An operation did not finish in time.
    EGM_TIMED_OUT = 44,
    /// Handles would be sent unencrypted over a network.
    EGM_INSECURE = 60,
    /// Certificates, keys or their files cannot be used, or only one end of a connection uses TLS.
    EGM_TLS = 61,
    /// A server understood a request and refused it.
    EGM_REFUSED = 62,
    /// Memory under a name is not as requested.
    EGM_MISMATCHED = 63,
    /// Handles or leases belong to an earlier run of their exporter.
    EGM_STALE = 64,
    /// Memory that a peer shares cannot be imported here.
    EGM_IMPORT_FAILED = 65,
    /// Memory is imported, but the two ends do not see the same bytes.
    EGM_DATA_PLANE = 66,
    /// No handle type works for all participants.
    EGM_NO_COMMON_HANDLE = 67,
    /// A limit of this process is reached.
    EGM_LIMIT_REACHED = 68,
    /// The directory cannot look a name up.
    EGM_DIRECTORY = 69,
    /// Another failure, which this version has no status for.
    EGM_OTHER = 254,
    /// A defect of the library. Please report it with the message.
    EGM_INTERNAL = 255,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum egm_status egm_status;
#else
typedef int32_t egm_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/// Memory at one address for the CPU and the GPUs: allocated here, received from another process, fetched from a
/// server, or from a pool. Any thread may use it, several at a time, except where a function says otherwise.
typedef struct egm_buffer egm_buffer;

/// A connection to another process of this user, which sends and receives memory. Any thread may use it: one sends while
/// another waits to receive; calls of the same direction take turns.
///
/// Any error except a timeout before the first byte closes the connection.
typedef struct egm_channel egm_channel;

/// A connection to a server, from which memory is fetched by name, and which creates memory. Any thread may use it, several
/// at a time. It has a thread of its own.
typedef struct egm_client egm_client;

/// A driver: CUDA's, or a simulated one. Everything that was made from it keeps it alive, so it may be destroyed
/// before them. Any thread may use it, several at a time.
typedef struct egm_driver egm_driver;

/// A point in a stream's work. Any thread may use it, several at a time.
typedef struct egm_event egm_event;

/// A heap: suballocates blocks of memory on a node, for the CPU and the GPUs. Any thread may use it, several at a
/// time.
typedef struct egm_heap egm_heap;

/// A Unix socket that other processes of this user connect to. Any thread may use it, several at a time.
typedef struct egm_listener egm_listener;

/// A memory pool, whose allocations happen in the order of a stream. Any thread may use it, several at a time.
typedef struct egm_pool egm_pool;

/// One side of a ring: a bounded queue of records of one size, with one producer and one consumer, each a thread or a kernel.
/// One thread at a time uses it. docs/shapes.md describes rings; the functions for kernels are in egmem_ring.cuh.
typedef struct egm_ring_side egm_ring_side;

/// A stream: orders the work of one GPU. Any thread may use it, several at a time.
typedef struct egm_stream egm_stream;

/// The GPUs and host nodes of a machine, read once. Any thread may use it, several at a time.
typedef struct egm_topology egm_topology;

/// Where memory lies, or where accesses come from. The numbers are those of CUDA's CUmemLocation.
typedef struct egm_location {
    /// One of `EGM_LOCATION_…`.
    int32_t kind;
    /// A GPU's ordinal or a node's number; 0 for ::EGM_LOCATION_HOST.
    int32_t id;
} egm_location;

/// Access for one location.
typedef struct egm_grant {
    /// The location that gets access; ::EGM_LOCATION_HOST stands for the CPU.
    struct egm_location who;
    /// One of `EGM_ACCESS_…`.
    int32_t access;
} egm_grant;

/// Options of a buffer. Set `struct_size` to sizeof(egm_buffer_options), and the fields that you do not need to 0.
typedef struct egm_buffer_options {
    /// The size of this structure, by which the library knows the program's version.
    size_t struct_size;
    /// Where the memory lies.
    struct egm_location location;
    /// Its size in bytes, at least 1; allocated in units of 2 MiB.
    uint64_t bytes;
    /// `grant_count` grants. A null pointer: the CPU, and every GPU that can reach the memory, read and write.
    /// Otherwise the CPU, unless a grant says something else, and the GPUs listed.
    const struct egm_grant *grants;
    /// The number of grants.
    size_t grant_count;
    /// The size of the parts whose access can be changed alone; 0: one part.
    uint64_t chunk;
    /// Bits of `EGM_HANDLE_…`: how the memory may be shared.
    uint32_t handle_types;
    /// Bits: ::EGM_SHAREABLE, ::EGM_OVERCOMMIT, ::EGM_ROOM_FOR_PROBES.
    uint32_t flags;
    /// The memory's name in the ledger; may be null.
    const char *label;
    /// What the memory is: one of `EGM_BACKING_…`; 0: ::EGM_BACKING_DRIVER.
    int32_t backing;
    /// Must be 0: it ends the structure without padding, so that a field of a later version lies beyond.
    uint32_t reserved;
} egm_buffer_options;

/// Options of a client. Set `struct_size` to sizeof(egm_client_options), and the fields that you do not need to 0.
typedef struct egm_client_options {
    /// The size of this structure, by which the library knows the program's version.
    size_t struct_size;
    /// The authority's certificate, a file (ca.pem). It, `cert` and `key` go together; without them there is no TLS,
    /// which only Unix sockets and loopback addresses allow.
    const char *ca;
    /// This peer's certificate, a file.
    const char *cert;
    /// Its key, a file.
    const char *key;
    /// Revocation lists, a file; may be null.
    const char *crl;
    /// The name that the server's certificate must have; null: the address.
    const char *expect_peer;
    /// How long connecting may take, and then each request until its answer, in milliseconds; 0: 10 s.
    uint64_t timeout_ms;
    /// A user besides your own whose server may be used over a Unix socket; 0: root's.
    uint32_t server_user;
    /// Bits: ::EGM_PLAIN_ANYWHERE, ::EGM_READ_ONLY.
    uint32_t flags;
    /// The owner that fetched memory must have: a certificate's name, "uid:1000", "local", or "@server" for the
    /// server's own. Null: any. A peer that created the name first could read and write the data that this process
    /// stores there.
    const char *expect_owner;
} egm_client_options;

/// Options of memory that a server creates. Set `struct_size` to sizeof(egm_create_options), and the fields that you do not
/// need to 0.
typedef struct egm_create_options {
    /// The size of this structure, by which the library knows the program's version.
    size_t struct_size;
    /// The host node: of kind ::EGM_LOCATION_HOST_NUMA; of kind 0: one of the server's choice.
    struct egm_location location;
    /// `share_count` peers that may fetch the memory besides this one: a certificate's name, "uid:1000", or "*" for all.
    const char *const *share_with;
    /// The number of peers.
    size_t share_count;
    /// Bits: ::EGM_EXIST_OK.
    uint32_t flags;
    /// Must be 0: it ends the structure without padding, so that a field of a later version lies beyond.
    uint32_t reserved;
} egm_create_options;

/// Memory under a name at a server.
typedef struct egm_entry {
    /// Its size in bytes.
    uint64_t bytes;
    /// Where its first part lies.
    struct egm_location location;
    /// The number of leases on it.
    uint32_t leases;
    /// 0.
    uint32_t reserved;
} egm_entry;

/// A GPU. egm_topology_json() has the rest: its name, its UUID, its links to other GPUs.
typedef struct egm_gpu {
    /// The CUDA ordinal.
    int32_t ordinal;
    /// The nearest host node, where its Extended GPU Memory belongs; -1 if unknown.
    int32_t host_node;
    /// The NUMA node that its own memory forms; -1 if it forms none.
    int32_t memory_node;
    /// The compute capability's major part; 0 if unknown.
    int32_t compute_major;
    /// The compute capability's minor part.
    int32_t compute_minor;
    /// One of `EGM_LINK_…`.
    int32_t link;
    /// 1 if GPU and CPU share page tables, otherwise 0.
    int32_t coherent;
    /// 0.
    int32_t reserved;
    /// Its own memory in bytes.
    uint64_t memory;
} egm_gpu;

/// A host NUMA node.
typedef struct egm_node {
    /// The operating system's number.
    int32_t id;
    /// The number of GPUs for which it is the nearest.
    int32_t gpus;
    /// Its memory in bytes; 0 if unknown.
    uint64_t memory_total;
    /// Bytes that an allocation could get when the topology was read; UINT64_MAX if unknown.
    uint64_t memory_free;
} egm_node;

/// The ranks of a job: see egm_group_gather().
typedef struct egm_ranks {
    /// This process's rank, below `size`.
    uint32_t rank;
    /// The number of ranks, at most 1024.
    uint32_t size;
    /// Sends `bytes` bytes at `own` to all ranks, and writes those of all ranks to `all`, in the order of ranks, as
    /// `MPI_Allgather` does. All ranks call it equally often, with the same `bytes`. Returns 0, or another number for a
    /// failure; an exception of C++ that leaves it ends the process. Called by the thread that calls egm_group_gather().
    int32_t (*all_gather)(void *context, const void *own, void *all, size_t bytes);
    /// The first argument of each call.
    void *context;
    /// A secret of all ranks, of 16 bytes or more, with which each gather is sealed; or null: then whoever reads what
    /// `all_gather` sends can map fabric memory.
    const char *secret;
} egm_ranks;

/// Options of a heap. Set `struct_size` to sizeof(egm_heap_options), and the fields that you do not need to 0.
typedef struct egm_heap_options {
    /// The size of this structure, by which the library knows the program's version.
    size_t struct_size;
    /// Where the memory lies.
    struct egm_location location;
    /// As in egm_buffer_options.
    const struct egm_grant *grants;
    /// The number of grants.
    size_t grant_count;
    /// The most memory that the heap may have, in bytes; 0: the node's.
    uint64_t limit;
    /// How much memory the heap adds at a time, in bytes; 0: 64 MiB.
    uint64_t chunk;
    /// How much memory the heap has from the start, in bytes.
    uint64_t reserve;
    /// How many bytes a background thread keeps free in advance.
    uint64_t grow_ahead;
    /// How many bytes of blocks above 2 KiB a thread may cache; 0: 4 MiB. UINT64_MAX: none.
    uint64_t thread_cache;
    /// Bits of `EGM_HANDLE_…`: how its blocks may be shared.
    uint32_t handle_types;
    /// Bits: ::EGM_SHAREABLE, ::EGM_OVERCOMMIT, ::EGM_SCRUB_ON_FREE, ::EGM_WAIT_FOR_GPU, ::EGM_DEBUG.
    uint32_t flags;
    /// The name of the heap's memory in the ledger; may be null.
    const char *label;
    /// What the heap's memory is: one of `EGM_BACKING_…`; 0: ::EGM_BACKING_AUTO.
    int32_t backing;
    /// Must be 0: it ends the structure without padding, so that a field of a later version lies beyond.
    uint32_t reserved;
} egm_heap_options;

/// A heap's statistics at one moment, in bytes and numbers. Set `struct_size` to sizeof(egm_heap_stats) before the
/// call.
typedef struct egm_heap_stats {
    /// The size of this structure, by which the library knows the program's version.
    size_t struct_size;
    /// Blocks in use.
    uint64_t live_blocks;
    /// Bytes of these blocks. A block of up to 2 KiB counts with its usable size.
    uint64_t live;
    /// Bytes taken by these blocks and the deferred ones, including rounding.
    uint64_t used;
    /// Bytes in threads' caches.
    uint64_t cached;
    /// Freed blocks whose GPU work has not ended.
    uint64_t deferred_blocks;
    /// Free bytes outside slabs of small blocks.
    uint64_t free;
    /// The largest free range.
    uint64_t largest_free;
    /// The memory that the heap has.
    uint64_t backed;
    /// The most memory that the heap ever had.
    uint64_t backed_high_water;
    /// The most memory that the heap may have.
    uint64_t limit;
    /// The size of the heap's tables, in the process's ordinary memory; with the most that the table of this
    /// interface can have.
    uint64_t metadata;
    /// Blocks allocated since the heap was made.
    uint64_t allocated_blocks;
    /// Blocks freed since then.
    uint64_t freed_blocks;
    /// Allocations that failed.
    uint64_t failed;
} egm_heap_stats;

/// Options of a ring. Set `struct_size` to sizeof(egm_ring_options), and the fields that you do not need to 0.
typedef struct egm_ring_options {
    /// The size of this structure, by which the library knows the program's version.
    size_t struct_size;
    /// Where the memory lies: on a host node if the CPU has a side.
    struct egm_location location;
    /// The size of a record in bytes, at least 1.
    uint64_t record_bytes;
    /// The most records that the ring holds; 0: as many as 2 MiB have room for. All together have at most 2 GiB.
    uint64_t records;
    /// `gpu_count` ordinals of the GPUs that may read and write. A null pointer: every GPU that can reach the memory.
    const int32_t *gpus;
    /// The number of ordinals.
    size_t gpu_count;
    /// Bits: ::EGM_SHAREABLE, so that a side can be sent to another process.
    uint32_t flags;
    /// The memory's name in the ledger; may be null.
    const char *label;
} egm_ring_options;

/// What a side of a ring knows.
typedef struct egm_ring_info {
    /// The size of a record in bytes.
    uint64_t record_bytes;
    /// The most records that the ring holds.
    uint64_t records;
    /// How many records were committed, or released, by this side and by those that had it before in other processes.
    uint64_t count;
} egm_ring_info;

/// Options of a pool. Set `struct_size` to sizeof(egm_pool_options), and the fields that you do not need to 0.
typedef struct egm_pool_options {
    /// The size of this structure, by which the library knows the program's version.
    size_t struct_size;
    /// Where the memory lies.
    struct egm_location location;
    /// `gpu_count` ordinals of the GPUs that may read and write. A null pointer: every GPU for a host node's pool,
    /// only the owner for a GPU's.
    const int32_t *gpus;
    /// The number of ordinals.
    size_t gpu_count;
    /// The most bytes that it may hold; 0 leaves it to the driver.
    uint64_t max_size;
    /// How many free bytes it keeps when a stream or an event is synchronised; UINT64_MAX keeps all.
    uint64_t release_threshold;
    /// Bits of `EGM_HANDLE_…`: how it may be shared.
    uint32_t handle_types;
    /// Bits: ::EGM_OVERCOMMIT.
    uint32_t flags;
    /// The name of its allocations in the ledger; may be null.
    const char *label;
} egm_pool_options;

/// The bytes of a pool.
typedef struct egm_pool_stats {
    /// Held from the system now.
    uint64_t reserved;
    /// The most that was ever held.
    uint64_t reserved_high;
    /// Allocated now.
    uint64_t used;
    /// The most that was ever allocated.
    uint64_t used_high;
} egm_pool_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// Returns ::EGM_ABI_VERSION of the library that runs. Any thread may call this.
uint32_t egm_abi_version(void);

/// Returns the library's version, such as "0.1.0". The text is valid for ever. Any thread may call this.
const char *egm_version(void);

/// Tells the ledger the line of the program that the thread's next call has: one of egm_buffer_create(),
/// egm_buffer_near(), egm_heap_create(), egm_pool_alloc(), egm_channel_receive(), egm_client_fetch(),
/// egm_group_gather(), egm_ring_create(), egm_ring_receive(). In C, the macros at the end of this header call it, and in C++ egmem.hpp does; a binding of another
/// language calls it itself.
/// `function` may be null. A null `file` takes the line back.
///
/// Contract:
/// `file` and `function` are null or end with a zero byte, and stay valid until that call returns. Any thread may call
/// this.
void egm_call_site(const char *file,
                   uint32_t line,
                   const char *function);

/// Frees a text that a call has given to the caller. A null pointer is left alone.
///
/// Contract:
/// `text` is null, or such a text that was not freed yet. Any thread may call this.
egm_status egm_string_free(char *text);

/// Allocates, maps and grants memory. If a step fails, the steps before it are undone.
///
/// Fails with ::EGM_INVALID_ARGUMENT, ::EGM_NO_SUCH_NODE, ::EGM_NO_SUCH_GPU, ::EGM_NODE_TOO_FULL,
/// ::EGM_OUT_OF_MEMORY, and others of the driver.
///
/// Contract:
/// `driver` is null or a driver; `options` is null or points to as many bytes as its first field says; `out` is null
/// or may be written. Any thread may call this.
egm_status egm_buffer_create(const struct egm_driver *driver,
                             const struct egm_buffer_options *options,
                             struct egm_buffer **out);

/// Allocates `bytes` on the host node of a GPU, for the CPU and every GPU.
///
/// Fails as egm_buffer_create(), and with ::EGM_NODE_UNKNOWN if the GPU's node is not known.
///
/// Contract:
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
egm_status egm_buffer_near(const struct egm_driver *driver, int32_t gpu, uint64_t bytes, struct egm_buffer **out);

/// Returns the address: the same for every GPU and, where the CPU has access, for the CPU. It is valid until the
/// buffer is destroyed.
///
/// Contract:
/// `buffer` is null or a buffer; `out` is null or may be written. Any thread may call this.
egm_status egm_buffer_ptr(const struct egm_buffer *buffer, void **out);

/// Returns the number of bytes that were asked for.
///
/// Contract:
/// `buffer` is null or a buffer; `out` is null or may be written. Any thread may call this.
egm_status egm_buffer_size(const struct egm_buffer *buffer, uint64_t *out);

/// Returns where the first part of the memory lies.
///
/// Contract:
/// `buffer` is null or a buffer; `out` is null or may be written. Any thread may call this.
egm_status egm_buffer_location(const struct egm_buffer *buffer, struct egm_location *out);

/// Returns what the memory is, ::EGM_BACKING_DRIVER or ::EGM_BACKING_REGISTERED, and writes why, as text, to `reason`
/// unless it is null. Free the text by egm_string_free().
///
/// Fails with ::EGM_INVALID_ARGUMENT for memory that egm_buffer_create() and egm_buffer_near() did not make.
///
/// Contract:
/// `buffer` is null or a buffer; `out` and `reason` are null or may be written. Any thread may call this.
egm_status egm_buffer_backing(const struct egm_buffer *buffer, int32_t *out, char **reason);

/// Returns a location's access to the memory: one of `EGM_ACCESS_…`.
///
/// Contract:
/// `buffer` is null or a buffer; `out` is null or may be written. Any thread may call this.
egm_status egm_buffer_access(const struct egm_buffer *buffer, struct egm_location who, int32_t *out);

/// Changes the access of locations of this process to a buffer that was allocated here. GPU work that needs the
/// access has ended. Other processes keep the access that they have.
///
/// Contract:
/// `buffer` is null or a buffer, which no other thread uses during the call; `grants` is null or points to
/// `grant_count` grants. Any thread may call this.
egm_status egm_buffer_set_access(struct egm_buffer *buffer, const struct egm_grant *grants, size_t grant_count);

/// Copies `len` bytes into the buffer with the CPU.
///
/// Fails with ::EGM_OUT_OF_RANGE and, where the CPU may not write, ::EGM_NOT_ACCESSIBLE. A pool's memory waits for
/// the streams that use it.
///
/// Contract:
/// `buffer` is null or a buffer; `from` is null or points to `len` bytes, none of them in the buffer. Any thread may
/// call this, also while other threads and GPUs write the same bytes, which then have the value of either.
egm_status egm_buffer_write(const struct egm_buffer *buffer, uint64_t offset, const void *from, size_t len);

/// Copies `len` bytes out of the buffer with the CPU.
///
/// Fails as egm_buffer_write(), where the CPU may not read.
///
/// Contract:
/// As egm_buffer_write(): `to` is null or points to `len` bytes, none of them in the buffer.
egm_status egm_buffer_read(const struct egm_buffer *buffer, uint64_t offset, void *to, size_t len);

/// Sets `len` bytes from `offset` on to `byte` with the CPU. Fails as egm_buffer_write().
///
/// Contract:
/// `buffer` is null or a buffer. Any thread may call this, as egm_buffer_write().
egm_status egm_buffer_fill(const struct egm_buffer *buffer, uint64_t offset, uint64_t len, uint8_t byte);

/// Lets work that is submitted to `stream` from now on use a pool's memory.
///
/// Contract:
/// `buffer` is null or a buffer, which no other thread uses during the call; `stream` is null or a stream.
egm_status egm_buffer_use_on(struct egm_buffer *buffer, const struct egm_stream *stream);

/// Destroys a pool's buffer: its memory is freed after all work submitted so far to `stream` and to every stream that
/// used it. The buffer is destroyed even where the call fails, except with ::EGM_INVALID_ARGUMENT.
///
/// Contract:
/// `buffer` is null, or a buffer that no thread uses during the call or afterwards; `stream` is null or a stream.
egm_status egm_buffer_free_on(struct egm_buffer *buffer, const struct egm_stream *stream);

/// Destroys a buffer: unmaps its memory and gives it back. For fetched memory it ends the lease and waits until the
/// server has noted that; it fails if that cannot be known, and the memory is gone anyway. A pool's memory is freed
/// after the work of the streams that use it. A null pointer is left alone.
///
/// GPU work that uses the memory has ended: a GPU that accesses unmapped addresses loses its context.
///
/// Contract:
/// `buffer` is null, or a buffer that no thread uses during the call or afterwards: not destroyed yet. No GPU uses
/// its memory.
egm_status egm_buffer_destroy(struct egm_buffer *buffer);

/// Listens at a path of the file system, which only this user can open. Replaces a socket that a dead process has
/// left.
///
/// Contract:
/// `path` is null or a string; `out` is null or may be written. Any thread may call this.
egm_status egm_listener_bind(const char *path, struct egm_listener **out);

/// Waits at most `timeout_ms` milliseconds, at least 1, for a process that connects.
///
/// Fails with ::EGM_TIMED_OUT, and with ::EGM_NOT_TRUSTED for a process of another user; the listener stays usable.
///
/// Contract:
/// `listener` is null or a listener; `out` is null or may be written. Any thread may call this; calls take turns.
egm_status egm_listener_accept(const struct egm_listener *listener, uint64_t timeout_ms, struct egm_channel **out);

/// Stops listening and removes the socket's file. A null pointer is left alone.
///
/// Contract:
/// `listener` is null, or a listener that no thread uses during the call or afterwards: not destroyed yet.
egm_status egm_listener_destroy(struct egm_listener *listener);

/// Connects to a listener of this user.
///
/// Fails with ::EGM_UNREACHABLE if no process listens, ::EGM_NOT_TRUSTED for another user's.
///
/// Contract:
/// `path` is null or a string; `out` is null or may be written. Any thread may call this.
egm_status egm_channel_connect(const char *path, struct egm_channel **out);

/// Makes a channel of a connected Unix stream socket: one end of socketpair(2), or an inherited one. The channel owns
/// the file descriptor from then on; if the call fails, it is closed, unless it is negative or `out` is null.
///
/// Contract:
/// `fd` is negative, or an open file descriptor that nothing else uses; `out` is null or may be written. Any thread
/// may call this.
egm_status egm_channel_from_fd(int32_t fd, struct egm_channel **out);

/// Sets how long each call that begins from now on may take, in milliseconds, at least 1; 30 s at first.
///
/// Contract:
/// `channel` is null or a channel. Any thread may call this.
egm_status egm_channel_set_timeout(const struct egm_channel *channel, uint64_t timeout_ms);

/// Shares a buffer that was allocated here and is shareable with the other process, and asks that process to keep to
/// `access`. From now on it may use all of the memory, and keeps it alive for as long as it likes.
///
/// Fails with ::EGM_INVALID_ARGUMENT for memory that is not shareable; ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// Contract:
/// `channel` is null or a channel; `buffer` is null or a buffer. Any thread may call this.
egm_status egm_channel_send(const struct egm_channel *channel, const struct egm_buffer *buffer, int32_t access);

/// Shares a block of a heap that is shareable. The other process gets the block's usable bytes, but could access all
/// of its chunk: put data that it must not see into a heap of its own.
///
/// Keep the block until the other process has confirmed that it and its GPU work are done with it: a freed block is
/// reused.
///
/// Contract:
/// `channel` is null or a channel; `heap` is null or a heap. No other call frees or resizes the block meanwhile. Any
/// thread may call this.
egm_status egm_channel_send_block(const struct egm_channel *channel,
                                  const struct egm_heap *heap,
                                  const void *block,
                                  int32_t access);

/// Waits for memory from the other process and maps it, for the CPU and every GPU that can reach it, as far as the
/// other process allows.
///
/// Fails with ::EGM_TIMED_OUT, after which the call may be made again if no byte had arrived; ::EGM_PEER_LOST,
/// ::EGM_PROTOCOL, and others of the driver.
///
/// Contract:
/// `channel` is null or a channel; `driver` is null or a driver; `out` is null or may be written. Any thread may call
/// this.
egm_status egm_channel_receive(const struct egm_channel *channel,
                               const struct egm_driver *driver,
                               struct egm_buffer **out);

/// Lends an event, made by egm_event_create_interprocess(), to the other process, which may record it and make its streams
/// wait for it. It exists until that process has destroyed its own, even if this process destroys it first.
///
/// Fails with ::EGM_INVALID_ARGUMENT for another event; ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// Contract:
/// `channel` is null or a channel; `event` is null or an event. Any thread may call this.
egm_status egm_channel_send_event(const struct egm_channel *channel,
                                  const struct egm_event *event);

/// Waits for an event from the other process, and opens it for the same GPU, whatever its ordinal here. The other process is
/// trusted to keep its event until this one is destroyed, as egm_channel_send_event() does.
///
/// Fails with ::EGM_INVALID_ARGUMENT if this process does not have the event's GPU; ::EGM_TIMED_OUT, after which the call
/// may be made again if no byte had arrived; ::EGM_PEER_LOST, ::EGM_PROTOCOL; ::EGM_DRIVER_FAILED, also for an event of this
/// process itself.
///
/// Contract:
/// `channel` is null or a channel; `driver` is null or a driver; `out` is null or may be written. Any thread may call
/// this.
egm_status egm_channel_receive_event(const struct egm_channel *channel,
                                     const struct egm_driver *driver,
                                     struct egm_event **out);

/// Closes a channel. Memory that was sent or received stays. A null pointer is left alone.
///
/// Contract:
/// `channel` is null, or a channel that no thread uses during the call or afterwards: not destroyed yet.
egm_status egm_channel_destroy(struct egm_channel *channel);

/// Connects to a server at "unix:/path" or "tcp://host:port". `options` may be null: no TLS, servers of this user and
/// root.
///
/// Fails with ::EGM_UNREACHABLE, ::EGM_NOT_TRUSTED, ::EGM_INSECURE for another machine without TLS, ::EGM_TLS,
/// ::EGM_TIMED_OUT.
///
/// Contract:
/// `driver` is null or a driver; `address` is null or a string; `options` is null or points to as many bytes as its
/// first field says; `out` is null or may be written. Any thread may call this.
egm_status egm_client_connect(const struct egm_driver *driver,
                              const char *address,
                              const struct egm_client_options *options,
                              struct egm_client **out);

/// Fetches the memory under a name: takes a lease on it and maps it here, for the CPU and every GPU that can reach
/// it. egm_buffer_destroy() ends the lease. The CPU proves that the server sees the same memory, if there is room for
/// the proof; no GPU's context is created for it.
///
/// Fails with ::EGM_REFUSED, for instance if there is no such name; ::EGM_MISMATCHED for another owner than expected;
/// ::EGM_NO_COMMON_HANDLE, ::EGM_IMPORT_FAILED, ::EGM_DATA_PLANE, ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// Contract:
/// `client` is null or a client; `name` is null or a string; `out` is null or may be written. Any thread may call
/// this.
egm_status egm_client_fetch(const struct egm_client *client, const char *name, struct egm_buffer **out);

/// Destroys a client. Fetched memory and its leases stay until the buffers are destroyed. A null pointer is left
/// alone.
///
/// Contract:
/// `client` is null, or a client that no thread uses during the call or afterwards: not destroyed yet.
egm_status egm_client_destroy(struct egm_client *client);

/// Has `egmem serve` create memory of `bytes` under a name. It stays until it is deleted, and outlives this process:
/// fetch it by egm_client_fetch(). `options` may be null: a node of the server's choice, for this peer only. `out` may be
/// null.
///
/// A server lets a peer create only names under its prefixes: by default those that begin with the text of
/// egm_client_peer_name() and a slash. The call takes 5 minutes at most; drivers create 4 to 6 GB a second.
///
/// Fails with ::EGM_REFUSED for a name outside the prefixes, one that exists, and a quota; with ::EGM_EXIST_OK with
/// ::EGM_MISMATCHED if the name has another owner, size or node; ::EGM_INVALID_ARGUMENT, ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// Contract:
/// `client` is null or a client; `name` is null or a string; `options` is null or points to as many bytes as its first field
/// says; `out` is null or may be written. Any thread may call this.
egm_status egm_client_create(const struct egm_client *client,
                             const char *name,
                             uint64_t bytes,
                             const struct egm_create_options *options,
                             struct egm_entry *out);

/// Deletes memory that this peer has created, and waits at most `timeout_ms` milliseconds, at least 1, for the processes
/// that hold it.
///
/// Fails with ::EGM_TIMED_OUT if it is still held: it is then being withdrawn, and no process can fetch it any more. Fails with
/// ::EGM_REFUSED if there is no such name or another peer has created it; ::EGM_PEER_LOST.
///
/// Contract:
/// `client` is null or a client; `name` is null or a string. Any thread may call this.
egm_status egm_client_delete(const struct egm_client *client,
                             const char *name,
                             uint64_t timeout_ms);

/// Waits at most `timeout_ms` milliseconds, at least 1, until there is memory under a name that this peer may fetch. `out`
/// may be null.
///
/// Fails with ::EGM_TIMED_OUT if there is none by then; ::EGM_PEER_LOST.
///
/// Contract:
/// `client` is null or a client; `name` is null or a string; `out` is null or may be written. Any thread may call this.
egm_status egm_client_wait(const struct egm_client *client,
                           const char *name,
                           uint64_t timeout_ms,
                           struct egm_entry *out);

/// Gives the names that begin with `prefix` and that this peer may fetch, as a JSON array of objects with `name`,
/// `bytes`, `access`, `locations`, `leases` and `owner` (null: the server itself), in the order of the names. Free the
/// text by egm_string_free().
///
/// Fails with ::EGM_LIMIT_REACHED for very many names; ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// Contract:
/// `client` is null or a client; `prefix` is null or a string, "" for all names; `out` is null or may be written. Any
/// thread may call this.
egm_status egm_client_list_json(const struct egm_client *client, const char *prefix, char **out);

/// Gives the server's name for this peer: that of its certificate, or "uid:1000" over a Unix socket. Free the text by
/// egm_string_free().
///
/// Contract:
/// `client` is null or a client; `out` is null or may be written. Any thread may call this.
egm_status egm_client_peer_name(const struct egm_client *client, char **out);

/// Opens the CUDA driver of this machine and initialises it. No library of CUDA is needed to build a program.
///
/// Fails with ::EGM_NO_DRIVER without a usable libcuda.so.1, ::EGM_DRIVER_TOO_OLD before CUDA 12.2,
/// ::EGM_DRIVER_FAILED.
///
/// Contract:
/// `out` is null or may be written. Any thread may call this.
egm_status egm_driver_open(struct egm_driver **out);

/// Makes a driver that simulates a machine: "gh200", "gh200x4", "gb200", "h200x8", or a description as JSON, which
/// begins with a brace. Its memory is ordinary memory of this process; it needs no GPU.
///
/// Fails with ::EGM_INVALID_ARGUMENT for another name and for a wrong description.
///
/// Contract:
/// `machine` is null or a string; `out` is null or may be written. Any thread may call this.
egm_status egm_driver_simulated(const char *machine, struct egm_driver **out);

/// Tells whether the machine is simulated: times measured on it mean nothing.
///
/// Contract:
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
egm_status egm_driver_is_simulated(const struct egm_driver *driver, bool *out);

/// Destroys a driver. Objects that were made from it stay usable. A null pointer is left alone.
///
/// Contract:
/// `driver` is null, or a driver that no thread uses during the call or afterwards: not destroyed yet.
egm_status egm_driver_destroy(struct egm_driver *driver);

/// Reads the topology of a driver's machine.
///
/// Contract:
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
egm_status egm_topology_discover(const struct egm_driver *driver, struct egm_topology **out);

/// Returns the number of GPUs; their ordinals count from 0.
///
/// Contract:
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
egm_status egm_topology_gpu_count(const struct egm_topology *topology, size_t *out);

/// Returns the GPU with this CUDA ordinal. Fails with ::EGM_NO_SUCH_GPU.
///
/// Contract:
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
egm_status egm_topology_gpu(const struct egm_topology *topology, int32_t ordinal, struct egm_gpu *out);

/// Returns the number of host nodes. Nodes of GPUs' own memory do not count.
///
/// Contract:
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
egm_status egm_topology_node_count(const struct egm_topology *topology, size_t *out);

/// Returns a host node by its place in the list, which begins at 0 and ascends by the nodes' ids.
///
/// Contract:
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
egm_status egm_topology_node(const struct egm_topology *topology, size_t index, struct egm_node *out);

/// Gives the whole topology as JSON, as `egmem topo --json` prints it. Free the text by egm_string_free().
///
/// Contract:
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
egm_status egm_topology_json(const struct egm_topology *topology, char **out);

/// Destroys a topology. A null pointer is left alone.
///
/// Contract:
/// `topology` is null, or a topology that no thread uses during the call or afterwards: not destroyed yet.
egm_status egm_topology_destroy(struct egm_topology *topology);

/// Tries the capabilities of this machine, and gives the report as JSON, as `egmem doctor --json` prints it: the
/// trials, the reasons for failures, and their remedies. Free the text by egm_string_free().
///
/// The trials run in this process and take milliseconds each: a driver that crashes in one ends the process. `egmem
/// doctor` runs each in a process of its own.
///
/// Contract:
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
egm_status egm_capabilities_json(const struct egm_driver *driver, char **out);

/// Returns the name of a status, such as "EGM_HEAP_FULL"; "EGM_OTHER" for a value that this version does not know.
///
/// The text is valid for ever. Any thread may call this.
const char *egm_status_name(int32_t status);

/// Returns the message of the calling thread's last failed call, with its cause: one line without a full stop. ""
/// before the first failure.
///
/// A call that succeeds changes nothing. The text is valid until the next call of the thread that fails, and until
/// the thread ends. Never null.
const char *egm_last_error_message(void);

/// Returns the remedy for the calling thread's last failed call, or "" where the message says what is valid, as for most
/// arguments. Valid as long as egm_last_error_message()'s text. Never null.
const char *egm_last_error_remedy(void);

/// Returns the result (`CUresult`) of the driver call behind the calling thread's last failed call, or 0 if there was
/// none.
int32_t egm_last_error_cuda_code(void);

/// Gives this rank's memory to all ranks of a job, and maps that of all others. All ranks call it together.
///
/// `buffer` was made by egm_buffer_create() or egm_buffer_near() and is shareable, or is null: then the rank only maps the
/// others' memory. `out` has room for as many pointers as there are ranks. It gets a buffer for each, in the order of
/// ranks, to be destroyed by egm_buffer_destroy(); null for this rank and for ranks without memory.
///
/// Ranks of one machine exchange file descriptors over Unix sockets, ranks of several machines fabric handles by
/// `all_gather`. Fails in all ranks with ::EGM_NO_COMMON_HANDLE if no handle type does for all. If one rank fails, the others
/// fail with ::EGM_OTHER and its reason. With a secret, ::EGM_NOT_TRUSTED for a contribution that is not sealed with it.
///
/// Contract:
/// `driver` is null or a driver; `buffer` is null or a buffer; `ranks` is null or ranks whose function may be called with
/// its context and keeps to its description, and whose secret is null or a string; `out` is null or has that room. Any
/// thread may call this.
egm_status egm_group_gather(const struct egm_driver *driver,
                            const struct egm_buffer *buffer,
                            const struct egm_ranks *ranks,
                            struct egm_buffer **out);

/// Creates a heap. It reserves addresses for its limit at once, and adds memory as needed.
///
/// Contract:
/// `driver` is null or a driver; `options` is null or points to as many bytes as its first field says; `out` is null
/// or may be written. Any thread may call this.
egm_status egm_heap_create(const struct egm_driver *driver,
                           const struct egm_heap_options *options,
                           struct egm_heap **out);

/// Allocates a block of `size` bytes, at least 1, at a multiple of `align`: a power of two, or 0 for 16. The bytes
/// are not initialised. The address is the same for every GPU and, where the CPU has access, for the CPU; it is valid
/// until the block is freed.
///
/// Fails with ::EGM_INVALID_ARGUMENT for 0 bytes, for more than 1 TiB - 2 MiB, and for a wrong alignment;
/// ::EGM_HEAP_FULL; if the heap has to grow, ::EGM_NODE_TOO_FULL, ::EGM_OUT_OF_MEMORY, and others of the driver.
///
/// Contract:
/// `heap` is null or a heap; `out` is null or may be written. Any thread may call this.
egm_status egm_heap_alloc(const struct egm_heap *heap, size_t size, size_t align, void **out);

/// As egm_heap_alloc(), with every byte 0. The CPU writes the zeros, or a GPU if the CPU may not write.
///
/// Contract:
/// As egm_heap_alloc().
egm_status egm_heap_alloc_zeroed(const struct egm_heap *heap, size_t size, size_t align, void **out);

/// Frees a block. The heap may hand it out again at once, to any thread: GPU work that uses it has ended. A null
/// pointer is left alone.
///
/// Fails with ::EGM_INVALID_ARGUMENT, and changes nothing, for an address at which no block of the heap in use
/// begins: one of another heap, within a block, or freed before. An address that was freed and allocated again is a
/// block in use.
///
/// Contract:
/// `heap` is null or a heap. No thread and no GPU uses the block at `block`. Any thread may call this, also another
/// than the one that allocated the block.
egm_status egm_heap_free(const struct egm_heap *heap, void *block);

/// Frees a block once all work submitted to `stream` so far has run. The call does not wait. A null block is left
/// alone.
///
/// Where the call fails, the block is not freed: wait for the GPU's work and free it by egm_heap_free().
///
/// Contract:
/// As egm_heap_free(), but work that was submitted to `stream` before may use the block; `stream` is null or a
/// stream. Any thread may call this.
egm_status egm_heap_free_after(const struct egm_heap *heap, void *block, const struct egm_stream *stream);

/// As egm_heap_free_after(), for a stream of the program's own, a `CUstream` or `cudaStream_t`.
///
/// Contract:
/// As egm_heap_free_after(). `handle` is a stream of the primary context of GPU `gpu`.
egm_status egm_heap_free_after_cuda_stream(const struct egm_heap *heap, void *block, int32_t gpu, void *handle);

/// Frees a block once the work that `event` currently marks has run. Do not record the event again before then. As
/// egm_heap_free_after() otherwise.
///
/// Fails with ::EGM_INVALID_ARGUMENT for an event of several processes, which another process can record again: use
/// egm_heap_free_after().
///
/// Contract:
/// As egm_heap_free_after(), for work that `event` marks; `event` is null or an event.
egm_status egm_heap_free_after_event(const struct egm_heap *heap, void *block, const struct egm_event *event);

/// Resizes a block in place and tells by `out` whether that was possible; otherwise nothing changes. Added bytes are
/// not initialised. In a heap in debug mode it is never possible.
///
/// Fails with ::EGM_INVALID_ARGUMENT for an address at which no block in use begins.
///
/// Contract:
/// `heap` is null or a heap; `out` is null or may be written. No thread and no GPU uses the bytes that the block
/// loses, and no other call is made with the block meanwhile. Any thread may call this.
egm_status egm_heap_resize(const struct egm_heap *heap, void *block, size_t size, bool *out);

/// Returns the number of bytes that may be used at a block: at least as many as were asked for.
///
/// Fails with ::EGM_INVALID_ARGUMENT for an address at which no block in use begins.
///
/// Contract:
/// `heap` is null or a heap; `out` is null or may be written; no other call frees or resizes the block meanwhile. Any
/// thread may call this.
egm_status egm_heap_usable_size(const struct egm_heap *heap, const void *block, size_t *out);

/// Returns what the heap's memory is, ::EGM_BACKING_DRIVER or ::EGM_BACKING_REGISTERED, and writes why, as text, to
/// `reason` unless it is null. Free the text by egm_string_free().
///
/// Contract:
/// `heap` is null or a heap; `out` and `reason` are null or may be written. Any thread may call this.
egm_status egm_heap_backing(const struct egm_heap *heap, int32_t *out, char **reason);

/// Adds memory until at least `bytes` are free. Fails as egm_heap_alloc() for a heap that has to grow.
///
/// Contract:
/// `heap` is null or a heap. Any thread may call this.
egm_status egm_heap_reserve(const struct egm_heap *heap, uint64_t bytes);

/// Gives unused memory back in whole chunks, but leaves at least `keep` bytes free if there are as many; returns the
/// bytes given back. `out` may be null.
///
/// Contract:
/// `heap` is null or a heap; `out` is null or may be written. Any thread may call this.
egm_status egm_heap_trim(const struct egm_heap *heap, uint64_t keep, uint64_t *out);

/// Takes blocks back that were freed after GPU work which has ended by now. With `wait`, waits for the others first:
/// never ends if their work waits for something that this thread has yet to do.
///
/// Contract:
/// `heap` is null or a heap. Any thread may call this.
egm_status egm_heap_collect(const struct egm_heap *heap, bool wait);

/// In a heap with ::EGM_DEBUG, checks the guards of all blocks and all freed blocks in quarantine.
///
/// Fails with ::EGM_DAMAGED, whose message names the damage found now and since the last check, each once, and with
/// ::EGM_INVALID_ARGUMENT for a heap that is not in debug mode.
///
/// Contract:
/// `heap` is null or a heap. Any thread may call this.
egm_status egm_heap_check(const struct egm_heap *heap);

/// Destroys a heap. Its memory is given back once the GPU work that blocks were freed after has ended, for which the
/// call waits, and no shared block is left. A null pointer is left alone.
///
/// Fails with ::EGM_STILL_HELD while blocks are in use: the heap is not destroyed then, and stays usable.
///
/// Contract:
/// `heap` is null, or a heap that no thread uses during the call, nor afterwards if it succeeds: not destroyed yet.
egm_status egm_heap_destroy(struct egm_heap *heap);

/// Returns the heap's statistics. Set `out->struct_size` to sizeof(egm_heap_stats) before the call.
///
/// Takes microseconds or, with much memory in small blocks, longer. Threads that need more than their caches hold
/// wait meanwhile.
///
/// Contract:
/// `heap` is null or a heap; `out` is null or points to as many bytes as its first field says. Any thread may call
/// this.
egm_status egm_heap_get_stats(const struct egm_heap *heap, struct egm_heap_stats *out);

/// Gives all statistics as JSON, those of each size class too. Free the text by egm_string_free().
///
/// Contract:
/// `heap` is null or a heap; `out` is null or may be written. Any thread may call this.
egm_status egm_heap_stats_json(const struct egm_heap *heap, char **out);

/// Creates a ring and gives both sides. A null pointer instead of `producer` or `consumer` drops that side, so that
/// egm_ring_share() can send it to another process.
///
/// Fails with ::EGM_INVALID_ARGUMENT, ::EGM_NO_SUCH_NODE, ::EGM_NO_SUCH_GPU, ::EGM_OUT_OF_MEMORY, and others of the
/// driver.
///
/// Contract:
/// `driver` is null or a driver; `options` is null or as large as its first field says, with `gpu_count` ordinals and a
/// string or null as its label; `producer` and `consumer` are null or may be written. Any thread may call this.
egm_status egm_ring_create(const struct egm_driver *driver,
                           const struct egm_ring_options *options,
                           struct egm_ring_side **producer,
                           struct egm_ring_side **consumer);

/// Waits until `records` have room, at most `timeout_ms` milliseconds; 0 asks once. `*out` is the address of the first for
/// the CPU and for GPUs, and the others follow without a gap. It is null if there was no room, or the consumer is gone
/// (egm_ring_is_alone()). Write there, then call egm_ring_commit().
///
/// Fails with ::EGM_DAMAGED if the other side has written a counter that cannot be.
///
/// Contract:
/// `side` is null or a side that no other call uses; `out` is null or may be written.
egm_status egm_ring_reserve(struct egm_ring_side *side,
                            size_t records,
                            uint64_t timeout_ms,
                            void **out);

/// Lets the consumer have the next `records`, all at once: at most as many as egm_ring_reserve() gave room for last.
///
/// Contract:
/// `side` is null or a side that no other call uses. Work of GPUs that writes the records has ended.
egm_status egm_ring_commit(struct egm_ring_side *side, size_t records);

/// Waits until there is a record, at most `timeout_ms` milliseconds; 0 asks once. `*out` is the address of the oldest one for
/// the CPU and for GPUs, `*count` how many follow each other there, at most `most`: 0 if none came, or the producer
/// is gone (egm_ring_is_alone()) and has left none. They stay until egm_ring_release().
///
/// Fails with ::EGM_DAMAGED if the other side has written a counter that cannot be.
///
/// Contract:
/// `side` is null or a side that no other call uses; `out` and `count` are null or may be written.
egm_status egm_ring_peek(struct egm_ring_side *side,
                         size_t most,
                         uint64_t timeout_ms,
                         const void **out,
                         size_t *count);

/// Gives the room of the oldest `records` to the producer: at most as many as egm_ring_peek() has found last.
///
/// Contract:
/// `side` is null or a side that no other call uses. Work of GPUs that reads the records has ended.
egm_status egm_ring_release(struct egm_ring_side *side, size_t records);

/// Hands a side to kernels: `*out` is what they pass to egmem_ring_open_producer() or egmem_ring_open_consumer(). Until
/// egm_ring_to_cpu() the CPU neither writes nor reads records through it. It does no harm to a side that kernels have.
///
/// Contract:
/// `side` is null or a side that no other call uses; `out` is null or may be written. One kernel at a time uses the side, and
/// ends before the side is destroyed.
egm_status egm_ring_to_gpu(struct egm_ring_side *side,
                           void **out);

/// Gives a side back to the CPU. No kernel may use it any more.
///
/// Fails with ::EGM_NOT_ACCESSIBLE if the CPU may not read and write the memory; the side stays with the GPU then. Fails with
/// ::EGM_DAMAGED if a counter has a value that it cannot have; only egm_ring_destroy() is left then.
///
/// Contract:
/// `side` is null or a side that no other call uses.
egm_status egm_ring_to_cpu(struct egm_ring_side *side);

/// Says whether the other side was destroyed, or the process that has it has ended: no record will come, or be released. Records
/// that it committed before are still there: ask this first, and take records until there are none afterwards.
///
/// Contract:
/// `side` is null or a side that no other call changes; `out` is null or may be written.
egm_status egm_ring_is_alone(const struct egm_ring_side *side,
                             bool *out);

/// Tells what a side knows. The CPU has it.
///
/// Contract:
/// `side` is null or a side that no other call changes; `out` is null or may be written.
egm_status egm_ring_get_info(const struct egm_ring_side *side, struct egm_ring_info *out);

/// Sends the other side of a ring, which nobody has, to another process, which calls egm_ring_receive(). The side was given no
/// pointer by egm_ring_create(), or was destroyed, or the process that had it has ended: the next one goes on where that one
/// stopped. Of a side that a kernel had, first wait for the end of the process itself: until then the kernel may still run.
///
/// Fails with ::EGM_STILL_HELD while somebody has the side, ::EGM_DAMAGED, ::EGM_INVALID_ARGUMENT for a ring without
/// ::EGM_SHAREABLE; ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// Contract:
/// `side` is null or a side that no other call uses; `channel` is null or a channel.
egm_status egm_ring_share(struct egm_ring_side *side,
                          const struct egm_channel *channel);

/// Waits for a side of a ring from another process, of the kind `which`: ::EGM_RING_PRODUCER or ::EGM_RING_CONSUMER. It is mapped
/// for the CPU and every GPU that can reach it. egm_ring_get_info() tells the size of its records.
///
/// Fails with ::EGM_TIMED_OUT, after which the call may be made again if no byte had arrived; ::EGM_INVALID_ARGUMENT for another
/// message, ::EGM_DAMAGED, ::EGM_PEER_LOST, ::EGM_PROTOCOL, and others of the driver.
///
/// Contract:
/// `channel` is null or a channel; `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
egm_status egm_ring_receive(const struct egm_channel *channel,
                            const struct egm_driver *driver,
                            int32_t which,
                            struct egm_ring_side **out);

/// Drops a side: the other one is alone then. Records that were committed stay in the ring. A null pointer is left alone.
///
/// Contract:
/// `side` is null, or a side that no thread uses during the call or afterwards: not destroyed yet. Kernels that use it have
/// ended.
egm_status egm_ring_destroy(struct egm_ring_side *side);

/// Creates a stream on a GPU, which the legacy default stream does not wait for.
///
/// Contract:
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
egm_status egm_stream_create(const struct egm_driver *driver, int32_t gpu, struct egm_stream **out);

/// Wraps a stream of the program's own, a `CUstream` or `cudaStream_t`. Destroying the result leaves that stream as
/// it is.
///
/// Contract:
/// `driver` is null or a driver; `out` is null or may be written. `handle` is a stream of the primary context of GPU
/// `gpu`, and outlives the result and all pool memory that was allocated or used on it. Any thread may call this.
egm_status egm_stream_borrow(const struct egm_driver *driver, int32_t gpu, void *handle, struct egm_stream **out);

/// Returns the driver's handle, for calls of CUDA: a `CUstream`. It is valid until the stream is destroyed.
///
/// Contract:
/// `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
egm_status egm_stream_handle(const struct egm_stream *stream, void **out);

/// Waits until all work on the stream is done. Fails with the error of earlier work.
///
/// Contract:
/// `stream` is null or a stream. Any thread may call this.
egm_status egm_stream_synchronize(const struct egm_stream *stream);

/// Tells whether all work on the stream is done. Fails with the error of earlier work.
///
/// Contract:
/// `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
egm_status egm_stream_is_done(const struct egm_stream *stream, bool *out);

/// Destroys a stream; work in flight continues, and pool memory that was allocated on it keeps it. A null pointer is
/// left alone.
///
/// Contract:
/// `stream` is null, or a stream that no thread uses during the call or afterwards: not destroyed yet.
egm_status egm_stream_destroy(struct egm_stream *stream);

/// Creates an event on a GPU.
///
/// Contract:
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
egm_status egm_event_create(const struct egm_driver *driver, int32_t gpu, struct egm_event **out);

/// Creates an event on a GPU that can be sent to other processes by egm_channel_send_event(), so that GPU work of one waits
/// for work of the other with no CPU in between. Streams of its GPU alone record it and wait for it, unless they are being
/// captured into a graph.
///
/// Contract:
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
egm_status egm_event_create_interprocess(const struct egm_driver *driver,
                                         int32_t gpu,
                                         struct egm_event **out);

/// Makes work submitted to a stream from now on wait for an event: for its last record before this call, by any process
/// that has it. Returns at once.
///
/// Of an event that processes share, fails with ::EGM_INVALID_ARGUMENT for a stream of another GPU than the event's and for
/// one that is being captured into a graph, and with ::EGM_SYSTEM if the process that made the event has ended.
///
/// Contract:
/// `stream` is null or a stream; `event` is null or an event. Any thread may call this.
egm_status egm_stream_wait_event(const struct egm_stream *stream,
                                 const struct egm_event *event);

/// Marks the work submitted to a stream so far. Fails while blocks wait for the work that the event marks now, and as
/// egm_stream_wait_event().
///
/// Contract:
/// `event` is null or an event; `stream` is null or a stream. Any thread may call this.
egm_status egm_event_record(const struct egm_event *event, const struct egm_stream *stream);

/// Waits until the marked work is done; at once if the event was never recorded. Fails with ::EGM_SYSTEM for an event of
/// another process that has ended before the work.
///
/// Contract:
/// `event` is null or an event. Any thread may call this.
egm_status egm_event_synchronize(const struct egm_event *event);

/// Destroys an event; blocks that wait for it keep it, and so do processes that it was sent to. A null pointer is left alone.
///
/// Contract:
/// `event` is null, or an event that no thread uses during the call or afterwards: not destroyed yet.
egm_status egm_event_destroy(struct egm_event *event);

/// Creates a pool and grants access. It takes no memory before the first allocation.
///
/// Contract:
/// `driver` is null or a driver; `options` is null or points to as many bytes as its first field says; `out` is null
/// or may be written. Any thread may call this.
egm_status egm_pool_create(const struct egm_driver *driver,
                           const struct egm_pool_options *options,
                           struct egm_pool **out);

/// Allocates `bytes`, usable by work that is submitted to `stream` from now on. Destroy the buffer by
/// egm_buffer_free_on(), or by egm_buffer_destroy().
///
/// Fails with ::EGM_INVALID_ARGUMENT for 0 bytes, ::EGM_NODE_TOO_FULL, ::EGM_OUT_OF_MEMORY.
///
/// Contract:
/// `pool` is null or a pool; `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
egm_status egm_pool_alloc(const struct egm_pool *pool,
                          uint64_t bytes,
                          const struct egm_stream *stream,
                          struct egm_buffer **out);

/// Returns the pool's bytes.
///
/// Contract:
/// `pool` is null or a pool; `out` is null or may be written. Any thread may call this.
egm_status egm_pool_get_stats(const struct egm_pool *pool, struct egm_pool_stats *out);

/// Gives free memory back to the system until `keep` bytes are held, or no more is free.
///
/// Contract:
/// `pool` is null or a pool. Any thread may call this.
egm_status egm_pool_trim(const struct egm_pool *pool, uint64_t keep);

/// Destroys a pool; its buffers keep its memory until they are destroyed. A null pointer is left alone.
///
/// Contract:
/// `pool` is null, or a pool that no thread uses during the call or afterwards: not destroyed yet.
egm_status egm_pool_destroy(struct egm_pool *pool);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* EGMEM_H */

/*
 * In C, the calls below tell the ledger their line (egm_call_site()), which `egmem ps` and EGMEM_LEAKS=1 show. Define
 * EGM_NO_CALL_SITES before this header is included to turn that off.
 */
#if !defined(__cplusplus) && !defined(EGM_NO_CALL_SITES) && !defined(EGM_FROM_HERE)
#define EGM_FROM_HERE(call) (egm_call_site(__FILE__, __LINE__, __func__), call)
#define egm_buffer_create(...) EGM_FROM_HERE(egm_buffer_create(__VA_ARGS__))
#define egm_buffer_near(...) EGM_FROM_HERE(egm_buffer_near(__VA_ARGS__))
#define egm_heap_create(...) EGM_FROM_HERE(egm_heap_create(__VA_ARGS__))
#define egm_pool_alloc(...) EGM_FROM_HERE(egm_pool_alloc(__VA_ARGS__))
#define egm_channel_receive(...) EGM_FROM_HERE(egm_channel_receive(__VA_ARGS__))
#define egm_client_fetch(...) EGM_FROM_HERE(egm_client_fetch(__VA_ARGS__))
#define egm_group_gather(...) EGM_FROM_HERE(egm_group_gather(__VA_ARGS__))
#define egm_ring_create(...) EGM_FROM_HERE(egm_ring_create(__VA_ARGS__))
#define egm_ring_receive(...) EGM_FROM_HERE(egm_ring_receive(__VA_ARGS__))
#endif
