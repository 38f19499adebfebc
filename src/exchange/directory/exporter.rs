//! An exporter, as a directory knows it.

use serde::{Deserialize, Serialize};

use crate::Address;
use crate::share::{BootId, InstanceId};

/// The most addresses of one exporter, and of a fixed directory.
pub const MAX_ADDRESSES: usize = 4096;

/// An exporter, as a directory knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Exporter {
    /// Its addresses, as other machines reach it; Unix sockets are for its own machine.
    pub addresses: Vec<Address>,
    /// Its instance; `None` if the directory does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceId>,
    /// Its machine; `None` if the directory does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootId>,
}

impl Exporter {
    /// Returns an exporter of which only the address is known.
    pub(super) fn at(address: &Address) -> Self {
        Self {
            addresses: vec![address.clone()],
            instance: None,
            boot: None,
        }
    }

    /// Returns the address to connect to from a process on the machine `here`: a Unix socket if the exporter
    /// is on the same machine or nothing else is known, otherwise its first TCP address.
    pub fn address(&self, here: BootId) -> Option<&Address> {
        let unix = || self.addresses.iter().find(|address| address.is_unix());
        let tcp = || self.addresses.iter().find(|address| !address.is_unix());
        match self.boot {
            Some(boot) if boot == here => unix().or_else(tcp),
            Some(_) => tcp(),
            None => self.addresses.first(),
        }
    }
}
