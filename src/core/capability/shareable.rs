//! Chooses the handle types for shareable memory.

use super::{Capabilities, Path};
use crate::backing::Backing;
use crate::driver::{Driver, HandleTypes, Location};
use crate::{Error, Result};

/// How to make memory shareable on this machine: see [`best_handle_types`].
#[derive(Clone, Debug, PartialEq)]
pub struct Shareable {
    /// The handle types to create it with.
    pub handle_types: HandleTypes,
    /// The reason why fabric handles are not among them.
    pub no_fabric: Option<Error>,
}

/// Returns the handle types with which memory at `location` can be shared as widely as this machine allows:
/// fabric handle and POSIX fd, or one of them. Found out by trials, once per driver.
///
/// # Errors
/// The reason why POSIX fds do not work, if neither type does.
pub fn best_handle_types(driver: &Driver, location: Location) -> Result<Shareable> {
    const BOTH: HandleTypes =
        HandleTypes::from_bits(HandleTypes::FABRIC.bits() | HandleTypes::POSIX_FD.bits());
    let capabilities = Capabilities::of(driver);
    let tried = |types| capabilities.support(location, Path::Vmm, types).require();
    let only = |handle_types, no_fabric| Shareable {
        handle_types,
        no_fabric,
    };
    let Err(no_fabric) = tried(BOTH) else {
        return Ok(only(BOTH, None));
    };
    match tried(HandleTypes::POSIX_FD) {
        Ok(()) => Ok(only(HandleTypes::POSIX_FD, Some(no_fabric))),
        Err(error) => tried(HandleTypes::FABRIC)
            .map(|()| only(HandleTypes::FABRIC, None))
            .map_err(|_| error),
    }
}

/// Returns the handle types with which memory of `backing` at `location` can be shared: of registered memory POSIX fd, of any
/// other those of [`best_handle_types`].
///
/// # Errors
/// As `best_handle_types`.
pub fn handle_types_of(driver: &Driver, location: Location, backing: Backing) -> Result<Shareable> {
    match backing {
        Backing::Registered => Ok(Shareable {
            handle_types: HandleTypes::POSIX_FD,
            no_fabric: None,
        }),
        Backing::Driver | Backing::Auto => best_handle_types(driver, location),
    }
}
