//! The chunks that a node keeps ready, and the choice of chunks for a request: no memory is accessed.

use std::cmp::Reverse;

use crate::exchange::PeerName;

#[derive(Debug)]
struct FreeChunk<C> {
    chunk: C,
    bytes: u64,
    /// The only peer that may have it; `None` for any peer.
    owner: Option<PeerName>,
    /// Whether it must be zeroed first.
    dirty: bool,
}

/// A reserve's current bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Levels {
    /// Bytes to keep ready for any peer.
    pub target: u64,
    /// All that the service has pinned on the node, including memory in use.
    pub pinned: u64,
    /// Ready for any peer.
    pub warm: u64,
    /// Ready for one peer each.
    pub kept: u64,
    /// Waiting to be zeroed, for any peer.
    pub dirty_warm: u64,
    /// Waiting to be zeroed, for one peer each.
    pub dirty_kept: u64,
}

impl Levels {
    /// Adds a chunk's bytes.
    pub const fn add(&mut self, bytes: u64, for_one: bool, dirty: bool) {
        let sum = match (for_one, dirty) {
            (false, false) => &mut self.warm,
            (true, false) => &mut self.kept,
            (false, true) => &mut self.dirty_warm,
            (true, true) => &mut self.dirty_kept,
        };
        *sum = sum.saturating_add(bytes);
    }

    /// Returns the bytes of all chunks.
    pub const fn all(&self) -> u64 {
        self.warm + self.kept + self.dirty_warm + self.dirty_kept
    }
}

/// Chunks for any peer, and chunks kept for the one peer that has used them, in order of arrival.
#[derive(Debug)]
pub(crate) struct FreeChunks<C>(Vec<FreeChunk<C>>);

impl<C> Default for FreeChunks<C> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<C> FreeChunks<C> {
    /// Adds a chunk: for `owner` only, or for any peer.
    pub fn put(&mut self, chunk: C, bytes: u64, owner: Option<PeerName>, dirty: bool) {
        self.0.push(FreeChunk {
            chunk,
            bytes,
            owner,
            dirty,
        });
    }

    /// Takes the oldest chunk that waits to be zeroed, with its owner.
    pub fn take_dirty(&mut self) -> Option<(C, Option<PeerName>)> {
        let at = self.0.iter().position(|free| free.dirty)?;
        let free = self.0.remove(at);
        Some((free.chunk, free.owner))
    }

    /// Takes chunks of at most `bytes` together whose owners `may` admits: the largest that fit, first those that have an
    /// owner. Returns them and the bytes still missing, which `whole` bytes each can complete to at most `count` chunks.
    pub fn take(
        &mut self,
        bytes: u64,
        (count, whole): (usize, u64),
        may: impl Fn(Option<&PeerName>) -> bool,
    ) -> (Vec<C>, u64) {
        let all = self.0.iter().enumerate();
        let all = all.filter(|(_, kept)| !kept.dirty && may(kept.owner.as_ref()));
        let mut order: Vec<_> = all.collect();
        order.sort_by_key(|(_, kept)| (kept.owner.is_none(), Reverse(kept.bytes)));
        let mut missing = bytes;
        let mut chosen = Vec::new();
        for (at, kept) in order {
            let parts = |rest: u64| chosen.len() as u64 + 1 + rest.div_ceil(whole);
            if kept.bytes <= missing && parts(missing - kept.bytes) <= count as u64 {
                missing -= kept.bytes;
                chosen.push(at);
            }
        }
        let mut taken = self.remove(chosen);
        // Odd sizes last.
        taken.sort_by_key(|kept| Reverse(kept.bytes));
        (taken.into_iter().map(|kept| kept.chunk).collect(), missing)
    }

    /// Evicts chunks until `bytes` are free or none is left: first those kept for other peers, oldest first,
    /// then those for any peer, smallest first; `peer`'s own last.
    pub fn evict(&mut self, peer: Option<&PeerName>, bytes: u64) -> Vec<C> {
        self.evict_by(bytes, |free| match &free.owner {
            Some(owner) if Some(owner) != peer => Some((0, 0)),
            None => Some((1, free.bytes)),
            Some(_) => Some((2, 0)),
        })
    }

    /// Evicts chunks that `which` selects until `bytes` are free or none is left, oldest first. Those that wait to be
    /// zeroed go before the others: that saves the work.
    pub fn evict_some(&mut self, bytes: u64, which: impl Fn(&C) -> bool) -> Vec<C> {
        self.evict_by(bytes, |free| which(&free.chunk).then_some(!free.dirty))
    }

    /// Evicts chunks that have a rank until `bytes` are free or none is left: the lowest rank first, the oldest of equal ones.
    fn evict_by<R: Ord>(
        &mut self,
        bytes: u64,
        rank: impl Fn(&FreeChunk<C>) -> Option<R>,
    ) -> Vec<C> {
        let ranks = self.0.iter().enumerate();
        let ranks = ranks.filter_map(|(at, free)| Some((rank(free)?, at)));
        let mut order: Vec<_> = ranks.collect();
        order.sort_unstable();
        let (mut freed, mut chosen) = (0_u64, Vec::new());
        for (_, at) in order {
            if freed >= bytes {
                break;
            }
            freed = freed.saturating_add(self.0[at].bytes);
            chosen.push(at);
        }
        let evicted = self.remove(chosen).into_iter();
        evicted.map(|free| free.chunk).collect()
    }

    /// Removes the chunks at these places; returns them in order of arrival.
    fn remove(&mut self, mut places: Vec<usize>) -> Vec<FreeChunk<C>> {
        places.sort_unstable();
        let mut all = 0..;
        let is_one = |_: &mut _| {
            all.next()
                .is_some_and(|at| places.binary_search(&at).is_ok())
        };
        self.0.extract_if(.., is_one).collect()
    }

    /// Returns the bytes of all chunks.
    pub fn levels(&self) -> Levels {
        let mut levels = Levels::default();
        for free in &self.0 {
            levels.add(free.bytes, free.owner.is_some(), free.dirty);
        }
        levels
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Chunk(usize, u64);

    fn sum(chunks: &[Chunk]) -> u64 {
        chunks.iter().map(|chunk| chunk.1).sum()
    }

    fn all(free: &FreeChunks<Chunk>) -> u64 {
        let Levels { warm, kept, .. } = free.levels();
        warm + kept
    }

    fn user(uid: u32) -> PeerName {
        PeerName::User(uid)
    }

    proptest! {
        #[test]
        fn a_request_takes_its_own_or_anybodys_and_no_byte_too_much(
            chunks in proptest::collection::vec((1_u64..20, prop::option::of((0_u32..3).prop_map(user))), 0..30),
            asks in proptest::collection::vec((prop::option::of((0_u32..3).prop_map(user)), 0_u64..60, 0_usize..9, any::<bool>()), 0..12),
        ) {
            let mut free = FreeChunks::default();
            for (id, (bytes, owner)) in chunks.iter().enumerate() {
                free.put(Chunk(id, *bytes), *bytes, owner.clone(), false);
            }
            let mut gone = Vec::new();
            for (peer, bytes, count, evict) in asks {
                let before = all(&free);
                let out = if evict {
                    let out = free.evict(peer.as_ref(), bytes);
                    let sum = sum(&out);
                    prop_assert!(sum >= bytes || all(&free) == 0);
                    out
                } else {
                    let (out, missing) = free.take(bytes, (count, 19), |owner| owner.is_none() || owner == peer.as_ref());
                    let sum = sum(&out);
                    prop_assert_eq!(sum + missing, bytes);
                    prop_assert!(out.is_empty() || out.len() as u64 + missing.div_ceil(19) <= count as u64);
                    for Chunk(id, _) in &out {
                        let owner = &chunks[*id].1;
                        prop_assert!(owner.is_none() || *owner == peer);
                    }
                    out
                };
                let sum = sum(&out);
                prop_assert_eq!(all(&free) + sum, before);
                gone.extend(out);
            }
            gone.extend(free.evict(None, u64::MAX));
            gone.sort_by_key(|chunk| chunk.0);
            let all: Vec<_> = chunks.iter().enumerate().map(|(id, (bytes, _))| Chunk(id, *bytes)).collect();
            prop_assert_eq!(gone, all, "every chunk is somewhere, once");
        }
    }

    #[test]
    fn the_largest_are_taken_first_and_other_peers_are_evicted_first() {
        let mut free = FreeChunks::default();
        for (id, (bytes, owner)) in [
            (4, None),
            (8, None),
            (2, Some(user(1))),
            (8, Some(user(2))),
            (8, None),
        ]
        .into_iter()
        .enumerate()
        {
            free.put(Chunk(id, bytes), bytes, owner, false);
        }
        let own = user(1);
        let may = |owner: Option<&PeerName>| owner.is_none_or(|owner| *owner == own);
        let (taken, missing) = free.take(21, (9, 8), may);
        assert_eq!(
            taken.iter().map(|chunk| chunk.1).collect::<Vec<_>>(),
            [8, 8, 2]
        );
        assert_eq!(missing, 3);
        let sums = free.levels();
        assert_eq!((sums.warm, sums.kept), (4, 8));
        assert_eq!(
            free.take(9, (9, 8), |owner| owner == Some(&own)),
            (Vec::new(), 9)
        );
        assert_eq!(free.evict_some(9, |chunk| chunk.1 > 8), []);
        assert_eq!(free.evict(Some(&user(1)), 1), [Chunk(3, 8)]);
        assert_eq!(free.evict(None, 1), [Chunk(0, 4)]);
    }

    /// A reserve that was filled while memory was short has small chunks.
    #[test]
    fn small_chunks_leave_room_for_whole_ones() {
        let mut free = FreeChunks::default();
        for id in 0..8 {
            free.put(Chunk(id, 1), 1, None, false);
        }
        // Four small ones would leave no room for what is missing then.
        let (taken, missing) = free.take(10, (4, 4), |_| true);
        assert_eq!((taken.len(), missing), (2, 8));
        let (taken, missing) = free.take(4, (4, 4), |_| true);
        assert_eq!((taken.len(), missing), (4, 0));
        assert_eq!(free.take(17, (4, 4), |_| true), (Vec::new(), 17));
    }

    #[test]
    fn a_chunk_that_waits_to_be_zeroed_is_not_taken_and_evicted_first() {
        let mut free = FreeChunks::default();
        free.put(Chunk(0, 4), 4, Some(user(1)), false);
        free.put(Chunk(1, 4), 4, Some(user(1)), true);
        free.put(Chunk(2, 2), 2, None, true);
        let sums = free.levels();
        assert_eq!((sums.dirty_warm, sums.dirty_kept), (2, 4));
        let (taken, missing) = free.take(10, (9, 8), |_| true);
        assert_eq!((taken, missing), (vec![Chunk(0, 4)], 6));
        free.put(Chunk(3, 4), 4, Some(user(1)), false);
        assert_eq!(free.evict_some(5, |_| true), [Chunk(1, 4), Chunk(2, 2)]);
        assert_eq!(free.take_dirty(), None);
        free.put(Chunk(4, 4), 4, None, true);
        assert_eq!(free.take_dirty(), Some((Chunk(4, 4), None)));
    }
}
