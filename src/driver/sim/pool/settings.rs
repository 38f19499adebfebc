//! Attributes of pools, and access to their memory.

use super::super::answer::{Answer, exhausted, fail};
use super::super::state::State;
use crate::{Access, AccessDesc, Code, Location, PoolAttribute, PoolHandle};

impl State {
    pub(super) fn pool_set_attribute(
        &mut self,
        handle: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Answer<()> {
        let pool = self.pool(handle)?;
        match (attribute, value) {
            (PoolAttribute::ReuseFollowEventDependencies, _) => pool.reuse[0] = value.min(1),
            (PoolAttribute::ReuseAllowOpportunistic, _) => pool.reuse[1] = value.min(1),
            (PoolAttribute::ReuseAllowInternalDependencies, _) => pool.reuse[2] = value.min(1),
            (PoolAttribute::ReleaseThreshold, _) => pool.release_threshold = value,
            (PoolAttribute::ReservedHigh, 0) => pool.reserved.high = pool.reserved.current,
            (PoolAttribute::UsedHigh, 0) => pool.used.high = pool.used.current,
            _ => return fail(Code::INVALID_VALUE),
        }
        Ok(())
    }

    pub(super) fn pool_get_attribute(
        &mut self,
        handle: PoolHandle,
        attribute: PoolAttribute,
    ) -> Answer<u64> {
        let pool = self.pool(handle)?;
        Ok(match attribute {
            PoolAttribute::ReuseFollowEventDependencies => pool.reuse[0],
            PoolAttribute::ReuseAllowOpportunistic => pool.reuse[1],
            PoolAttribute::ReuseAllowInternalDependencies => pool.reuse[2],
            PoolAttribute::ReleaseThreshold => pool.release_threshold,
            PoolAttribute::ReservedCurrent => pool.reserved.current,
            PoolAttribute::ReservedHigh => pool.reserved.high,
            PoolAttribute::UsedCurrent => pool.used.current,
            PoolAttribute::UsedHigh => pool.used.high,
        })
    }

    pub(super) fn pool_set_access(
        &mut self,
        handle: PoolHandle,
        descs: &[AccessDesc],
    ) -> Answer<()> {
        let location = self.pool(handle)?.location;
        for desc in descs {
            self.check_pool_grant(desc, location)?;
        }
        let of_no_node = |desc: &AccessDesc| desc.location == Location::HostNumaCurrent;
        if descs.iter().any(of_no_node) {
            return fail(Code::INVALID_VALUE);
        }
        for desc in descs.iter().filter(|desc| desc.access == Access::None) {
            if desc.location == location && !location.is_host() {
                return fail(Code::INVALID_DEVICE);
            }
            if desc.location.is_host() {
                return fail(Code::NOT_SUPPORTED);
            }
        }
        let pool = self.pool(handle)?;
        let before = pool.host;
        for desc in descs {
            match desc.location {
                Location::Device(device) => pool.devices[device as usize] = desc.access,
                _ => pool.host = desc.access,
            }
        }
        if pool.host != before {
            for chunk in pool.chunks.values() {
                let range = &chunk.range;
                range
                    .protect(range.start, range.len, pool.host)
                    .map_err(exhausted)?;
            }
        }
        Ok(())
    }

    /// Checks that a location exists and can be granted a pool's memory: pools grant reading and writing
    /// together.
    fn check_pool_grant(&self, desc: &AccessDesc, location: Location) -> Answer<()> {
        let host_of_device = desc.location.is_host() && !location.is_host();
        if desc.access == Access::Read || (host_of_device && desc.access == Access::None) {
            return fail(Code::NOT_SUPPORTED);
        }
        if let Location::Device(device) = desc.location {
            self.device(device)?;
        }
        self.check_grant(desc, location)
    }

    pub(super) fn pool_get_access(
        &mut self,
        handle: PoolHandle,
        location: Location,
    ) -> Answer<u64> {
        let known = match location {
            Location::Device(device) => self.device(device).is_ok(),
            _ => true,
        };
        let pool = self.pool(handle)?;
        let access = match location {
            _ if !known => return fail(Code::INVALID_VALUE),
            Location::Device(device) => pool.devices[device as usize],
            _ => pool.host,
        };
        Ok(access.flags().into())
    }
}
