//! An exporter, as a directory knows it.

use serde::{Deserialize, Serialize};

use crate::Address;
use crate::share::{BootId, InstanceId};

/// The most addresses of one exporter.
pub const MAX_ADDRESSES: usize = 4096;

/// An exporter, as a directory knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Exporter {
    /// Its addresses, as other machines reach it; Unix sockets are for its own machine.
    pub addresses: Vec<Address>,
    /// Its instance.
    pub instance: InstanceId,
    /// Its machine.
    pub boot: BootId,
}

impl Exporter {
    /// Returns the address to connect to from a process on the machine `here`: a Unix socket if the exporter
    /// is on the same machine, otherwise its first TCP address.
    pub fn address(&self, here: BootId) -> Option<&Address> {
        let mut unix = self.addresses.iter().filter(|address| address.is_unix());
        let mut tcp = self.addresses.iter().filter(|address| !address.is_unix());
        if self.boot == here {
            unix.next().or_else(|| tcp.next())
        } else {
            tcp.next()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_sockets_are_for_the_own_machine() {
        let here = BootId::from_bytes([1; 16]);
        let (tcp, unix) = ("tcp://a:1", "unix:/run/x");
        for (addresses, boot, expected) in [
            (&[tcp, unix][..], 1, Some(unix)),
            (&[tcp], 1, Some(tcp)),
            (&[tcp, unix], 2, Some(tcp)),
            (&[unix], 2, None),
        ] {
            let exporter = Exporter {
                addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
                instance: InstanceId::from_bytes([1; 16]),
                boot: BootId::from_bytes([boot; 16]),
            };
            let address = exporter.address(here).map(Address::to_string);
            assert_eq!(address.as_deref(), expected);
        }
    }
}
