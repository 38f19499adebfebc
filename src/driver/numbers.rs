//! Random bytes, and unique numbers that do not reveal how many there are.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bits of each half of the permuted part: with 32 bits in all, a number takes 5 bytes of CBOR, and a client
/// lists tens of thousands of leases in its hello.
const HALF: u32 = 16;
const MASK: u64 = (1 << HALF) - 1;
const ROUNDS: u32 = 8;

/// Returns each number once: those below 2^32 first, in an order that only its random keys determine, then as
/// many above them in the same order.
///
/// Peers see the numbers of leases, sessions and allocations. A plain counter would reveal to each peer how
/// many the others were given. So a Feistel network permutes the counter. Its round function is the keyed
/// hash of `HashMap` (SipHash), so numbers never repeat and cannot be put in order without the keys. They are
/// not secrets: knowing one grants no right.
#[derive(Debug, Default)]
pub struct Numbers {
    keys: RandomState,
    given: AtomicU64,
}

impl Numbers {
    /// Returns a number that was not returned before.
    pub fn next(&self) -> u64 {
        self.permute(self.given.fetch_add(1, Relaxed))
    }

    fn permute(&self, count: u64) -> u64 {
        let mut halves = (count >> HALF & MASK, count & MASK);
        for round in 0..ROUNDS {
            let mixed = self.keys.hash_one((round, halves.1)) & MASK;
            halves = (halves.1, halves.0 ^ mixed);
        }
        count >> (2 * HALF) << (2 * HALF) | halves.0 << HALF | halves.1
    }
}

/// Returns random bytes from the operating system.
///
/// # Errors
/// The system's, for example `ENOSYS` in a sandbox without `getrandom`.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: the pointer and length are those of `bytes`, which the call writes.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if got == N as isize {
        Ok(bytes)
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_number_comes_twice_and_none_tells_how_many_came_before() {
        const COUNT: usize = 10_000;
        let numbers = Numbers::default();
        let given: Vec<u64> = (0..COUNT).map(|_| numbers.next()).collect();
        assert_eq!(given.iter().collect::<HashSet<_>>().len(), COUNT);
        assert!(given.iter().all(|number| *number < 1 << (2 * HALF)));
        // Half of them are greater than the previous one, and half are in each half of the range.
        let even = |count: usize| (COUNT * 45 / 100..COUNT * 55 / 100).contains(&count);
        assert!(even(given.windows(2).filter(|two| two[0] < two[1]).count()));
        for bit in 0..2 * HALF {
            assert!(even(
                given
                    .iter()
                    .filter(|number| *number >> bit & 1 == 1)
                    .count()
            ));
        }
        let next = numbers.permute((1 << 32) + 7);
        assert_eq!(next, (1 << 32) + numbers.permute(7));
        // Other keys give other numbers.
        assert_ne!(Numbers::default().next(), given[0]);
    }
}
