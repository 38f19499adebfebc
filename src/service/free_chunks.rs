//! The chunks that a node keeps ready, and the choice of chunks for a request: no memory is accessed.

/// Memory that can be handed out.
pub(crate) trait HasBytes {
    /// Returns its bytes.
    fn bytes(&self) -> u64;
}

#[derive(Debug)]
struct Kept<P, C> {
    chunk: C,
    /// The only peer that may have it; `None` for any peer.
    owner: Option<P>,
}

/// Chunks for any peer, and chunks kept for the one peer that has used them.
#[derive(Debug)]
pub(crate) struct FreeChunks<P, C> {
    /// In order of arrival.
    kept: Vec<Kept<P, C>>,
}

impl<P, C> Default for FreeChunks<P, C> {
    fn default() -> Self {
        Self { kept: Vec::new() }
    }
}

impl<P: Clone + Eq, C: HasBytes> FreeChunks<P, C> {
    /// Adds a chunk: for `owner` only, or for any peer.
    pub fn put(&mut self, chunk: C, owner: Option<P>) {
        self.kept.push(Kept { chunk, owner });
    }

    /// Takes at most `count` chunks of at most `bytes` together for `peer`: the largest that fit, its own
    /// first. Returns them and the bytes still missing.
    pub fn take(&mut self, peer: Option<&P>, bytes: u64, count: usize) -> (Vec<C>, u64) {
        self.take_of(bytes, count, |owner| owner.is_none() || owner == peer)
    }

    /// As [`take`](Self::take), but takes only chunks kept for `peer`.
    pub fn take_own(&mut self, peer: &P, bytes: u64, count: usize) -> (Vec<C>, u64) {
        self.take_of(bytes, count, |owner| owner == Some(peer))
    }

    fn take_of(
        &mut self,
        bytes: u64,
        count: usize,
        may: impl Fn(Option<&P>) -> bool,
    ) -> (Vec<C>, u64) {
        let mut order: Vec<usize> = (0..self.kept.len())
            .filter(|&at| may(self.kept[at].owner.as_ref()))
            .collect();
        order.sort_by_key(|&at| {
            let kept = &self.kept[at];
            (kept.owner.is_none(), std::cmp::Reverse(kept.chunk.bytes()))
        });
        let mut missing = bytes;
        let mut chosen = Vec::new();
        for at in order {
            let size = self.kept[at].chunk.bytes();
            if size <= missing && chosen.len() < count {
                missing -= size;
                chosen.push(at);
            }
        }
        chosen.sort_unstable();
        let mut taken: Vec<C> = chosen
            .into_iter()
            .rev()
            .map(|at| self.kept.remove(at).chunk)
            .collect();
        // Odd sizes last.
        taken.sort_by_key(|chunk| std::cmp::Reverse(chunk.bytes()));
        (taken, missing)
    }

    /// Evicts chunks until `bytes` are free or none is left: first those kept for other peers, oldest first,
    /// then those for any peer, smallest first; `peer`'s own last.
    pub fn evict(&mut self, peer: Option<&P>, bytes: u64) -> Vec<C> {
        let mut out = Vec::new();
        let mut freed = 0_u64;
        while freed < bytes {
            let victim = self
                .kept
                .iter()
                .enumerate()
                .min_by_key(|(at, kept)| match &kept.owner {
                    Some(owner) if Some(owner) != peer => (0, *at as u64),
                    None => (1, kept.chunk.bytes()),
                    Some(_) => (2, *at as u64),
                })
                .map(|(at, _)| at);
            let Some(at) = victim else { break };
            let chunk = self.kept.remove(at).chunk;
            freed = freed.saturating_add(chunk.bytes());
            out.push(chunk);
        }
        out
    }

    /// Evicts chunks that `which` selects, oldest first, until `bytes` are free or none is left.
    pub fn evict_some(&mut self, bytes: u64, which: impl Fn(&C) -> bool) -> Vec<C> {
        let mut freed = 0_u64;
        let evicted = self.kept.extract_if(.., |kept| {
            let take = freed < bytes && which(&kept.chunk);
            if take {
                freed = freed.saturating_add(kept.chunk.bytes());
            }
            take
        });
        evicted.map(|kept| kept.chunk).collect()
    }

    /// Returns the bytes for any peer.
    pub fn warm(&self) -> u64 {
        self.sum(|kept| kept.owner.is_none())
    }

    /// Returns the bytes kept for single peers.
    pub fn kept(&self) -> u64 {
        self.sum(|kept| kept.owner.is_some())
    }

    /// Returns the number of chunks.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Takes all chunks.
    pub fn drain(&mut self) -> Vec<C> {
        self.kept.drain(..).map(|kept| kept.chunk).collect()
    }

    fn sum(&self, which: impl Fn(&Kept<P, C>) -> bool) -> u64 {
        let which = self.kept.iter().filter(|kept| which(kept));
        which.fold(0, |sum, kept| sum.saturating_add(kept.chunk.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Chunk(usize, u64);

    impl HasBytes for Chunk {
        fn bytes(&self) -> u64 {
            self.1
        }
    }

    proptest! {
        #[test]
        fn a_request_takes_its_own_or_anybodys_and_no_byte_too_much(
            chunks in proptest::collection::vec((1_u64..20, prop::option::of(0_u8..3)), 0..30),
            asks in proptest::collection::vec((prop::option::of(0_u8..3), 0_u64..60, 0_usize..9, any::<bool>()), 0..12),
        ) {
            let mut free = FreeChunks::default();
            for (id, &(bytes, owner)) in chunks.iter().enumerate() {
                free.put(Chunk(id, bytes), owner);
            }
            let mut gone = Vec::new();
            for (peer, bytes, count, evict) in asks {
                let before = free.warm() + free.kept();
                let out = if evict {
                    let out = free.evict(peer.as_ref(), bytes);
                    let sum: u64 = out.iter().map(HasBytes::bytes).sum();
                    prop_assert!(sum >= bytes || free.len() == 0);
                    out
                } else {
                    let (out, missing) = free.take(peer.as_ref(), bytes, count);
                    let sum: u64 = out.iter().map(HasBytes::bytes).sum();
                    prop_assert_eq!(sum + missing, bytes);
                    prop_assert!(out.len() <= count);
                    for Chunk(id, _) in &out {
                        let owner = chunks[*id].1;
                        prop_assert!(owner.is_none() || owner == peer);
                    }
                    out
                };
                let sum: u64 = out.iter().map(HasBytes::bytes).sum();
                prop_assert_eq!(free.warm() + free.kept() + sum, before);
                gone.extend(out);
            }
            gone.extend(free.drain());
            gone.sort_by_key(|chunk| chunk.0);
            let all: Vec<_> = chunks.iter().enumerate().map(|(id, &(bytes, _))| Chunk(id, bytes)).collect();
            prop_assert_eq!(gone, all, "every chunk is somewhere, once");
        }
    }

    #[test]
    fn the_largest_are_taken_first_and_other_peers_are_evicted_first() {
        let mut free = FreeChunks::default();
        for (id, (bytes, owner)) in [
            (4, None),
            (8, None),
            (2, Some('a')),
            (8, Some('b')),
            (8, None),
        ]
        .into_iter()
        .enumerate()
        {
            free.put(Chunk(id, bytes), owner);
        }
        let (taken, missing) = free.take(Some(&'a'), 21, 9);
        assert_eq!(
            taken.iter().map(HasBytes::bytes).collect::<Vec<_>>(),
            [8, 8, 2]
        );
        assert_eq!(missing, 3);
        assert_eq!((free.warm(), free.kept()), (4, 8));
        assert_eq!(free.take_own(&'a', 9, 9), (Vec::new(), 9));
        assert_eq!(free.evict_some(9, |chunk| chunk.1 > 8), []);
        assert_eq!(free.evict(Some(&'a'), 1), [Chunk(3, 8)]);
        assert_eq!(free.evict(None, 1), [Chunk(0, 4)]);
    }
}
