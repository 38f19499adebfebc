//! A rank's bytes in a gather.

use std::fmt;

use super::wiped::wiped_bytes;

/// The most bytes that a rank contributes to one gather.
pub const MAX_GATHER: usize = 64 << 10;

/// The most bytes that all ranks together give to one gather: 16 MiB, that is [`MAX_GATHER`] of each of 256
/// ranks, and 16 KiB of each of 1024.
pub const MAX_GATHER_TOTAL: usize = 16 << 20;

wiped_bytes! {
    /// A rank's bytes in a gather. They may be secret, so they are never displayed, and wiped when dropped.
    #[derive(Clone, PartialEq, Eq)]
    Payload, at most MAX_GATHER
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Payload({} bytes)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{decode, encode};

    #[test]
    fn payloads_are_bounded_and_not_shown() {
        let most = Payload::new(&vec![7; MAX_GATHER]).unwrap();
        assert_eq!(decode::<Payload>(&encode(&most)).unwrap(), most);
        assert!(Payload::new(&vec![7; MAX_GATHER + 1]).is_none());
        // A byte string of one byte more than is allowed.
        let mut long = vec![0x5a, 0, 1, 0, 1];
        long.extend(vec![7; MAX_GATHER + 1]);
        assert!(decode::<Payload>(&long).is_err());
        assert_eq!(
            format!("{:?}", Payload::new(b"key").unwrap()),
            "Payload(3 bytes)"
        );
    }
}
