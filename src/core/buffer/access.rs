//! Who is to have access to new memory.

use crate::Result;
use crate::driver::{Access, AccessDesc, Driver, Location};

/// The access that a program asked for, with defaults for what it left out.
#[derive(Clone, Debug, Default)]
pub struct RequestedAccess {
    /// What the CPU may do; `None`: read and write, if the memory is the host's.
    pub host: Option<Access>,
    /// What the GPUs may do; `None`: read and write, for each that can reach the memory.
    pub gpus: Option<Vec<AccessDesc>>,
}

impl RequestedAccess {
    /// Sets what one location may do; any location on the host stands for the CPU.
    pub fn set(&mut self, location: Location, access: Access) {
        if location.is_host() {
            self.host = Some(access);
        } else {
            let gpus = self.gpus.get_or_insert_default();
            gpus.retain(|desc| desc.location != location);
            gpus.push(AccessDesc { location, access });
        }
    }

    /// Lets these locations read and write, and of the GPUs no others than those that were named.
    pub fn set_all<L: Into<Location>>(&mut self, who: impl IntoIterator<Item = L>) {
        for location in who {
            self.set(location.into(), Access::ReadWrite);
        }
        self.gpus.get_or_insert_default();
    }

    /// Returns the grants for memory at `location`: the host's first.
    ///
    /// # Errors
    /// The driver's error, when it is asked which GPUs reach the memory.
    pub fn grants(&self, driver: &Driver, location: Location) -> Result<Vec<AccessDesc>> {
        let gpus = match &self.gpus {
            Some(gpus) => gpus.clone(),
            None => reachable_gpus(driver, location)?,
        };
        let host = self.host.unwrap_or(match location {
            Location::Device(_) => Access::None,
            _ => Access::ReadWrite,
        });
        let mut grants = Vec::with_capacity(gpus.len() + 1);
        if host != Access::None {
            grants.push(AccessDesc::new(Location::Host, host));
        }
        grants.extend(gpus);
        Ok(grants)
    }
}

/// Returns the GPUs that can reach memory at `location`: all for host memory, itself and its peers for a
/// GPU's.
pub fn reachable_gpus(driver: &Driver, location: Location) -> Result<Vec<AccessDesc>> {
    let mut reachable = Vec::new();
    for gpu in 0..driver.device_count()? {
        let reaches = match location {
            Location::Device(owner) => owner == gpu || driver.device_can_access_peer(gpu, owner)?,
            _ => true,
        };
        if reaches {
            reachable.push(AccessDesc {
                location: Location::Device(gpu),
                access: Access::ReadWrite,
            });
        }
    }
    Ok(reachable)
}
