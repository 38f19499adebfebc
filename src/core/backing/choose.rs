//! The one place that decides between the driver's memory and registered memory, which it tries once for each driver,
//! location and way of sharing.

use std::sync::{Arc, Mutex};

use super::{Backing, Chosen, Why};
use crate::driver::{Access, AccessDesc, Code, DeviceAttribute, Driver, HandleTypes, Location};
use crate::guard::is_passing;
use crate::per_driver::{PerDriver, lock};
use crate::topology::Topology;
use crate::vmm::PhysicalMemory;
use crate::vmm::pages::{GRANULARITY, huge_bytes};
use crate::{Error, Result};

const SMALL_PAGES: &str = "the kernel gave small pages, with which registered memory is not faster: Linux 6.1 is needed, or \
    advise in /sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Decides for memory at a location that may be shared by these handle types and will have this access; an empty list is
/// access for the CPU and all GPUs.
///
/// # Errors
/// [`Error::InvalidArgument`] if registered memory was asked for and cannot be what is needed, with the reason; the driver's
/// errors.
pub fn choose(
    driver: &Driver,
    asked: Backing,
    site: (Location, HandleTypes),
    access: &[AccessDesc],
) -> Result<Chosen> {
    choose_by(driver, asked, site, (access, true))
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
    choose_by(driver, asked, site, (access, false))
}

fn choose_by(
    driver: &Driver,
    asked: Backing,
    site: (Location, HandleTypes),
    (access, with_gpus): (&[AccessDesc], bool),
) -> Result<Chosen> {
    if asked == Backing::Driver {
        return Ok(Chosen::DRIVER);
    }
    match (asked, unfit(driver, site, access)?) {
        (Backing::Registered, None) => Ok(Chosen::registered(Why::Asked)),
        (Backing::Registered, Some(why)) => {
            let valid = "driver, or auto to have it chosen";
            Err(Error::invalid_of("backing", why.to_string(), valid))
        }
        (_, Some(why)) => Ok(Chosen::driver(why)),
        (_, None) if Topology::of(driver)?.gpus().iter().any(|gpu| gpu.coherent) => {
            Ok(Chosen::driver(Why::Coherent))
        }
        (_, None) => Ok(tried(driver, site, with_gpus)),
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

/// Returns why there is no registered memory at a location, with these handle types and this access, or for the machine's
/// GPUs. Takes no context.
fn unfit(
    driver: &Driver,
    (location, handle_types): (Location, HandleTypes),
    access: &[AccessDesc],
) -> Result<Option<Why>> {
    if !matches!(location, Location::HostNuma(_)) {
        return Ok(Some(Why::Location));
    }
    if handle_types.contains(HandleTypes::FABRIC) {
        return Ok(Some(Why::Fabric));
    }
    for gpu in 0..driver.device_count()? {
        let attribute = DeviceAttribute::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
        match driver.device_attribute(gpu, attribute) {
            Ok(0) => return Ok(Some(Why::Pointer)),
            // A driver that does not know the attribute may still do so: a registration shows it.
            Err(error) if error.code() != Some(Code::INVALID_VALUE) => return Err(error),
            _ => {}
        }
    }
    Ok((!is_open_to_all(driver, access)?).then_some(Why::Access))
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

/// Returns whether registered memory works there with huge pages. Without GPUs the driver registers none, which would take a
/// context.
fn tried(driver: &Driver, site: (Location, HandleTypes), with_gpus: bool) -> Chosen {
    type Answers = Arc<Mutex<Vec<((Location, bool, bool), Chosen)>>>;
    static ANSWERS: PerDriver<Answers> = PerDriver::new();
    let (location, handle_types) = site;
    let key = (location, handle_types != HandleTypes::NONE, with_gpus);
    let answers = ANSWERS.of(driver);
    let mut answers = lock(&answers);
    if let Some((_, known)) = answers.iter().find(|(known, _)| *known == key) {
        return known.clone();
    }
    let (chosen, may_pass) = match attempt(driver, site, with_gpus) {
        Ok(true) => (Chosen::registered(Why::Faster), false),
        // The kernel may have huge pages once its memory is less fragmented, or its settings have changed.
        Ok(false) => (Chosen::driver(Why::Trial(SMALL_PAGES.into())), true),
        Err(error) => {
            let may_pass = is_passing(&error);
            (Chosen::driver(Why::Trial(error.to_string())), may_pass)
        }
    };
    tracing::debug!(%location, %handle_types, %chosen, "tried registered memory");
    if !may_pass {
        answers.push((key, chosen.clone()));
    }
    chosen
}

/// Returns whether the pages were huge.
fn attempt(
    driver: &Driver,
    (location, handle_types): (Location, HandleTypes),
    with_gpus: bool,
) -> Result<bool> {
    let memory = PhysicalMemory::options(location)
        .handle_types(handle_types)
        .backing(Backing::Registered)
        .create(driver, GRANULARITY.bytes())?;
    let mut mapping = memory.map()?;
    let gpus = if with_gpus { driver.device_count()? } else { 0 };
    let gpus = (0..gpus).map(Location::Device);
    let access = gpus.chain([Location::Host]).map(AccessDesc::read_write);
    mapping.set_access(&access.collect::<Vec<_>>())?;
    mapping.cpu()?.put(0, 1_u64)?;
    if driver.is_simulated() {
        return Ok(true);
    }
    let what = "looking at the sizes of pages";
    let start = mapping.cpu()?.as_ptr() as u64;
    let huge = huge_bytes(start..start + GRANULARITY.bytes());
    let huge = huge.map_err(|error| Error::system(what, &error))?;
    Ok(huge > 0)
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
