//! Access to a pool's memory, for pools of this process and of others.

use super::handle::Inner;
use crate::driver::{Access, AccessDesc, Location, refuse};
use crate::explain::explain_access;
use crate::{Error, Result};

impl Inner {
    /// As [`Pool::set_access`](super::Pool::set_access).
    pub(super) fn set_access(&self, access: &[AccessDesc]) -> Result<()> {
        check(access)?;
        if access.is_empty() {
            return Ok(());
        }
        self.driver.expect_this_process("memory pool")?;
        let calls = self.calls()?;
        self.uses.change(access, || {
            // SAFETY: `self` keeps the pool; the CPU's access is never revoked, as just checked, so views stay valid; work of
            // safe calls counts among the uses.
            unsafe { calls.pool_set_access(self.handle, access) }.map_err(|error| {
                explain_access(&self.driver, error, self.props.location, access)
            })?;
            self.grants.set(access);
            Ok(())
        })
    }

    /// As [`Pool::access`](super::Pool::access).
    pub(super) fn access(&self, location: Location) -> Result<Access> {
        // SAFETY: `self` keeps the pool.
        let flags = unsafe { self.calls()?.pool_get_access(self.handle, location)? };
        Access::from_flags(flags)
            .ok_or_else(|| Error::invalid_of("access flags", format!("{flags:#x}"), "0, 1 or 3"))
    }
}

/// Checks that pools can be granted this access at all.
fn check(access: &[AccessDesc]) -> Result<()> {
    for AccessDesc { location, access } in access {
        refuse! { |why| Error::invalid("access", why);
            *access == Access::Read => "a pool cannot be granted to {location} read-only";
            location.is_host() && *access == Access::None => "{location} keeps its access to a host pool";
        }
    }
    Ok(())
}
