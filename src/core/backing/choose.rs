//! The one place that decides between the driver's memory and registered memory.

use super::trial::Trial;
use super::{Backing, Chosen, Why};
use crate::Result;
use crate::driver::{Access, AccessDesc, Driver, HandleTypes, Location};
use crate::topology::Topology;

/// Decides for memory at a location that may be shared by these handle types and will have this access; an empty list is
/// access for the CPU and all GPUs.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if registered memory was asked for and cannot be what is needed, with the reason; the driver's
/// errors.
pub fn choose(
    driver: &Driver,
    asked: Backing,
    site: (Location, HandleTypes),
    access: &[AccessDesc],
) -> Result<Chosen> {
    choose_by(driver, asked, site, (access, Trial::WithGpus))
}

/// As [`choose`], for memory that other processes use with their GPUs: no trial makes a context of this process.
///
/// # Errors
/// As [`choose`].
pub fn choose_for_others(
    driver: &Driver,
    asked: Backing,
    site: (Location, HandleTypes),
    access: &[AccessDesc],
) -> Result<Chosen> {
    choose_by(driver, asked, site, (access, Trial::WithoutGpus))
}

fn choose_by(
    driver: &Driver,
    asked: Backing,
    (location, handle_types): (Location, HandleTypes),
    (access, trial): (&[AccessDesc], Trial),
) -> Result<Chosen> {
    if asked == Backing::Driver {
        return Ok(Chosen::DRIVER);
    }
    let unfit = match Why::unfit(driver, location, handle_types)? {
        None if !is_open_to_all(driver, access)? => Some(Why::Access),
        unfit => unfit,
    };
    match (asked, unfit) {
        (Backing::Registered, None) => Ok(Chosen::registered(Why::Asked)),
        (Backing::Registered, Some(why)) => Err(why.refusal()),
        (_, Some(why)) => Ok(Chosen::driver(why)),
        (_, None) if is_coherent(driver)? => Ok(Chosen::driver(Why::Coherent)),
        (_, None) => Ok(trial.of(driver, location, handle_types)),
    }
}

/// Decides for memory at several locations, all of which are backed alike.
///
/// # Errors
/// As [`choose`].
pub fn choose_for_all<'a>(
    driver: &Driver,
    asked: Backing,
    sites: impl IntoIterator<Item = ((Location, HandleTypes), &'a [AccessDesc])>,
) -> Result<Chosen> {
    let mut all = None;
    for (site, access) in sites {
        let chosen = choose(driver, asked, site, access)?;
        if chosen.backing == Backing::Driver {
            return Ok(chosen);
        }
        all = Some(chosen);
    }
    Ok(all.unwrap_or(Chosen::driver(Why::Location)))
}

/// Returns whether the CPU and all GPUs may read and write; no list stands for that.
fn is_open_to_all(driver: &Driver, access: &[AccessDesc]) -> Result<bool> {
    let is_open = |location: Location| {
        let found = access.iter().rfind(|desc| match location.is_host() {
            true => desc.location.is_host(),
            false => desc.location == location,
        });
        found.is_some_and(|desc| desc.access == Access::ReadWrite)
    };
    let mut gpus = (0..driver.device_count()?).map(Location::Device);
    Ok(access.is_empty() || (is_open(Location::Host) && gpus.all(is_open)))
}

fn is_coherent(driver: &Driver) -> Result<bool> {
    Ok(Topology::of(driver)?.gpus().iter().any(|gpu| gpu.coherent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;
    use crate::driver::sim::{AttributeAnswer, Refusal};
    use crate::driver::{Call, DeviceAttribute};

    #[test]
    fn one_place_decides_and_gives_its_reason() {
        let discrete = Driver::simulated(Machine::h200x8()).unwrap();
        let coherent = Driver::simulated(Machine::gh200()).unwrap();
        let node = Location::HostNuma(0);
        let (none, fd) = (HandleTypes::NONE, HandleTypes::POSIX_FD);
        let open: Vec<AccessDesc> = (0..8)
            .map(Location::Device)
            .chain([Location::Host])
            .map(AccessDesc::read_write)
            .collect();
        let auto = |driver, location, types, access: &[AccessDesc]| {
            choose(driver, Backing::Auto, (location, types), access).unwrap()
        };
        let faster = Chosen::registered(Why::Faster);
        assert_eq!(auto(&discrete, node, none, &[]), faster);
        assert_eq!(auto(&discrete, node, fd, &open), faster);
        let cases = [
            (&discrete, Location::Host, none, &open[..], Why::Location),
            (&discrete, Location::Device(0), none, &open, Why::Location),
            (
                &discrete,
                node,
                fd | HandleTypes::FABRIC,
                &open,
                Why::Fabric,
            ),
            (&discrete, node, none, &open[1..], Why::Access),
            (&discrete, node, none, &open[..8], Why::Access),
            (&coherent, node, none, &[], Why::Coherent),
        ];
        for (driver, location, types, access, why) in cases {
            assert_eq!(
                auto(driver, location, types, access),
                Chosen::driver(why.clone())
            );
            let asked = choose(driver, Backing::Registered, (location, types), access);
            match why {
                Why::Coherent => assert_eq!(asked, Ok(Chosen::registered(Why::Asked))),
                why => assert!(asked.unwrap_err().to_string().contains(&why.to_string())),
            }
            let asked = choose(driver, Backing::Driver, (location, types), access);
            assert_eq!(asked, Ok(Chosen::driver(Why::Asked)));
        }
    }

    #[test]
    fn gpus_with_other_addresses_for_registered_memory_are_known_without_a_trial() {
        let attribute = DeviceAttribute::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.0;
        let with = |answer| {
            let mut machine = Machine::h200x8();
            machine.attributes.insert(attribute, answer);
            Driver::simulated(machine).unwrap()
        };
        let site = (Location::HostNuma(0), HandleTypes::POSIX_FD);
        let driver = with(AttributeAnswer::Value(0));
        let chosen = choose_for_others(&driver, Backing::Auto, site, &[]);
        assert_eq!(chosen, Ok(Chosen::driver(Why::Pointer)));
        let error = choose_for_others(&driver, Backing::Registered, site, &[]).unwrap_err();
        assert!(
            error.to_string().contains(&Why::Pointer.to_string()),
            "{error}"
        );
        // A driver that does not know the attribute is tried.
        let driver = with(AttributeAnswer::Refused(Refusal::InvalidValue));
        let chosen = choose(&driver, Backing::Auto, site, &[]);
        assert_eq!(chosen, Ok(Chosen::registered(Why::Faster)));
    }

    #[test]
    fn a_choice_for_other_processes_uses_no_gpu() {
        let driver = Driver::simulated(Machine::h200x8()).unwrap();
        let site = (Location::HostNuma(0), HandleTypes::POSIX_FD);
        let registrations = || driver.sim().unwrap().count(Call::MemHostRegister);
        let chosen = choose_for_others(&driver, Backing::Auto, site, &[]).unwrap();
        assert_eq!(chosen, Chosen::registered(Why::Faster));
        assert_eq!(registrations(), 0);
        assert_eq!(choose(&driver, Backing::Auto, site, &[]), Ok(chosen));
        assert_eq!(registrations(), 1);
    }

    #[test]
    fn all_locations_are_backed_alike() {
        let driver = Driver::simulated(Machine::h200x8()).unwrap();
        let at = |location| ((location, HandleTypes::NONE), &[][..]);
        let chosen = |sites: &[Location]| {
            let sites = sites.iter().map(|&location| at(location));
            choose_for_all(&driver, Backing::Auto, sites)
                .unwrap()
                .backing
        };
        assert_eq!(chosen(&[Location::HostNuma(0)]), Backing::Registered);
        assert_eq!(
            chosen(&[Location::HostNuma(0), Location::Device(0)]),
            Backing::Driver
        );
        assert_eq!(chosen(&[]), Backing::Driver);
    }
}
