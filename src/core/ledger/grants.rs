//! The access to a range, as last granted.

use std::sync::Mutex;

use crate::driver::{Access, AccessDesc, Location};
use crate::per_driver::lock;

/// The access of each location that has any. Owners of memory change it where they call the driver.
#[derive(Debug, Default)]
pub struct Grants(Mutex<Vec<AccessDesc>>);

impl Grants {
    /// Returns grants that never change.
    pub fn of(list: Vec<AccessDesc>) -> Self {
        Self(Mutex::new(list))
    }

    /// Notes the access of locations from now on. Every name of the host is [`Location::Host`].
    pub fn set(&self, changes: &[AccessDesc]) {
        let mut list = lock(&self.0);
        for change in changes {
            let location = match change.location.is_host() {
                true => Location::Host,
                false => change.location,
            };
            list.retain(|desc| desc.location != location);
            if change.access != Access::None {
                list.push(AccessDesc::new(location, change.access));
            }
        }
    }

    /// Returns all locations that may do something, the host first, then GPUs by ordinals.
    pub fn list(&self) -> Vec<AccessDesc> {
        let mut list = lock(&self.0).clone();
        list.sort_by_key(|desc| match desc.location {
            Location::Device(gpu) => (1, gpu),
            _ => (0, 0),
        });
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_grant_of_a_location_counts() {
        let grants = Grants::default();
        let [host, one, two] = [
            Location::HostNuma(3),
            Location::Device(1),
            Location::Device(2),
        ];
        grants.set(&[
            AccessDesc::new(two, Access::Read),
            AccessDesc::new(one, Access::ReadWrite),
            AccessDesc::new(host, Access::Read),
        ]);
        grants.set(&[
            AccessDesc::new(Location::Host, Access::ReadWrite),
            AccessDesc::new(two, Access::None),
        ]);
        let expected = [
            AccessDesc::new(Location::Host, Access::ReadWrite),
            AccessDesc::new(one, Access::ReadWrite),
        ];
        assert_eq!(grants.list(), expected);
    }
}
