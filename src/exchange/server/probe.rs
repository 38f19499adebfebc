//! Places for probe words: in the padding beyond a memory's usable bytes, one for each lease.

use std::collections::BTreeSet;

/// The most places of one memory: the rest of its padding is not used.
const MAX_PLACES: u64 = 65_536;

/// Bytes of a word, and its alignment.
const WORD: u64 = 8;

/// The free places.
#[derive(Debug, Default)]
pub(super) struct Places {
    first: u64,
    count: u64,
    /// Places from here on were never used.
    fresh: u64,
    returned: BTreeSet<u64>,
}

impl Places {
    /// Returns the places between `len` and `padded`.
    pub fn between(len: u64, padded: u64) -> Self {
        let first = len.div_ceil(WORD).saturating_mul(WORD);
        Self {
            first,
            count: (padded.saturating_sub(first) / WORD).min(MAX_PLACES),
            fresh: 0,
            returned: BTreeSet::new(),
        }
    }

    /// Takes a place, in bytes from the memory's start; `None` if there is none left.
    pub fn take(&mut self) -> Option<u64> {
        let index = match self.returned.pop_first() {
            Some(index) => index,
            None if self.fresh < self.count => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return None,
        };
        Some(self.first + index * WORD)
    }

    /// Returns a place.
    pub fn give_back(&mut self, place: u64) {
        self.returned.insert((place - self.first) / WORD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_lie_in_the_padding_and_are_aligned() {
        let mut places = Places::between(13, 40);
        assert_eq!(places.take(), Some(16));
        assert_eq!(places.take(), Some(24));
        assert_eq!(places.take(), Some(32));
        assert_eq!(places.take(), None);
        places.give_back(24);
        assert_eq!(places.take(), Some(24));
        assert_eq!(places.take(), None);
    }

    #[test]
    fn without_room_there_is_none() {
        for (len, padded) in [(40, 40), (33, 40), (39, 40), (u64::MAX, u64::MAX)] {
            assert_eq!(Places::between(len, padded).take(), None, "{len}");
        }
        assert_eq!(Places::between(32, 40).take(), Some(32));
    }
}
