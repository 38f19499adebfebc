//! Random tokens that contain their look-up key, so that only one comparison is made, in constant time.

use zeroize::Zeroizing;

use crate::driver::random;
use crate::protocol::Secret;
use crate::{Error, Result};

/// Random bytes in a token, after the 8 bytes of its key.
const RANDOM: usize = 32;

/// Creates a token for `key`.
pub(super) fn mint(key: u64) -> Result<Secret> {
    let random = random::<RANDOM>().map(Zeroizing::new);
    let random = random.map_err(|e| Error::system("reading random bytes", &e))?;
    let mut bytes = Zeroizing::new([0; 8 + RANDOM]);
    bytes[..8].copy_from_slice(&key.to_be_bytes());
    bytes[8..].copy_from_slice(&random[..]);
    // 40 bytes are never too many for a secret.
    Secret::new(&bytes[..]).ok_or_else(|| Error::invalid("token", "it is too long"))
}

/// Returns the key in a possible token; knowing the key does not reveal the token.
pub(super) fn key(token: &Secret) -> Option<u64> {
    let bytes = token.expose();
    if bytes.len() != 8 + RANDOM {
        return None;
    }
    bytes.first_chunk().map(|key| u64::from_be_bytes(*key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_name_their_key() {
        let (one, two) = (mint(7).unwrap(), mint(7).unwrap());
        assert_ne!(one, two);
        assert_eq!((key(&one), key(&two)), (Some(7), Some(7)));
        assert_eq!(key(&Secret::new(&[0; 8]).unwrap()), None);
        assert_eq!(key(&Secret::new(&[]).unwrap()), None);
    }
}
