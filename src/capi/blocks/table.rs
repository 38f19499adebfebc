//! Which blocks are in use, by their offset: one entry for each page of the heap, read and written without a lock.
//!
//! A C program frees a block by its address alone, so the other fields of [`RawBlock`] are kept here. At most one
//! large block begins in a page, or small ones with one key and one size, as [`RawBlock::PAGE`] says. So a page's
//! entry has the key and the size once, and one bit for each place where a block can begin. A bit is set exactly
//! while a block that begins there is in use: a free of any other address, and a second free, find no bit.
//!
//! Entries of one page are written by the threads that allocate and free its blocks. The thread that gets a large
//! block is alone in its page, so it stores the bit; all other changes of bits are atomic operations. Key and size
//! are written before a bit is set, with release, and read after it was seen, with acquire: a program that frees a
//! block twice, in a race with an allocation, gets the key of the block whose bit it takes.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use egmem::heap::RawBlock;

use super::mapping::{Mapping, Zeroed};

/// A page's blocks.
#[derive(Default)]
#[repr(align(32))]
struct Page {
    /// A bit for each multiple of [`RawBlock::MIN_ALIGN`] in the page: whether a block in use begins there.
    begins: [AtomicU64; 2],
    key: AtomicU64,
    bytes: AtomicU64,
}

// SAFETY: atomic numbers, of which every value is valid.
unsafe impl Zeroed for Page {}

impl Page {
    /// Returns the block that begins at `offset`, whose bit the caller has seen set.
    #[inline]
    fn block(&self, offset: u64) -> RawBlock {
        #[cfg(test)]
        tests::before_an_entry_is_read();
        RawBlock {
            offset,
            bytes: self.bytes.load(Relaxed),
            key: self.key.load(Relaxed),
        }
    }
}

/// The table: an entry for each page, found by one addition, because every free looks it up.
pub(crate) struct Table {
    pages: Mapping<Page>,
}

/// A place in a page: the word with its bit, and the bit.
#[inline]
fn bit_of(offset: u64) -> (usize, u64) {
    let unit = offset % RawBlock::PAGE / RawBlock::MIN_ALIGN;
    ((unit / 64) as usize, 1 << (unit % 64))
}

impl Table {
    /// Creates a table for offsets below `limit`, in bytes. It has addresses for all entries, and memory for those
    /// that are written.
    pub(super) fn new(limit: u64) -> io::Result<Self> {
        let pages = usize::try_from(limit.div_ceil(RawBlock::PAGE)).unwrap_or(usize::MAX);
        let pages = Mapping::new(pages)?;
        Ok(Self { pages })
    }

    /// Notes a block, which is in use from now on. Returns `false` if it is not below the limit.
    #[inline]
    pub(super) fn put(&self, raw: RawBlock) -> bool {
        let number = (raw.offset / RawBlock::PAGE) as usize;
        let Some(page) = self.pages.get(number) else {
            return false;
        };
        let (word, bit) = bit_of(raw.offset);
        page.key.store(raw.key, Relaxed);
        page.bytes.store(raw.bytes, Relaxed);
        match raw.is_small() {
            true => {
                page.begins[word].fetch_or(bit, Release);
            }
            false => page.begins[word].store(bit, Release),
        }
        true
    }

    /// Returns the block in use that begins at `offset`.
    #[inline]
    pub(super) fn get(&self, offset: u64) -> Option<RawBlock> {
        let page = self.page(offset)?;
        let (word, bit) = bit_of(offset);
        let in_use = page.begins[word].load(Acquire) & bit != 0;
        in_use.then(|| page.block(offset))
    }

    #[inline]
    fn page(&self, offset: u64) -> Option<&Page> {
        if !offset.is_multiple_of(RawBlock::MIN_ALIGN) {
            return None;
        }
        self.pages.get((offset / RawBlock::PAGE) as usize)
    }

    /// Removes the block in use that begins at `offset`, and returns it.
    ///
    /// Of two threads that free it at once, one finds no bit. Key and size are read after the bit was taken: until
    /// then the page may be another block's, if an earlier free of this one was followed by an allocation.
    #[inline]
    pub(super) fn take(&self, offset: u64) -> Option<RawBlock> {
        let page = self.page(offset)?;
        let (word, bit) = bit_of(offset);
        let before = page.begins[word].fetch_and(!bit, Acquire);
        (before & bit != 0).then(|| page.block(offset))
    }

    /// Returns the most bytes of memory that the table has for a heap that had `backed` bytes at once.
    pub(super) fn metadata(backed: u64) -> u64 {
        backed.div_ceil(RawBlock::PAGE) * size_of::<Page>() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::Layout;
    use std::cell::Cell;
    use std::collections::BTreeMap;
    use std::rc::Rc;

    use egmem::driver::NodeId;
    use egmem::{Block, Driver, Heap, Machine};

    use super::*;

    #[test]
    fn the_table_has_exactly_the_blocks_in_use() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
        let table = Table::new(heap.limit()).unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        let mut live: BTreeMap<u64, RawBlock> = BTreeMap::new();
        for step in 0..20_000 {
            if live.len() > 500 || (!live.is_empty() && random.bool()) {
                let index = random.usize(..live.len());
                let (&offset, &raw) = live.iter().nth(index).unwrap();
                assert_eq!(table.take(offset), Some(raw));
                assert_eq!(table.take(offset), None);
                live.remove(&offset);
                // SAFETY: the list had it, so it was in use.
                drop(unsafe { Block::from_raw(&heap, raw) });
            } else {
                let bytes = match random.u8(..3) {
                    0 => random.usize(1..=2048),
                    1 => random.usize(2049..8000),
                    _ => random.usize(1..100_000),
                };
                let layout = Layout::from_size_align(bytes, 16 << random.u8(..5)).unwrap();
                // As `Blocks` does.
                let usable = match Heap::usable_size(layout) {
                    small @ ..=2048 => small as usize,
                    _ => bytes,
                };
                let layout = Layout::from_size_align(usable, layout.align()).unwrap();
                let raw = heap.allocate(layout).unwrap().into_raw();
                assert!(table.put(raw));
                live.insert(raw.offset, raw);
            }
            let probe = random.u64(..heap.limit());
            assert_eq!(table.get(probe), live.get(&probe).copied());
            if step % 1000 == 0 {
                assert!(live.values().all(|raw| table.get(raw.offset) == Some(*raw)));
            }
        }
        for raw in live.into_values() {
            // SAFETY: the list had it, so it was in use.
            drop(unsafe { Block::from_raw(&heap, raw) });
        }
    }

    #[test]
    fn beyond_the_limit_there_is_nothing() {
        let table = Table::new(1 << 20).unwrap();
        assert_eq!(table.take(u64::MAX - 15), None);
        let raw = RawBlock {
            offset: 1 << 40,
            bytes: 4096,
            key: 0,
        };
        assert!(!table.put(raw));
        assert_eq!(table.get(1 << 40), None);
    }

    #[test]
    fn of_two_frees_at_once_one_finds_the_block() {
        let table = Table::new(64 << 20).unwrap();
        let blocks = (0..64 << 20).step_by(4096).map(|offset| RawBlock {
            offset,
            bytes: 4096,
            key: 0,
        });
        let blocks: Vec<RawBlock> = blocks.collect();
        for _ in 0..20 {
            assert!(blocks.iter().all(|raw| !raw.is_small() && table.put(*raw)));
            let start = std::sync::Barrier::new(2);
            let free_all = || {
                start.wait();
                let found = blocks.iter().filter(|raw| table.take(raw.offset).is_some());
                found.count()
            };
            let found = std::thread::scope(|scope| {
                let other = scope.spawn(free_all);
                free_all() + other.join().unwrap()
            });
            assert_eq!(found, blocks.len());
        }
    }

    thread_local! {
        static OTHER_THREAD: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
    }

    /// Lets "another thread" run just before an entry is read.
    pub(super) fn before_an_entry_is_read() {
        if let Some(other) = OTHER_THREAD.take() {
            other();
        }
    }

    #[test]
    fn a_second_free_beside_an_allocation_takes_a_whole_entry() {
        let numbered = |number| RawBlock {
            offset: 4096,
            bytes: 4096 * number,
            key: number,
        };
        let table = Rc::new(Table::new(1 << 20).unwrap());
        assert!(table.put(numbered(1)));
        let other = Rc::clone(&table);
        OTHER_THREAD.set(Some(Box::new(move || {
            // The first free, and an allocation at the same address.
            if let Some(first) = other.take(4096) {
                assert_eq!(first, numbered(1));
                assert!(other.put(numbered(2)));
            }
        })));
        // Either free may be the first: each takes the table's current block.
        let taken = table.take(4096);
        let left = table.get(4096);
        assert_eq!((taken, left), (Some(numbered(1)), None));
    }

    #[test]
    fn threads_share_a_page_of_small_blocks() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
        let table = Table::new(heap.limit()).unwrap();
        let layout = Layout::from_size_align(16, 16).unwrap();
        let all: Vec<RawBlock> = (0..256)
            .map(|_| heap.allocate(layout).unwrap().into_raw())
            .collect();
        std::thread::scope(|scope| {
            for part in all.chunks(64) {
                let table = &table;
                scope.spawn(move || {
                    for _ in 0..50 {
                        part.iter().for_each(|raw| assert!(table.put(*raw)));
                        part.iter()
                            .for_each(|raw| assert_eq!(table.take(raw.offset), Some(*raw)));
                    }
                });
            }
        });
        for raw in all {
            assert_eq!(table.get(raw.offset), None);
            // SAFETY: they are in use; the table only notes them.
            drop(unsafe { Block::from_raw(&heap, raw) });
        }
    }
}
