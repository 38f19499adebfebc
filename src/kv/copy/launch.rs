//! The list of a kernel's copies.

use std::mem::size_of_val;
use std::ops::Range;

use crate::gpu::Place;
use crate::memory::CpuView;
use crate::{MemoryError, Stream};

/// The pairs of the first of two launches.
const FIRST: usize = 2048;

/// A job's copies, for a kernel.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    /// Where in the tier's memory a block's bytes lie, and the block.
    pub(crate) pairs: &'a [(u64, u64)],
    /// The address of the tier's memory.
    pub(crate) tier_at: u64,
    /// One or two launches for each.
    pub(crate) groups: Vec<Group>,
    /// From pages to blocks.
    pub(crate) is_load: bool,
    pub(crate) blocks: u32,
    pub(crate) stream: &'a Stream,
}

/// The parts of one size, which one launch copies. The list has two words for each entry of each page: the address in
/// the page, and where the block lies, to which each of `bases` is added.
///
/// Parts of one shape that are the whole page have one entry, and their bases. Others have an entry each, with the
/// address of the block itself: they need not lie side by side in the page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) part_bytes: u64,
    pub(crate) bases: Vec<u64>,
    entries: Vec<Entry>,
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    /// In the page.
    at: u64,
    /// Of block 0.
    base: u64,
    /// The bytes between two blocks.
    stride: u64,
}

impl Group {
    /// Groups the parts of a page by size.
    pub(crate) fn of(places: &[Place]) -> Vec<Self> {
        let Some(first) = places.first() else {
            return Vec::new();
        };
        if places.iter().all(|place| place.shape == first.shape) {
            return vec![Self {
                part_bytes: first.shape.bytes,
                bases: places.iter().map(|place| place.base.0).collect(),
                entries: vec![Entry {
                    at: 0,
                    base: 0,
                    stride: first.shape.stride,
                }],
            }];
        }
        let mut groups: Vec<Self> = Vec::new();
        for place in places {
            let entry = Entry {
                at: place.at,
                base: place.base.0,
                stride: place.shape.stride,
            };
            let part_bytes = place.shape.bytes;
            let same = groups.iter_mut();
            match same
                .into_iter()
                .find(|group| group.part_bytes == part_bytes)
            {
                Some(group) => group.entries.push(entry),
                None => groups.push(Self {
                    part_bytes,
                    bases: vec![0],
                    entries: vec![entry],
                }),
            }
        }
        groups
    }

    /// Returns the entries that `pairs` pages have in the list.
    pub(crate) const fn entries(&self, pairs: usize) -> u64 {
        pairs as u64 * self.entries.len() as u64
    }

    /// Returns the bytes that `pairs` pages and the bases take in the list.
    pub(crate) const fn list_bytes(&self, pairs: usize) -> u64 {
        self.entries(pairs) * 16 + self.bases.len() as u64 * 8
    }

    /// Returns the pairs of each launch. The first launch begins while the CPU writes the rest of a long list.
    pub(crate) fn launches(&self, pairs: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let first = (FIRST / self.entries.len().max(1)).max(1);
        let first = if pairs > 2 * first { first } else { pairs };
        let ranges = [0..first, first..pairs].into_iter();
        ranges.filter(|range| !range.is_empty())
    }
}

impl Launch<'_> {
    /// Returns the bytes of the whole list, of which each group's part begins at a multiple of 16.
    pub(crate) fn list_bytes(&self) -> u64 {
        let bytes = self.groups.iter();
        bytes
            .map(|group| group.list_bytes(self.pairs.len()).next_multiple_of(16))
            .sum()
    }

    /// Writes the entries of a group for a range of pairs.
    ///
    /// # Errors
    /// Those of the view.
    pub(crate) fn write(
        &self,
        view: &CpuView<'_>,
        mut at: u64,
        group: &Group,
        pairs: Range<usize>,
    ) -> Result<(), MemoryError> {
        let mut words = [[0; 2]; 128];
        let mut count = 0;
        for &(page_at, block) in self.pairs.get(pairs).unwrap_or_default() {
            // In the tier, and below the blocks' end.
            let page = self.tier_at + page_at;
            for entry in &group.entries {
                words[count] = [page + entry.at, entry.base + block * entry.stride];
                count += 1;
                if count == words.len() {
                    view.write_at(at, words.as_flattened())?;
                    at += size_of_val(&words) as u64;
                    count = 0;
                }
            }
        }
        view.write_at(at, words[..count].as_flattened())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DevicePtr;
    use crate::gpu::PartShape;
    use egmem_core::pinned::PinnedHost;
    use egmem_core::{Driver, Machine};

    fn place(base: u64, stride: u64, bytes: u64, at: u64) -> Place {
        let (base, shape) = (DevicePtr(base), PartShape { stride, bytes });
        Place { base, shape, at }
    }

    /// Returns the list of a group for pairs of page n, which lies at `page_at(n)`, and block n + 7.
    fn list_of(group: &Group, pages: u64, page_at: impl Fn(u64) -> u64) -> Vec<[u64; 2]> {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let pairs: Vec<_> = (0..pages)
            .map(|number| (page_at(number), number + 7))
            .collect();
        let launch = Launch {
            pairs: &pairs,
            tier_at: 1 << 40,
            groups: Vec::new(),
            is_load: true,
            blocks: 1,
            stream: &stream,
        };
        let list = PinnedHost::new(&driver, 0, 32 << 10).unwrap();
        launch
            .write(&list.cpu(), 16, group, 0..pairs.len())
            .unwrap();
        let mut words = vec![[0_u64; 2]; group.entries(pairs.len()) as usize + 2];
        list.cpu().read_at(0, words.as_flattened_mut()).unwrap();
        assert_eq!(words[0], [0; 2]);
        assert_eq!(words.pop(), Some([0; 2]), "nothing is written beyond");
        words.split_off(1)
    }

    #[test]
    fn a_list_has_each_page_and_its_block() {
        let places = [place(32, 4096, 48, 0), place(1 << 20, 4096, 48, 48)];
        let groups = Group::of(&places);
        assert_eq!(groups.len(), 1);
        assert_eq!((groups[0].part_bytes, groups[0].entries(3)), (48, 3));
        assert_eq!(groups[0].bases, [32, 1 << 20]);
        // Pages with gaps between them, and not in the order of their numbers.
        let page_at = |page: u64| page % 7 * (1 << 32) + page * 112;
        let expected: Vec<_> = (0..300_u64)
            .map(|page| [(1 << 40) + page_at(page), (page + 7) * 4096])
            .collect();
        assert_eq!(list_of(&groups[0], 300, page_at), expected);
    }

    #[test]
    fn parts_of_different_sizes_have_their_own_place_in_page_and_block() {
        // In turn, as the caches of attention and of its index.
        let places = [
            place(1000, 64, 32, 0),
            place(5000, 16, 16, 32),
            place(2000, 32, 32, 48),
        ];
        let groups = Group::of(&places);
        let sizes: Vec<_> = groups
            .iter()
            .map(|group| (group.part_bytes, group.entries(1)))
            .collect();
        assert_eq!(sizes, [(32, 2), (16, 1)]);
        assert!(groups.iter().all(|group| group.bases == [0]));
        let page = |number: u64| (1_u64 << 40) + number * 80;
        let expected: Vec<_> = (0..100)
            .flat_map(|n| {
                [
                    [page(n), 1000 + (n + 7) * 64],
                    [page(n) + 48, 2000 + (n + 7) * 32],
                ]
            })
            .collect();
        assert_eq!(list_of(&groups[0], 100, |n| n * 80), expected);
        assert_eq!(
            list_of(&groups[1], 1, |n| n * 80),
            [[page(0) + 32, 5000 + 7 * 16]]
        );
    }

    #[test]
    fn every_pair_is_in_one_launch() {
        let group = &Group::of(&[place(0, 16, 16, 0)])[0];
        let launches = |pairs| {
            let ranges = group.launches(pairs);
            ranges
                .map(|range| (range.start, range.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(launches(FIRST), [(0, FIRST)]);
        let last = (FIRST, 2 * FIRST + 1);
        assert_eq!(launches(last.1), [(0, FIRST), last]);
        assert_eq!(launches(1), [(0, 1)]);
    }
}
