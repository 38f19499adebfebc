//! Access to a pool's memory, for pools of this process and of others.

use crate::driver::{Access, AccessDesc, Driver, Location, PoolApi, PoolHandle, refuse};
use crate::explain::explain_access;
use crate::ledger::Grants;
use crate::memory::GrantUses;
use crate::{Error, Result};

/// A pool's driver, API and handle, its grants and their uses.
#[derive(Clone, Copy)]
pub(super) struct Granting<'a> {
    driver: &'a Driver,
    api: PoolApi,
    handle: PoolHandle,
    uses: &'a GrantUses,
    grants: &'a Grants,
    location: Location,
}

impl<'a> Granting<'a> {
    /// # Safety
    /// The pool of this handle lives for `'a`.
    pub(super) unsafe fn new(
        driver: &'a Driver,
        api: PoolApi,
        handle: PoolHandle,
        uses: &'a GrantUses,
        grants: &'a Grants,
    ) -> Self {
        Self {
            driver,
            api,
            handle,
            uses,
            grants,
            location: Location::Host,
        }
    }

    /// Sets where the pool's memory is, so that errors can name its GPU.
    pub(super) fn of(self, location: Location) -> Self {
        Self { location, ..self }
    }

    /// As [`Pool::set_access`](super::Pool::set_access).
    pub(super) fn set(self, access: &[AccessDesc]) -> Result<()> {
        check(access)?;
        if access.is_empty() {
            return Ok(());
        }
        self.driver.expect_this_process("memory pool")?;
        let calls = self.driver.pools(self.api)?;
        self.uses.change(access, || {
            // SAFETY: the pool lives, as `new` requires; the CPU's access is never revoked, as just checked,
            // so views stay valid; work of safe calls counts among the uses.
            unsafe { calls.pool_set_access(self.handle, access) }
                .map_err(|error| explain_access(self.driver, error, self.location, access))?;
            self.grants.set(access);
            Ok(())
        })
    }

    /// As [`Pool::access`](super::Pool::access).
    pub(super) fn get(self, location: Location) -> Result<Access> {
        let calls = self.driver.pools(self.api)?;
        // SAFETY: the pool lives, as `new` requires.
        let flags = unsafe { calls.pool_get_access(self.handle, location)? };
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
