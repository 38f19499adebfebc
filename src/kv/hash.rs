//! A hash for finding damage. It is no protection against anyone who knows it.

/// Returns the hash of words: FNV-1a over whole words, mixed after each.
pub(crate) fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^ hash >> 29
    })
}
