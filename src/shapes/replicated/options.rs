//! How replicated data are created.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use bytemuck::{AnyBitPattern, NoUninit};

use super::Replicated;
use super::near::Near;
use super::plan::waves;
use super::readers::Readers;
use super::version::Version;
use crate::driver::{Access, Location};
use crate::ledger::{AllocPath, Label, Site};
use crate::topology::Topology;
use crate::{Buffer, BufferOptions, Driver, Error, Result, Stream};

/// The most bytes of host memory that pass data on where no copy is on a host node.
const STAGING: u64 = 64 << 20;

/// Options for replicated data; [`create`](Self::create) creates them.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct ReplicatedOptions<T> {
    places: Vec<Location>,
    overcommit: bool,
    shareable: bool,
    label: Option<Label>,
    elements: PhantomData<fn() -> T>,
}

impl<T: AnyBitPattern + NoUninit> Replicated<T> {
    /// Returns options for data with a copy at each of these locations: host nodes, GPUs, or both.
    pub fn on<L: Into<Location>>(places: impl IntoIterator<Item = L>) -> ReplicatedOptions<T> {
        ReplicatedOptions {
            places: places.into_iter().map(Into::into).collect(),
            overcommit: false,
            shareable: false,
            label: None,
            elements: PhantomData,
        }
    }
}

impl<T: AnyBitPattern + NoUninit> ReplicatedOptions<T> {
    /// Sets whether to ask the driver for more memory than a node has free.
    pub const fn overcommit(mut self, on: bool) -> Self {
        self.overcommit = on;
        self
    }

    /// Makes the copies shareable, so that other processes can read them: see `Replicated::share`. By default they are not.
    pub const fn shareable(mut self) -> Self {
        self.shareable = true;
        self
    }

    /// Sets the copies' name in the ledger.
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Creates the copies, each twice, and publishes `values` as epoch 1. The number of elements stays the same from
    /// then on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no location, one that is named twice, one that is neither a node nor a GPU, and
    /// for no element or elements of no bytes; those of [`BufferOptions::allocate`](crate::BufferOptions::allocate),
    /// [`Topology::discover`] and [`Stream::copy`].
    #[track_caller]
    pub fn create(self, driver: &Driver, values: &[T]) -> Result<Replicated<T>> {
        let site = Site::here();
        let bytes = size_of_val(values) as u64;
        if bytes == 0 {
            let why = "they have 0 bytes";
            return Err(Error::invalid_of("values", why, "1 byte or more"));
        }
        self.check_places()?;
        let topology = Topology::of(driver)?;
        let mut versions = Vec::with_capacity(2);
        for _ in 0..2 {
            let mut buffers = Vec::with_capacity(self.places.len());
            for &place in &self.places {
                let mut options = self.copy_at(&topology, place).bytes(bytes);
                if self.shareable {
                    options = options.shareable();
                }
                buffers.push(Arc::new(
                    self.named(options, site.clone()).allocate(driver)?,
                ));
            }
            versions.push(Arc::new(Version::new(driver, buffers)));
        }
        let waves = waves(&topology, &self.places);
        let mut streams = Vec::with_capacity(self.places.len());
        for place in &self.places {
            streams.push(match place {
                Location::Device(gpu) => Some(Stream::new(driver, *gpu)?),
                _ => None,
            });
        }
        let from_cpu = waves.iter().flatten().find(|(_, from)| from.is_none());
        let staging = match from_cpu.map(|&(to, _)| self.places[to]) {
            Some(Location::Device(gpu)) => {
                let node = topology.gpu(gpu)?.host_node()?;
                let options = Buffer::on(node).bytes(bytes.min(STAGING));
                Some(Arc::new(
                    self.named(options, site.clone()).allocate(driver)?,
                ))
            }
            _ => None,
        };
        let replicated = Replicated {
            driver: driver.clone(),
            near: Near::new(topology, &self.places, |_, _| Ok(true))?,
            len: values.len(),
            versions,
            current: Mutex::new(0),
            publishing: Mutex::default(),
            waves,
            streams,
            staging,
            readers: Readers::default(),
            elements: PhantomData,
        };
        replicated.publish(values)?;
        Ok(replicated)
    }

    fn check_places(&self) -> Result<()> {
        let bad = |why: String| Err(Error::invalid("locations", why));
        if self.places.is_empty() {
            return bad("the list is empty".into());
        }
        for (index, place) in self.places.iter().enumerate() {
            if !matches!(place, Location::Device(_) | Location::HostNuma(_)) {
                return bad(format!("{place} is neither a GPU nor a host node"));
            }
            if self.places[..index].contains(place) {
                return bad(format!("{place} is named twice"));
            }
        }
        Ok(())
    }

    /// Returns options for a copy. GPUs may read; the GPU whose memory it is writes when a version is published, and
    /// the CPU writes its own.
    fn copy_at(&self, topology: &Topology, place: Location) -> BufferOptions {
        let mut options = Buffer::on(place).overcommit(self.overcommit);
        for gpu in topology.gpus() {
            options = match place {
                Location::Device(owner) if owner == gpu.ordinal => {
                    options.access(gpu, Access::ReadWrite)
                }
                Location::Device(owner) if !gpu.peers.contains(&owner) => options,
                _ => options.access(gpu, Access::Read),
            };
        }
        options
    }

    /// Sets the path, the call and the label in a buffer's ledger entry.
    fn named(&self, options: BufferOptions, site: Site) -> BufferOptions {
        let options = options.recorded_as(AllocPath::ShapeChunk, site);
        match &self.label {
            Some(label) => options.label(label.as_str()),
            None => options,
        }
    }
}
