//! Bytes that grant a right: never displayed, wiped when dropped.

use std::fmt;

use subtle::ConstantTimeEq;

use super::wiped::wiped_bytes;

/// The most bytes of a secret.
pub const MAX_SECRET: usize = 64;

wiped_bytes! {
    /// A fabric handle, a ticket or a session's token. Comparison takes constant time.
    #[derive(Clone)]
    Secret, at most MAX_SECRET
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(redacted)")
    }
}
