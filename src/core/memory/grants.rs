//! Tracks work in flight that relies on a pool's grants.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::{Access, AccessDesc};
use crate::per_driver::lock;
use crate::{Error, Result};

/// The number of safe calls and tickets that rely on the grants of one pool.
///
/// Grants of other memory change only through `&mut`, which does not exist while a call borrows the memory or
/// a ticket owns it. Allocations share their pool, so a pool's grants change through `&self`.
#[derive(Debug, Default)]
pub struct GrantUses {
    count: AtomicU64,
    /// Held while access is revoked, and while a use begins.
    changing: Mutex<()>,
}

impl GrantUses {
    /// Begins a use: no access is revoked until the result is dropped. Check access after this call.
    pub fn begin(self: &Arc<Self>) -> GrantUse {
        let _changing = lock(&self.changing);
        self.count.fetch_add(1, Ordering::Relaxed);
        GrantUse(Arc::clone(self))
    }

    /// Runs `change`, which sets `access`, unless it revokes access that is in use.
    ///
    /// # Errors
    /// [`Error::StillHeld`]; those of `change`.
    pub fn change(&self, access: &[AccessDesc], change: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(taken) = access.iter().find(|desc| desc.access == Access::None) else {
            return change();
        };
        let _changing = lock(&self.changing);
        match self.count.load(Ordering::Acquire) {
            0 => change(),
            uses => Err(Error::StillHeld {
                name: format!("the access of {} to a memory pool", taken.location),
                holders: vec![format!("copies, fills or kernels in flight: {uses}")],
            }),
        }
    }
}

/// A use of a pool's grants, which ends when this is dropped.
#[derive(Debug)]
pub struct GrantUse(Arc<GrantUses>);

impl Drop for GrantUse {
    /// Takes no lock: a forked child may drop it.
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Location;

    #[test]
    fn access_in_use_is_not_taken_away() {
        let uses = Arc::new(GrantUses::default());
        let set = |access| uses.change(&[AccessDesc::new(Location::Device(1), access)], || Ok(()));
        let held = [uses.begin(), uses.begin()];
        let error = set(Access::None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the access of GPU 1 to a memory pool is still held by copies, fills or kernels in flight: 2"
        );
        set(Access::ReadWrite).unwrap();
        drop(held);
        set(Access::None).unwrap();
    }
}
