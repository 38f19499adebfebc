//! Tries registered memory once for each driver, location and way of sharing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::{Backing, Chosen, Why};
use crate::driver::{AccessDesc, Driver, HandleTypes, Location};
use crate::guard::is_shortage;
use crate::per_driver::{PerDriver, lock};
use crate::vmm::PhysicalMemory;
use crate::vmm::pages::{GRANULARITY, huge_bytes};
use crate::{Error, Result};

type Answers = Arc<Mutex<HashMap<(Trial, Location, bool), Chosen>>>;

const SMALL_PAGES: &str = "the kernel gave small pages, with which registered memory is not faster: Linux 6.1 is needed, or \
    advise in /sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// How far a trial goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Trial {
    /// The driver registers pages, which takes a context.
    WithGpus,
    /// Pages are made and mapped.
    WithoutGpus,
}

impl Trial {
    /// Returns whether registered memory works there with huge pages.
    pub(super) fn of(
        self,
        driver: &Driver,
        location: Location,
        handle_types: HandleTypes,
    ) -> Chosen {
        static ANSWERS: PerDriver<Answers> = PerDriver::new();
        let key = (self, location, handle_types != HandleTypes::NONE);
        let answers = ANSWERS.of(driver);
        let mut answers = lock(&answers);
        if let Some(known) = answers.get(&key) {
            return known.clone();
        }
        let (chosen, may_pass) = match self.attempt(driver, location, handle_types) {
            Ok(true) => (Chosen::registered(Why::Faster), false),
            // The kernel may have huge pages once its memory is less fragmented, or its settings have changed.
            Ok(false) => (Chosen::driver(Why::Trial(SMALL_PAGES.into())), true),
            Err(error) => {
                let may_pass = is_shortage(&error);
                (Chosen::driver(Why::Trial(error.to_string())), may_pass)
            }
        };
        tracing::debug!(%location, %handle_types, %chosen, "tried registered memory");
        if !may_pass {
            answers.insert(key, chosen.clone());
        }
        chosen
    }

    /// Returns whether the pages were huge.
    fn attempt(
        self,
        driver: &Driver,
        location: Location,
        handle_types: HandleTypes,
    ) -> Result<bool> {
        let memory = PhysicalMemory::options(location)
            .handle_types(handle_types)
            .backing(Backing::Registered)
            .create(driver, GRANULARITY.bytes())?;
        let mut mapping = memory.map()?;
        let gpus = match self {
            Self::WithGpus => driver.device_count()?,
            Self::WithoutGpus => 0,
        };
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
}
