//! Options of a pool.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use super::{Inner, Pool};
use crate::Result;
use crate::buffer::reachable_gpus;
use crate::driver::{AccessDesc, Driver, HandleTypes, Location, PoolApi, PoolAttribute, PoolProps};
use crate::guard::explain_pool;
use crate::ledger::{AccessList, Grants, Label};

/// When a pool may reuse memory that was freed on another stream. The driver's default: all three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reuse {
    /// When an event orders the free before the allocation.
    pub follow_event_dependencies: bool,
    /// When the free is seen to have completed.
    pub allow_opportunistic: bool,
    /// By making the allocating stream wait for the freeing one.
    pub allow_internal_dependencies: bool,
}

impl Default for Reuse {
    fn default() -> Self {
        Self {
            follow_event_dependencies: true,
            allow_opportunistic: true,
            allow_internal_dependencies: true,
        }
    }
}

impl Pool {
    /// Returns options for a pool at `location`: a node's id, or any [`Location`].
    pub fn options(location: impl Into<Location>) -> PoolOptions {
        PoolOptions {
            props: PoolProps {
                location: location.into(),
                handle_types: HandleTypes::NONE,
                max_size: 0,
            },
            release_threshold: 0,
            reuse: Reuse::default(),
            access: None,
            api: PoolApi::Driver,
            overcommit: false,
            label: None,
        }
    }
}

/// Options of a pool; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct PoolOptions {
    props: PoolProps,
    release_threshold: u64,
    reuse: Reuse,
    access: Option<AccessList>,
    api: PoolApi,
    overcommit: bool,
    label: Option<Label>,
}

impl PoolOptions {
    crate::driver::setters! {
        /// Sets the most bytes that the pool may hold; 0, the default, leaves it to the driver. The driver may
        /// round it up to its own unit.
        max_size(bytes: u64) => props.max_size = bytes;

        /// Sets how many bytes the pool keeps when a stream, event or device is synchronised; free bytes beyond
        /// that go back to the system. Default 0. `u64::MAX` keeps all.
        release_threshold(bytes: u64) => release_threshold = bytes;

        /// Sets when memory freed on another stream may be reused.
        reuse(reuse: Reuse) => reuse = reuse;

        /// Sets how the pool may be shared; by default not at all. FABRIC needs an IMEX channel.
        handle_types(handle_types: HandleTypes) => props.handle_types = handle_types;

        /// Sets whether to ask the driver for more memory than the node has free. See
        /// [`PhysicalOptions::overcommit`](crate::vmm::PhysicalOptions::overcommit).
        overcommit(on: bool) => overcommit = on;

        /// Sets the API through which the pool is used. Both create the same kind of object.
        api(api: PoolApi) => api = api;
    }

    /// Sets which GPUs may read and write. The default is every GPU for a host pool, and only the owner for a
    /// GPU's pool. The CPU has access to a host pool in any case.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        let access = self.access.get_or_insert_default();
        access.extend(who.into_iter().map(AccessDesc::read_write));
        self
    }

    /// Sets the name of its allocations in the [ledger](crate::ledger).
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Creates the pool and grants access. It takes no memory before the first allocation.
    ///
    /// Source: `cuMemPoolCreate`, `cudaMemPoolCreate`.
    ///
    /// # Errors
    /// [`NoSuchNode`](crate::Error::NoSuchNode) and [`NoSuchGpu`](crate::Error::NoSuchGpu);
    /// [`NoImexChannel`](crate::Error::NoImexChannel) for FABRIC without a channel;
    /// [`PlatformUnsupported`](crate::Error::PlatformUnsupported);
    /// [`MissingLibrary`](crate::Error::MissingLibrary) for the runtime API without its library; or the
    /// driver's error.
    pub fn create(self, driver: &Driver) -> Result<Pool> {
        if self.props.handle_types.contains(HandleTypes::FABRIC) {
            // A fabric pool that the driver refuses to export corrupts the process's heap when destroyed, so
            // one is created only if plain fabric memory works.
            crate::vmm::PhysicalMemory::options(self.props.location)
                .handle_types(HandleTypes::FABRIC)
                .create(driver, 1)?;
        }
        let calls = driver.pools(self.api)?;
        let handle = calls
            .pool_create(&self.props)
            .map_err(|error| explain_pool(driver, error, &self.props, 0))?;
        // The owner's access, which is never revoked.
        let owner = AccessDesc::read_write(self.props.location);
        let pool = Pool(Arc::new(Inner {
            driver: driver.clone(),
            api: self.api,
            handle,
            props: self.props,
            overcommit: self.overcommit,
            uses: Arc::default(),
            grants: Grants::of_pool(smallvec![owner]),
            label: self.label,
            owned: 1.into(),
        }));
        let reuse = &self.reuse;
        use PoolAttribute::{
            ReuseAllowInternalDependencies as Internal, ReuseAllowOpportunistic as Opportunistic,
            ReuseFollowEventDependencies as Events,
        };
        // The driver's default is all three on.
        for (attribute, is_on) in [
            (Events, reuse.follow_event_dependencies),
            (Opportunistic, reuse.allow_opportunistic),
            (Internal, reuse.allow_internal_dependencies),
        ] {
            if !is_on {
                pool.set(attribute, 0)?;
            }
        }
        if self.release_threshold != 0 {
            pool.set_release_threshold(self.release_threshold)?;
        }
        let access = match self.access {
            Some(access) => access,
            None if self.props.location.is_host() => reachable_gpus(driver, self.props.location)?,
            None => AccessList::new(),
        };
        pool.set_access(&access)?;
        Ok(pool)
    }
}
