//! The access to new memory, and changes of the access to a buffer.

use super::Buffer;
use crate::Result;
use crate::driver::{Access, AccessDesc, Driver, Location};
use crate::memory::check_range;

/// The access that a program asked for, with defaults for the locations that it left out.
#[derive(Clone, Debug, Default)]
pub struct RequestedAccess {
    /// The CPU's access; `None`: read and write, if the memory is the host's.
    pub host: Option<Access>,
    /// The GPUs' access; `None`: read and write, for each that can reach the memory.
    pub gpus: Option<Vec<AccessDesc>>,
}

impl RequestedAccess {
    /// Sets the access of one location; any location on the host stands for the CPU.
    pub fn set(&mut self, location: Location, access: Access) {
        if location.is_host() {
            self.host = Some(access);
        } else {
            let gpus = self.gpus.get_or_insert_default();
            gpus.retain(|desc| desc.location != location);
            gpus.push(AccessDesc { location, access });
        }
    }

    /// Lets these locations read and write. GPUs that no call has named get no access.
    pub fn set_all<L: Into<Location>>(&mut self, who: impl IntoIterator<Item = L>) {
        for location in who {
            self.set(location.into(), Access::ReadWrite);
        }
        self.gpus.get_or_insert_default();
    }

    /// Returns the grants for memory at `location`: the host's first.
    ///
    /// # Errors
    /// The driver's error, when it is asked which GPUs reach the memory.
    pub fn grants(&self, driver: &Driver, location: Location) -> Result<Vec<AccessDesc>> {
        let gpus = match &self.gpus {
            Some(gpus) => gpus.clone(),
            None => reachable_gpus(driver, location)?,
        };
        let host = self.host.unwrap_or(match location {
            Location::Device(_) => Access::None,
            _ => Access::ReadWrite,
        });
        let mut grants = Vec::with_capacity(gpus.len() + 1);
        if host != Access::None {
            grants.push(AccessDesc::new(Location::Host, host));
        }
        grants.extend(gpus);
        Ok(grants)
    }
}

/// Returns the GPUs that can reach memory at `location`: all for host memory, itself and its peers for a
/// GPU's.
pub fn reachable_gpus(driver: &Driver, location: Location) -> Result<Vec<AccessDesc>> {
    let mut reachable = Vec::new();
    for gpu in 0..driver.device_count()? {
        let reaches = match location {
            Location::Device(owner) => owner == gpu || driver.device_can_access_peer(gpu, owner)?,
            _ => true,
        };
        if reaches {
            reachable.push(AccessDesc::read_write(Location::Device(gpu)));
        }
    }
    Ok(reachable)
}

impl Buffer {
    /// The most parts of one buffer: 2 TiB in chunks or stripes of 2 MiB. Shared memory has at most 4096.
    pub const MAX_PARTS: usize = 1 << 20;

    /// Changes the access of locations. See [`Mapping::set_access`](crate::vmm::Mapping::set_access).
    ///
    /// # Errors
    /// As `Mapping::set_access`; the parts of a buffer in several before the failing one are changed then.
    pub fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        self.range.set_access(access)
    }

    /// Changes the access of locations to `len` bytes from `offset` on, which are whole parts: chunks
    /// ([`BufferOptions::chunk`]), shares or stripes. The last part counts with its padding or without.
    ///
    /// A location that may only read is held to it by its page tables: the CPU that writes gets SIGSEGV, and a GPU
    /// whose kernel writes fails with ILLEGAL_ADDRESS and is lost to the process. Safe calls refuse such work before
    /// ([`Error::NotAccessible`](crate::Error::NotAccessible)). Take access away only when no work of the program that uses it is left.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a range that begins or ends inside a part;
    /// [`Error::OutOfRange`](crate::Error::OutOfRange); otherwise as [`set_access`](Self::set_access).
    ///
    /// ```
    /// use egmem::driver::{Access, AccessDesc, Location, NodeId};
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let mut buffer = Buffer::on(NodeId(0)).bytes(64 << 20).chunk(4 << 20).allocate(&driver)?;
    /// // The first 16 MiB are complete: from here on they are only read.
    /// let readers = [Location::Host, Location::Device(0)];
    /// let reads = readers.map(|who| AccessDesc::new(who, Access::Read));
    /// buffer.set_access_at(0, 16 << 20, &reads)?;
    /// assert!(buffer.put(0, 1_u8).is_err());
    /// buffer.put(16 << 20, 1_u8)?;
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn set_access_at(&mut self, offset: u64, len: u64, access: &[AccessDesc]) -> Result<()> {
        let end = offset.saturating_add(len);
        if end > self.padded() {
            check_range(offset, len, self.len)?;
        }
        let len = match end == self.len {
            true => self.padded() - offset,
            false => len,
        };
        self.range.set_access_at(offset, len, access)
    }

    /// Returns the least that `location` may do with any part, as the driver reports it.
    ///
    /// # Errors
    /// As [`Mapping::access`](crate::vmm::Mapping::access).
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        let location = location.into();
        let mut mappings = self.range.mappings().iter();
        mappings.try_fold(Access::ReadWrite, |least, mapping| {
            Ok(least.min(mapping.access(location)?))
        })
    }
}
