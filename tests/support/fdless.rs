//! A driver whose memory takes no file descriptors, as a GPU's: the simulator's memory is a file each. Fds that are open
//! beside it are then those of sharing alone.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use egmem::driver::{
    AllocationProps, Backend, Call, Code, DevicePtr, HandleType, HandleTypes, Location,
    PhysicalHandle, PoolCalls, ShareableHandle,
};
use egmem::{Driver, Error, Result};

/// One GPU and one host NUMA node. Imported memory has bytes of its own: only which memory came in which place can be
/// told ([`imported`](Self::imported)).
#[derive(Debug, Default)]
pub struct FdLess {
    handles: AtomicU64,
    /// The addresses behind reservations, as memory that no one else has.
    reserved: Mutex<HashMap<u64, Vec<u8>>>,
    imported: Mutex<Vec<u64>>,
}

impl FdLess {
    /// Creates the driver, and a reference to it.
    pub fn open() -> (Arc<Self>, Driver) {
        let own = Arc::new(Self::default());
        (Arc::clone(&own), Driver::from_backend(own))
    }

    /// Returns the numbers of the memories that were imported, in their order: the exporter counted them from 1.
    pub fn imported(&self) -> Vec<u64> {
        self.imported.lock().unwrap().clone()
    }

    fn next(&self) -> Result<PhysicalHandle> {
        Ok(PhysicalHandle(self.handles.fetch_add(1, Relaxed) + 1))
    }
}

// SAFETY: every address handed out is allocated memory until its reservation is freed, also where nothing is mapped.
unsafe impl Backend for FdLess {
    fn name(&self) -> &'static str {
        "fdless"
    }
    crate::quiet_calls!();
    fn mem_create(&self, _size: u64, props: &AllocationProps) -> Result<PhysicalHandle> {
        match props.handle_types.contains(HandleTypes::FABRIC) {
            true => Err(Error::driver(Call::MemCreate, Code::NOT_PERMITTED)),
            false => self.next(),
        }
    }
    unsafe fn mem_properties(&self, _handle: PhysicalHandle) -> Result<AllocationProps> {
        Ok(AllocationProps::at(Location::HostNuma(0)))
    }
    fn mem_address_reserve(&self, size: u64, _alignment: u64, _hint: u64) -> Result<DevicePtr> {
        // Pages that are not touched take no memory.
        let mut bytes = vec![0; size as usize + (2 << 20)];
        let start = (bytes.as_mut_ptr().expose_provenance() as u64).next_multiple_of(2 << 20);
        self.reserved.lock().unwrap().insert(start, bytes);
        Ok(DevicePtr(start))
    }
    unsafe fn mem_address_free(&self, ptr: DevicePtr, _size: u64) -> Result<()> {
        self.reserved.lock().unwrap().remove(&ptr.0);
        Ok(())
    }
    unsafe fn mem_export(
        &self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Result<ShareableHandle> {
        let wrong = |error| Error::system("a file for a handle", &error);
        if kind == HandleType::Fabric {
            return Err(Error::driver(
                Call::MemExportToShareableHandle,
                Code::NOT_PERMITTED,
            ));
        }
        let mut file = tempfile::tempfile().map_err(wrong)?;
        file.write_all(&handle.0.to_le_bytes()).map_err(wrong)?;
        Ok(ShareableHandle::PosixFd(OwnedFd::from(file)))
    }
    fn mem_import(&self, handle: &ShareableHandle) -> Result<PhysicalHandle> {
        let ShareableHandle::PosixFd(fd) = handle else {
            return Err(Error::driver(
                Call::MemImportFromShareableHandle,
                Code::NOT_SUPPORTED,
            ));
        };
        let wrong = |error| Error::system("a file of a handle", &error);
        let file = File::from(fd.try_clone().map_err(wrong)?);
        let mut number = [0; 8];
        // Not by the file's position, which all that have the file share.
        file.read_exact_at(&mut number, 0).map_err(wrong)?;
        self.imported
            .lock()
            .unwrap()
            .push(u64::from_le_bytes(number));
        self.next()
    }
}

// SAFETY: it has no pools.
unsafe impl PoolCalls for FdLess {
    fn api(&self) -> &'static str {
        "driver"
    }
}
