//! Small blocks that move between threads and the core as one load.

use crate::classes::{CLASSES, Class};

/// The most offsets in a magazine.
pub(crate) const ROUNDS: usize = 64;

/// Bytes in a full magazine of a larger class: 16 blocks of 2 KiB.
const MAGAZINE_BYTES: u64 = 32 << 10;

/// The results of [`Magazine::rounds`]: every free needs one, and a division is slow.
const ROUNDS_OF: [u8; CLASSES] = {
    let mut rounds = [ROUNDS as u8; CLASSES];
    let mut index = 0;
    while index < CLASSES {
        let fit = MAGAZINE_BYTES / Class::from_index(index).bytes();
        if fit < ROUNDS as u64 {
            rounds[index] = fit as u8;
        }
        index += 1;
    }
    rounds
};

/// Small blocks of one class that move between threads and the core as one load (Bonwick and Adams,
/// "Magazines and Vmem", 2001).
pub(crate) struct Magazine {
    pub(super) len: usize,
    pub(super) offsets: [u64; ROUNDS],
}

impl Magazine {
    pub(crate) fn empty() -> Box<Self> {
        Box::new(Self {
            len: 0,
            offsets: [0; ROUNDS],
        })
    }

    /// Returns how many blocks of `class` fill a magazine.
    #[inline]
    pub(crate) const fn rounds(class: Class) -> usize {
        ROUNDS_OF[class.index()] as usize
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<u64> {
        self.len = self.len.checked_sub(1)?;
        Some(self.offsets[self.len])
    }

    pub(crate) fn offsets(&self) -> &[u64] {
        &self.offsets[..self.len]
    }

    /// Lets `fill` write up to `rounds` offsets; it returns how many it wrote.
    pub(crate) fn fill(&mut self, rounds: usize, fill: impl FnOnce(&mut [u64]) -> usize) {
        self.len = fill(&mut self.offsets[..rounds]);
        // The magazine pops from its end, and the lowest offsets are handed out first.
        self.offsets[..self.len].reverse();
    }
}
