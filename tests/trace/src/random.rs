//! Random choices, the same for the same seed.

use egmem::kernels::pattern;

/// SplitMix64.
#[derive(Debug)]
pub(super) struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    pub fn word(&mut self) -> u64 {
        self.drawn += 1;
        pattern(self.seed, self.drawn)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }

    /// True `n` times in 100.
    pub fn percent(&mut self, n: u64) -> bool {
        self.below(100) < n
    }

    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    pub fn some<T: Clone>(&mut self, choices: &[T]) -> Option<T> {
        match choices {
            [] => None,
            _ => Some(choices[self.below(choices.len() as u64) as usize].clone()),
        }
    }
}
