//! Which thread's shard each part of the addresses belongs to, and where other threads leave blocks that they free
//! there.
//!
//! A thread divides its segments, ranges of the core, into blocks without it:
//!
//! ```text
//! core:   … ─ in use ─┬─────── segment, in use ────────┬─ free ─ …
//! shard:        first ├─ in use ─┬─ free ─┬─ in use ───┤ last
//! ```
//!
//! A shard's nodes lie in the core's table. So a segment can return to the core at any time, with blocks in
//! use: its nodes take the place of the one node that it was, and free memory at its ends joins the free memory
//! beside it. No block has to be freed first, and no block changes.
//!
//! A unit of addresses changes
//! hands only while the core's lock is held: from the core to a shard when all of it is free, and back at any
//! time, while the thread's cache is held too. So a unit with a block in use goes from a shard to the core at
//! most. A thread that frees a block therefore reads, without a lock, one of two things:
//!
//! - *the core's*: it stays so until the block is free;
//! - *a shard's*, perhaps no longer: the block goes to the shard's [`Post`]. The shard's thread opens it while it
//!   has its cache, when each unit's owner is known for certain, and passes on the blocks that are the core's by
//!   then.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use crate::cache::inbox::{Inbox, Node};
use crate::cache::sync::{AtomicU8, AtomicU64, Ordering};
use crate::classes::GRANULE;
use crate::piece::Extent;
use crate::ranges::Ranges;

/// The size and alignment of the parts that change hands, in bytes. With larger ones threads would find no free
/// memory to divide between the blocks of others; each takes a byte.
pub(crate) const UNIT: u64 = 256 << 10;

/// How many shards a heap can have, and 1: no shard is number 0, the core.
const SHARDS: usize = 256;

/// How many empty batches a post keeps.
const EMPTY: usize = 8;

/// A heap's shards.
pub(crate) struct Shards {
    /// The shard of each unit; made with the first shard.
    owners: OnceLock<Box<[AtomicU8]>>,
    /// How many units there are.
    units: usize,
    posts: Box<[OnceLock<Arc<Post>>]>,
}

/// A thread's shard.
// On cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[repr(align(128))]
pub(crate) struct Own {
    pub(crate) id: u8,
    /// Its segments.
    pub(crate) shard: Ranges,
    pub(crate) post: Arc<Post>,
    /// With more free bytes than this, segments without a block are looked for.
    pub(crate) look_at: u64,
    /// How many more requests go to the core before it is asked for a segment again.
    pub(crate) hold_off: u32,
}

/// Blocks of a shard that other threads freed. Later users of the shard's number have the same post.
pub(crate) struct Post {
    inbox: Inbox<Batch>,
    /// Some empty batches, for those who send more.
    #[expect(clippy::vec_box, reason = "they are sent as boxes")]
    empty: Mutex<Vec<Box<Node<Batch>>>>,
    /// How many bytes there are, or more.
    bytes: AtomicU64,
}

impl Shards {
    /// Creates the state of a heap with addresses below `limit`, in bytes, without shards.
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            owners: OnceLock::new(),
            units: limit.div_ceil(UNIT) as usize,
            posts: (0..SHARDS).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Returns whether there ever was a shard.
    #[inline]
    pub(crate) fn are_used(&self) -> bool {
        self.owners.get().is_some()
    }

    /// Returns the shard that a block in use belongs to; 0: the core.
    #[inline]
    pub(crate) fn of(&self, offset: u64) -> u8 {
        // Relaxed: the thread that allocated the block saw that the unit was its own, so this reads that or a
        // later owner. A thread that reads that the core has it locks the core next.
        let Some(owners) = self.owners.get() else {
            return 0;
        };
        let owner = owners.get((offset / UNIT) as usize);
        owner.map_or(0, |owner| owner.load(Ordering::Relaxed))
    }

    /// Sets the owner of a range of whole units. The caller holds the core's lock and the shard's cache.
    pub(crate) fn set(&self, range: Range<u64>, owner: u8) {
        let owners = self.owners.get().map_or(&[][..], |owners| owners);
        let units = (range.start / UNIT) as usize..(range.end / UNIT) as usize;
        let units = owners.get(units).unwrap_or_default();
        units
            .iter()
            .for_each(|unit| unit.store(owner, Ordering::Relaxed));
    }

    /// Returns the post of a shard that now has this number.
    pub(crate) fn open(&self, id: u8) -> Arc<Post> {
        let owners = || (0..self.units).map(|_| AtomicU8::new(0)).collect();
        self.owners.get_or_init(owners);
        let post = self.posts[usize::from(id)].get_or_init(|| {
            Arc::new(Post {
                inbox: Inbox::new(),
                empty: Mutex::default(),
                bytes: AtomicU64::new(0),
            })
        });
        Arc::clone(post)
    }

    /// Returns an empty batch for blocks of a shard that exists or existed.
    pub(crate) fn empty_batch(&self, id: u8) -> Box<Node<Batch>> {
        let post = self.posts[usize::from(id)].get();
        // Not worth waiting for.
        let used = post.and_then(|post| post.empty.try_lock().ok()?.pop());
        used.unwrap_or_else(Batch::new)
    }

    /// Leaves blocks for a shard that exists or existed.
    pub(crate) fn send(&self, id: u8, batch: Box<Node<Batch>>) {
        if let Some(post) = self.posts[usize::from(id)].get() {
            post.push(batch);
        }
    }

    /// Leaves one block for a shard that exists or existed.
    pub(crate) fn send_one(&self, id: u8, extent: Extent) {
        let mut batch = self.empty_batch(id);
        batch.item.push(extent);
        self.send(id, batch);
    }

    /// Iterates over all posts.
    pub(crate) fn posts(&self) -> impl Iterator<Item = &Post> {
        self.posts.iter().filter_map(|post| Some(&**post.get()?))
    }
}

impl Post {
    fn push(&self, batch: Box<Node<Batch>>) {
        let bytes = batch.item.granules * GRANULE;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.inbox.push_node(batch);
    }

    /// Returns whether there are no blocks; they may come at any time.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.inbox.is_empty()
    }

    /// Takes all blocks and calls `put` with each. Only then does [`bytes`](Self::bytes) forget them.
    pub(crate) fn open(&self, mut put: impl FnMut(Extent)) {
        let mut taken = self.inbox.take_all();
        while let Some(mut batch) = taken.next_node() {
            let bytes = batch.item.granules * GRANULE;
            batch.item.empty(&mut put);
            // Releases where they are now, to a thread that misses them here.
            self.bytes.fetch_sub(bytes, Ordering::Release);
            if let Ok(mut empty) = self.empty.try_lock()
                && empty.len() < EMPTY
            {
                empty.push(batch);
            }
        }
    }

    /// Returns the bytes of all blocks here, or more.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }
}

/// In every order of events (`ci/loom`).
#[cfg(all(test, loom))]
mod under_loom {
    use loom::sync::Mutex;
    use loom::thread;

    use super::*;
    use crate::ranges::RangeId;

    const BLOCK: Extent = Extent::new(0, RangeId::from_number(1), 16);

    /// A side that may have the block's unit, and how often the block was freed there.
    #[derive(Default)]
    struct Side {
        has: bool,
        freed: u32,
    }

    impl Side {
        fn free(&mut self) {
            assert!(self.has, "the block is another's");
            self.freed += 1;
        }
    }

    /// A shard that has the unit, and the core.
    struct Both {
        shards: Shards,
        id: u8,
        post: Arc<Post>,
        own: Mutex<Side>,
        core: Mutex<Side>,
    }

    impl Both {
        fn new() -> loom::sync::Arc<Self> {
            let shards = Shards::new(UNIT);
            let (id, post) = (1, shards.open(1));
            shards.set(0..UNIT, id);
            let own = Side {
                has: true,
                freed: 0,
            };
            loom::sync::Arc::new(Self {
                shards,
                id,
                post,
                own: Mutex::new(own),
                core: Mutex::default(),
            })
        }

        /// Another thread's free.
        fn free(&self) {
            match self.shards.of(BLOCK.offset) {
                0 => self.core.lock().unwrap().free(),
                id => self.shards.send_one(id, BLOCK),
            }
        }

        /// The shard's thread opens its post.
        fn open(&self) {
            let mut own = self.own.lock().unwrap();
            self.post.open(|block| match self.shards.of(block.offset) {
                id if id == self.id => own.free(),
                _ => self.core.lock().unwrap().free(),
            });
        }

        /// A thread that holds the shard's cache returns the unit to the core.
        fn dissolve(&self) {
            let mut own = self.own.lock().unwrap();
            let mut core = self.core.lock().unwrap();
            self.shards.set(0..UNIT, 0);
            core.has = std::mem::take(&mut own.has);
            self.open_for(&mut core);
        }

        fn open_for(&self, core: &mut Side) {
            self.post.open(|block| {
                assert_eq!(self.shards.of(block.offset), 0);
                core.free();
            });
        }

        fn freed(&self) -> u32 {
            let mut core = self.core.lock().unwrap();
            if core.has {
                self.open_for(&mut core);
            }
            assert_eq!(self.post.bytes(), 0);
            core.freed + self.own.lock().unwrap().freed
        }
    }

    #[test]
    fn a_block_is_freed_once_where_its_unit_is() {
        loom::model(|| {
            let both = Both::new();
            let other = {
                let both = both.clone();
                thread::spawn(move || both.free())
            };
            both.dissolve();
            other.join().unwrap();
            assert_eq!(both.freed(), 1);
        });
    }

    #[test]
    fn a_post_is_opened_while_its_shard_is_dissolved() {
        loom::model(|| {
            let both = Both::new();
            let [other, thread] = [Both::free, Both::open].map(|run| {
                let both = both.clone();
                thread::spawn(move || run(&both))
            });
            both.dissolve();
            other.join().unwrap();
            thread.join().unwrap();
            assert_eq!(both.freed(), 1);
        });
    }

    /// `Front::cached_bound` adds up these bytes in the same order.
    #[test]
    fn a_block_on_its_way_from_the_post_to_the_shard_counts() {
        loom::model(|| {
            let both = Both::new();
            both.free();
            let free = loom::sync::Arc::new(AtomicU64::new(0));
            let thread = {
                let (both, free) = (both.clone(), free.clone());
                thread::spawn(move || {
                    let block = u64::from(BLOCK.granules()) * GRANULE;
                    both.post.open(|_| free.store(block, Ordering::Relaxed));
                })
            };
            let posted = both.post.bytes();
            assert!(posted + free.load(Ordering::Relaxed) >= u64::from(BLOCK.granules()) * GRANULE);
            thread.join().unwrap();
        });
    }
}

/// How many batches a thread fills at a time.
const BATCHES: usize = 8;
/// A batch is sent with so many blocks, or with this part of the bytes that the thread may cache.
pub(super) const FULL: usize = 32;
const PART: u64 = 4;

/// Blocks of one shard. Each new batch of the same shard uses one that its thread has emptied, so that threads do
/// not allocate memory that others free.
pub(crate) struct Batch {
    pub(super) granules: u64,
    pub(super) blocks: Vec<Extent>,
}

impl Batch {
    pub(super) fn new() -> Box<Node<Self>> {
        Node::new(Self {
            granules: 0,
            blocks: Vec::with_capacity(FULL),
        })
    }

    pub(super) fn push(&mut self, extent: Extent) {
        self.granules += u64::from(extent.granules());
        self.blocks.push(extent);
    }

    /// Calls `put` with each block; keeps the vector's room.
    pub(super) fn empty(&mut self, put: impl FnMut(Extent)) {
        self.granules = 0;
        self.blocks.drain(..).for_each(put);
    }
}

/// A thread's batches, each with its shard.
#[derive(Default)]
pub(super) struct Outgoing {
    batches: [(u8, Option<Box<Node<Batch>>>); BATCHES],
    granules: u64,
}

impl Outgoing {
    /// Adds a block of another thread's shard. The batches have at most `most` granules together.
    pub(super) fn add(&mut self, shard: u8, extent: Extent, most: u64, shards: &Shards) {
        let at = usize::from(shard) % BATCHES;
        if self.batches[at].0 != shard {
            self.send(at, shards);
        }
        let (of, batch) = &mut self.batches[at];
        *of = shard;
        let batch = &mut batch.get_or_insert_with(|| shards.empty_batch(shard)).item;
        batch.push(extent);
        let full = batch.blocks.len() >= FULL || batch.granules >= most / PART;
        self.granules += u64::from(extent.granules());
        if full || self.granules > most {
            self.send(at, shards);
        }
    }

    fn send(&mut self, at: usize, shards: &Shards) {
        let (shard, batch) = &mut self.batches[at];
        if let Some(batch) = batch.take() {
            self.granules -= batch.item.granules;
            shards.send(*shard, batch);
        }
    }

    /// Takes all blocks.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Extent> + use<> {
        let batches = std::mem::take(self).batches.into_iter();
        let batches = batches.filter_map(|(_, batch)| batch);
        batches.flat_map(|batch| batch.item.blocks)
    }

    /// Iterates over all blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Extent> {
        let batches = self.batches.iter().filter_map(|(_, batch)| batch.as_ref());
        batches.flat_map(|batch| &batch.item.blocks)
    }

    /// Returns the bytes of all blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.granules * GRANULE
    }
}
