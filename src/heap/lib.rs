//! Suballocation: blocks of Extended GPU Memory in nanoseconds, without a driver call.
//!
//! Start with [`Heap`].
//!
//! # The path of allocate and free
//! ```text
//! Heap::allocate (heap.rs)
//!  │ debug mode, or no thread cache ──────────────────────────────────────────────────┐
//!  ▼                                                                                  │
//! thread's cache  alloc_path.rs: allocate_cached  cache/member.rs, biased/, local.rs  │
//!  │ to 2 KiB: a magazine of the class          no lock, no shared cache line         │
//!  │ to 4 MiB: by size (medium.rs)                                                    │
//!  │ empty                                                                            │
//!  ├─ small: the thread's stripe of slabs, under its lock  ranges/stripes.rs          │
//!  ├─ to 1 or 2 MiB, while threads share the core: the thread's shard  shards.rs      │
//!  ▼                                                                                  │
//! core, under its lock   cache/reserved/, ranges/ extents.rs, bins.rs, slabs.rs       │
//!  │ no room                                                                          │
//!  ▼                                                                                  │
//! alloc_path.rs: allocate_slowly, growth.rs: with_memory  ◀───────────────────────────┘
//!  1 core   2 own cache   3 collect finished GPU work (deferred/)
//!  4 add chunks, up to the soft limit (backing/supply.rs, shape.rs, order.rs, make.rs → vmm → driver)
//!  5 at a limit, empty all caches if that can help (room.rs, ranges/refusals.rs), and where chunks do not join,
//!    replace idle ones (room.rs, backing/make.rs); then soft_limit's function decides: retry, grow, refuse
//!  6 wait for GPU work, only with wait_for_gpu; else Error::HeapFull (room.rs)
//!
//! Block::drop (block.rs)                            Block::free_after (release.rs)
//!  ▼                                                 ▼ record an event
//! alloc_path.rs: free                               deferred/ ── collected later ────────▶ core
//!  ├─ small: push to the magazine; the older half of a full one goes to its slabs (ranges/stripes.rs)
//!  ├─ larger: keep by size within the thread's budget
//!  ├─ in a shard: to it, or to its post if it is another thread's (shards.rs)
//!  └─ otherwise: to the core, or to the inbox (cache/inbox.rs) while another thread has the core
//! last block and last handle gone: membership.rs closes, deferred/ waits, backing/ unmaps
//! ```
//!
//! # Design
//! Everything is an offset into one reserved range, and no metadata lies in it. So a GPU's stray write damages bytes, never
//! the heap, and memory that the CPU cannot touch is managed in the same way. The module docs have the mechanics; this
//! section has the decisions.
//!
//! **Dependencies between the files go one way.** `ranges/` stands alone. `cache/`, `backing/`, `deferred/` and `debug/` know
//! the core's types at most, and not each other. `inner.rs` has one part of each, and `Facts`, which never change after the
//! build:
//!
//! | part of `HeapInner` | what it holds | its locks |
//! |---|---|---|
//! | `facts` (`inner.rs`) | addresses, limit, access, options, the process that built the heap | none |
//! | `front` (`cache/mod.rs`) | threads' caches and their budget, inbox, shards | `members`, one for each cache |
//! | `core` (`cache/reserved/`, `ranges/`) | free and used ranges | the core's |
//! | `slabs` (`ranges/stripes.rs`) | slabs of small blocks; the core knows them too | one for each stripe, after the core's |
//! | `supply` (`backing/supply.rs`) | the chunks, and growth that other threads wait for | `backing` |
//! | `deferral` (`deferred/deferral.rs`) | blocks that wait for GPU work | `waiting`, `collecting`, `deferred` |
//! | `watch` (`debug/`), `grower` (`grower.rs`), `shares` (`share/`) | debug mode, the background threads' signal, exported chunks | each its own |
//! | `reports` (`reports.rs`) | findings that are logged with no lock held | its own, after all others |
//!
//! A method that needs one part is the part's. The paths, which need several (`alloc_path.rs`, `growth.rs`, `release.rs`,
//! `membership.rs`), are methods on `HeapInner`, and above them are `Heap` and `Block`. A part that has to
//! call up gets a function from its caller (`debug/`, `deferred/`) or a trait that the heap implements (`cache::Home`).
//!
//! **The core** (`ranges/`) is pure and under one lock. Used and free ranges are nodes of one table (`nodes.rs`), 32 bytes
//! each, so that two share a cache line and none is split. Free ranges are in bins, 64 to a doubling, with a bitmap of two
//! levels (`bins.rs`). A request takes the last freed range of its own bin if that fits, else one of the next bin that has
//! any, and only then searches: its own bin, or for an alignment above 256 bytes all bins from there on. All but that search
//! take constant time, and no request is refused that a free range fits. Trimming may search longer.
//!
//! - A search looks at 1024 ranges, about 10 µs, before the heap grows, and at all before it refuses. Where a search of more than
//!   1024 ranges would have found room, the heap grows all the same; a repeated request that is refused is answered by
//!   remembered refusals, without a search.
//! - Free memory at a *growable end* is in a bin after all others, whatever its size (Korn and Vo, 1985). As one more hole
//!   it would be used before larger ones, and the heap would grow by a chunk for a block that could have lain there.
//! - Sizes are multiples of 256 bytes and at least 2 KiB, coalesced at once within a *span*. Up to 2 KiB, where whole
//!   granules would waste more than an eighth, blocks come from slabs of one size class. Slabs start at one *page* of
//!   2 KiB, so that a class of few blocks takes little.
//! - A table with an entry per page (`pages.rs`), accessed without a lock, finds a block by its address: slabs, and the
//!   blocks of collections. Other blocks carry their node.
//!
//! **The core's lock** (`cache/reserved/`) is a mutex that is *reserved* for a thread that locked it often in a row: that
//! thread enters by plain stores and loads. The next other thread revokes the reservation by a `membarrier`, and each time
//! it takes longer to be reserved again. A thread that only frees uses the inbox instead, the first 64 times.
//!
//! **Threads' caches** (`cache/`) keep the common pair free of locks and of shared cache lines. A cache is *biased*: its
//! owner enters by two plain stores and loads. Another thread that needs it, to trim, to close the heap or because memory
//! is short, fences all threads (`membarrier`), takes the cache, and keeps it until the core has the contents and its own
//! request was retried. So no cached block is out of reach, and a full heap fails only when every cache is empty.
//!
//! - A thread has a stack of small blocks of each class, a magazine (Bonwick and Adams, 2001). A full one gives the older half
//!   of its blocks back to the slabs. A thread gets the
//!   fewest of a class that fill cache lines at first, and twice as many each time. A block of over 1 KiB takes a page of the first slabs anyway: it is a range
//!   until the thread requests eight of its class within 128 visits to the core for ranges. After as many visits without
//!   any use of the class, its cached blocks return to the core, and empty slabs of theirs end (`give_idle`). A layout of
//!   such a size does not tell whether its block is small: `pages.rs` does. If no slab has room, such a request takes any range.
//! - Larger blocks are cached in bins by size (`medium.rs`), and a request gets only one of its exact size, so that none
//!   wastes memory. A thread that has the core to itself caches blocks up to 1 MiB, in all at most a 512th of the heap's
//!   memory (or 128 KiB). Each cached block keeps the free ranges on its sides apart, and a visit to the core is cheap; so
//!   all of them return before the core gets a request for more than 4 KiB. A thread that shares the core caches all that
//!   `thread_cache` allows. Caching pays only if the same sizes are requested again, so a score of hits and misses turns it
//!   off and on.
//! - A block that cannot go back to the core, since another thread has it, is left in an inbox, which the next thread that
//!   allocates from the core drains. Slabs that are to end then stay until memory is short. So a free seldom waits: for a thread that holds its cache or a stripe of
//!   slabs just then, and, turned away 64 times, for the `membarrier` and the core's owner.
//!
//! **Stripes** (`ranges/stripes.rs`). The slabs are divided into stripes, each with a lock of its own, and a visit to them needs no
//! core but for a new slab's range, or to return one. All threads begin at stripe 0. A thread that finds its lock taken 16 times in 255
//! visits claims a stripe that no other thread has, until it ends. A block returns to the stripe that its page names, whichever
//! thread frees it.
//!
//! - 20 threads that allocate and free batches of 50,000 blocks of 64 bytes take a seventh of the time that they took with one lock
//!   for all slabs and ranges, and magazines left for each other in slots (docs/performance-heap.md).
//! - A thread without free blocks in its stripe takes those of stripes that nobody has claimed, if their locks are free, and only then a
//!   new slab. A request is refused only when no stripe has a block.
//! - The slabs of a claimed stripe begin at 32 KiB where a free range is that large. Small ones between ranges leave no room for the
//!   segments of shards (docs/performance-heap.md).
//! - Each class keeps a slab without a block in each stripe, and those that emptied while the core was busy, until the stripe's thread
//!   ends, or the heap would have to grow.
//! - A bound for a refusal is taken while all stripes are locked, so that no block moves between a slab and a cache meanwhile.
//!
//! **Shards** (`shards.rs`, `cache/shards.rs`). While threads share the core, a visit costs several times as
//! much: the lines of its tables are in another CPU's cache. So a thread that met others there 128 times in a row gets a
//! shard: segments of the core's free memory, which it alone divides into blocks. The first segment has 4 MiB, later ones
//! up to an eighth of the shard's memory. The blocks have up to 1 MiB, and up to 2 MiB once the shard has 64 MiB. A thread
//! alone never has one, and its blocks lie where they always did.
//!
//! - The nodes of a shard are nodes of the core's table, used through a view that may touch only them. So a segment goes
//!   back to the core at any time, *with the blocks in use*: its nodes take the place of its one node, and its free ends
//!   join the free memory beside them. No block or key changes. So a shard is one more thing that a thread caches: where a
//!   cache is emptied, for a refusal, a trim, the end of a thread or of the heap, the shard is dissolved, and the core is
//!   as if there had been none. There is no second place to search, to draw, to count or to close.
//! - Two nodes share a cache line, and processors fetch lines in pairs. Where two shards had nodes in the same pair, each
//!   change took the lines from the other thread's CPU, and two threads made 1.2 to 1.4 times the operations of one instead
//!   of 1.7 to 1.8 (docs/performance-heap.md). So a shard gets all four nodes of a pair (`ranges/nodes/lend.rs`). Vacant nodes
//!   that shards return are kept in a bit map of the table, where whole pairs are found again. The table grows for the sake of whole
//!   pairs only as long as the core has few vacant nodes.
//! - Where the core has no free range that large, the segment is 2 MiB, 1 MiB, 512 KiB or 256 KiB. The free memory of a heap
//!   that was full lies between blocks: with segments of 4 MiB alone, threads found none and allocated 9 to 30 % of the blocks
//!   of "mixed sizes" with 16 threads under the core's lock (docs/performance-heap.md).
//! - A byte for each 256 KiB of addresses names the shard or the core. It is written under the core's lock with the shard's
//!   cache held, and read without a lock. A unit with a block in use only ever goes from a shard to the core. A
//!   thread that reads "core" locks the core. A thread that reads a shard which was dissolved leaves the block in the shard's
//!   post, where the next thread to open it reads again under a lock. Loom has run the three sides in all orders.
//! - Other threads' frees go to the post in batches of up to 32 blocks, or a quarter of what a thread may cache (1 MiB by
//!   default). The shard's thread looks whether there are any before each allocation, and leaves some empty batches in
//!   the post, so that no thread frees memory that another allocated (`cache/shards.rs`).
//! - Segments without a block return when another eighth of the shard is free, 4 MiB at least; all of them when
//!   their thread finds no room, and when shards have more than a quarter of the heap free and it would have to grow. Segments are taken only while
//!   the core has four times as much free, and at least 16 MiB, so near its limit a heap works as if there were no shards.
//! - The bound for a refusal counts the free bytes in shards and the bytes in posts: each thread stores the first number
//!   after each change, and a post forgets a block only after the shard has counted it.
//! - A block in another thread's shard is not resized in place.
//!
//! **A refusal** empties all caches only where that can help (`room.rs`, `ranges/refusals.rs`); in a loop it would
//! leave the other threads no cache. A request is compared with a bound on the bytes in all caches, which is read without
//! stopping a thread. If they have small blocks alone, which free memory only as whole slabs, the free ranges around the
//! slabs that could become empty are added up. Otherwise remembered refusals are consulted: the least number of bytes in
//! use in any span that the request would need, at its alignment. To find that number takes a visit of all ranges, so it is
//! found again after one refusal for each 256 ranges. All bounds are safe: no request is refused that the caches would have met.
//! A block of the requested class that another thread caches is always worth taking, so there each refusal empties the caches;
//! after 16 in a row it waits before it returns, with no lock held (`cache/member.rs`, `InVain`).
//!
//! **Without `membarrier`** from the start, both sides execute a fence. If a seccomp filter refuses it later, a thread that
//! needs a barrier waits 50 ms, longer than a CPU holds a store back (`cache/sync.rs` has the argument). From then on the
//! core is not reserved, and caches made later use fences.
//!
//! **Order of locks**: the deferral's turns (`waiting`, `collecting`), `backing` (growth), `members` (threads), a cache, the debug mode's table, the core, a stripe of slabs.
//! Driver calls are made under three locks, never under a cache or the core. Under `backing`: adding and giving back
//! memory. Under the debug mode's: a GPU looks at bytes or scrubs blocks that leave quarantine; when memory is short,
//! quarantine is emptied under `backing` and `members`. Under `deferred`: making, recording and querying events and asking
//! whether a stream is captured, none of which waits. `deferred` is taken with no other lock, except that a heap's picture
//! takes all locks, this one first, and that `waiting` and `collecting` come before it. These come before a cache
//! and the core too, because a block whose work has passed is in no thread's reach until the core has it.
//!
//! **The end** (`membership.rs`, `deferred/deferral.rs`). A block counts itself in its thread's tally, not in a shared counter. When
//! the last handle goes, all caches are taken and summed up; from then on frees go one by one through a lock, and the last
//! one ends the heap. A block that waits for GPU work counts as freed, and the background thread, which collects such
//! blocks, has neither a handle nor a block. So a thread that takes blocks out of `deferred` has a turn (`collecting` or
//! `waiting`) from before that until the core has them; the end takes both turns before it takes the queue, after which nobody finds a
//! block. No thread calls a user's closure within a turn, because the closure may drop the last handle. Threads do not keep a heap alive:
//! each has a weak reference until it ends or joins another heap.
//!
//! **Growth** (`backing/`) takes the place where a block fits, with the free memory beside it, with the least new memory, the
//! lowest of several, and fills it upwards with whole chunks, so that growth costs as much as the bare calls; a place below memory of
//! the heap gets only what is needed. Each chunk is granted before the next is created, because
//! the driver holds other processes up for as long as a call lasts. Between two chunks the thread rests without `backing`
//! (`backing/supply.rs`), if `Growth` has rests or another thread waits for the lock. Meanwhile its addresses are claimed, and its chunks do not belong to the heap: all of them join
//! it, or none. A thread that is refused while such growth rests waits for its end, because that may leave room. The heap's
//! limit, the soft limit and a node's share make the last chunk smaller. The soft limit's function is called only for
//! memory that the block itself needs. Where chunks do not join (they can be shared, or are registered with the driver), a block
//! that finds no room under a limit or on the nodes gets the place of idle chunks: `room.rs` takes those out of the core
//! that lie in the lowest place for it (`backing/make.rs`), or if that is too little memory all of them, gives them back without leaving `backing`, and growth is tried once more. The core's bounds
//! of refusals count holes and idle memory together for requests that do not fit into the smallest chunk. No range is larger than 1 TiB − 2 MiB, nor crosses a multiple of that; chunks end
//! there too.
//!
//! **Growth in advance** (`grower.rs`) is a thread of the heap. Allocating threads store how much memory is left in a
//! word that it reads without the lock, and wake it if that is too little. While the heap grows, and half a second longer,
//! it looks each millisecond by itself, because a wakeup takes longer than an allocation. It also grows the core's table,
//! because the kernel takes microseconds to give a page. After each chunk it leaves `backing` for a moment, so that a
//! waiting thread gets memory after one chunk, not after all.
//!
//! **Decay** (`grower.rs`) is a thread that reads the high-water mark of the bytes in use eight times in the
//! configured time. Memory above the highest of the last eight marks goes back by `trim`, which leaves `backing` after each
//! chunk. The measure is the high-water mark, not which chunk was idle: blocks move from chunk to chunk while a program
//! needs the same number of bytes.
//!
//! **The debug mode** (`debug/`) is a table of all blocks under one lock, and patterns in their bytes. Threads join no heap
//! in debug mode, so each allocation finds no cache and takes the slow path: the fast path has no branch for it. Freed
//! blocks go through a queue, the quarantine, which is emptied wherever every cache would be, so it fails no allocation.
//! The CPU writes and reads the bytes, or a GPU if the CPU may not write. Reports are delivered with no lock held, because
//! the callback may use the heap; damage is repaired, so it is reported once. The driver's refusals are logged where they
//! happen, under `backing` too.
//!
//! **Release after GPU work** records an event when the block is freed. Blocks come back when the heap would have to grow,
//! or when asked. Only three wait for a GPU: the heap's end, because unmapped memory must not be touched,
//! `Heap::collect_all`, and with `wait_for_gpu` an allocation that would fail otherwise. Waiting is not the default: the
//! work may wait for the allocating thread, and a program can act on an error, not on a hang.
//!
//! **A block changes its size** in one function (`resize.rs`): a small one within its class, a range by taking the free
//! memory right behind it or by giving its own end back. Collections know a block by its layout alone, so they resize it
//! only where the new layout names the same class, or again a range. Otherwise their bytes are copied.
#![deny(missing_docs)]
#![cfg_attr(feature = "nightly", feature(allocator_api))]

#[cfg(any(feature = "allocator-api2", feature = "nightly"))]
mod alloc_api;
mod alloc_path;
mod arena;

mod backing;
mod block;
mod bytes;
mod cache;
mod classes;
pub mod debug;
mod deferred;
#[cfg(all(test, not(any(loom, miri))))]
#[path = "../../tests/support/fork.rs"]
mod fork_check;
mod grower;
mod growth;
mod heap;
mod inner;
mod membership;
mod occupancy;
mod on_stream;
mod options;
#[cfg(feature = "pictures")]
mod picture;
mod piece;
mod ranges;
mod raw;
mod release;
mod reports;
mod resize;
mod room;
mod shards;
#[cfg(feature = "share")]
mod share;
mod stats;

pub use arena::{Arena, ArenaBlock};
pub use backing::DriverCounts;
pub use block::{Block, NotFreed};
pub use debug::DebugOptions;
pub use heap::Heap;
pub use occupancy::{Chunk, Occupancy, OccupancyTotals};
pub use on_stream::{OnStream, StreamBlock};
pub use options::{HeapOptions, Pressure, Relief};
pub use raw::RawBlock;
pub use release::NotAllFreed;
pub use stats::{ClassStats, HeapStats};

#[cfg(test)]
use egmem_core::{Buffer, Driver, DriverError, Machine, Topology, proof};
use egmem_core::{
    Error, Event, Growth, Memory, Progress, Result, Stream, buffer, capability, driver, error,
    fork, guard, ledger, memory, per_driver, pinned, size, stream, teardown, topology, vmm,
};
