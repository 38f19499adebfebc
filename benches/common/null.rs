//! A driver whose calls do nothing and succeed at once, so only this crate's own time is measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use egmem::driver::{
    AccessDesc, AllocationProps, Backend, DevicePtr, Driver, EventHandle, Location, PhysicalHandle,
    PoolAttribute, PoolCalls, PoolHandle, PoolProps, StreamHandle,
};
use egmem::{Error, Result};

/// The bytes behind every address that the driver hands out.
const BYTES: usize = 64 << 20;

/// One GPU and one host NUMA node, 0 and 0.
///
/// It hands out the same addresses again and again. They are real memory, mapped for good, so an
/// access to "allocated" memory is sound. It keeps no records: a benchmark must not measure them.
#[derive(Debug)]
pub struct Null {
    memory: DevicePtr,
    handles: AtomicU64,
}

/// The null driver.
///
/// # Errors
/// [`Error::System`] if the kernel has no addresses left.
pub fn driver() -> Result<Driver> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no other memory.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return Err(Error::system(
            "mmap of the null driver's memory",
            &std::io::Error::last_os_error(),
        ));
    }
    // Aligned up to the granularity; the mapping is never given back.
    let start = (memory.expose_provenance() as u64).next_multiple_of(2 << 20);
    Ok(Driver::from_backend(Arc::new(Null {
        memory: DevicePtr(start),
        handles: AtomicU64::new(1),
    })))
}

impl Null {
    fn next(&self) -> u64 {
        self.handles.fetch_add(1, Relaxed)
    }
}

// SAFETY: every address handed out is readable and writable memory for the process's whole life,
// also where nothing was "mapped" or "granted"; the benchmarks stay below `BYTES` less 2 MiB.
unsafe impl Backend for Null {
    fn name(&self) -> &'static str {
        "null"
    }
    egmem_tests::quiet_calls!();
    fn device_can_access_peer(&self, _device: i32, _peer: i32) -> Result<bool> {
        Ok(true)
    }
    fn mem_create(&self, _size: u64, _props: &AllocationProps) -> Result<PhysicalHandle> {
        Ok(PhysicalHandle(self.next()))
    }
    fn mem_address_reserve(&self, _size: u64, _alignment: u64, _hint: u64) -> Result<DevicePtr> {
        Ok(self.memory)
    }
    unsafe fn mem_address_free(&self, _ptr: DevicePtr, _size: u64) -> Result<()> {
        Ok(())
    }
    fn stream_create(&self, device: i32) -> Result<StreamHandle> {
        Ok(StreamHandle {
            device,
            raw: self.next(),
        })
    }
    unsafe fn stream_destroy(&self, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn stream_synchronize(&self, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn stream_query(&self, _stream: StreamHandle) -> Result<bool> {
        Ok(true)
    }
    unsafe fn stream_wait_event(&self, _stream: StreamHandle, _event: EventHandle) -> Result<()> {
        Ok(())
    }
    fn event_create(&self, device: i32, _timing: bool) -> Result<EventHandle> {
        Ok(EventHandle {
            device,
            raw: self.next(),
        })
    }
    unsafe fn event_destroy(&self, _event: EventHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn event_record(&self, _event: EventHandle, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn event_query(&self, _event: EventHandle) -> Result<bool> {
        Ok(true)
    }
}

// SAFETY: as for `Backend`.
unsafe impl PoolCalls for Null {
    fn api(&self) -> &'static str {
        "driver"
    }
    fn pool_create(&self, _props: &PoolProps) -> Result<PoolHandle> {
        Ok(PoolHandle(self.next()))
    }
    unsafe fn pool_destroy(&self, _pool: PoolHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn pool_set_attribute(
        &self,
        _pool: PoolHandle,
        _attribute: PoolAttribute,
        _value: u64,
    ) -> Result<()> {
        Ok(())
    }
    unsafe fn pool_get_attribute(
        &self,
        _pool: PoolHandle,
        _attribute: PoolAttribute,
    ) -> Result<u64> {
        Ok(0)
    }
    unsafe fn pool_trim_to(&self, _pool: PoolHandle, _keep: u64) -> Result<()> {
        Ok(())
    }
    unsafe fn pool_set_access(&self, _pool: PoolHandle, _access: &[AccessDesc]) -> Result<()> {
        Ok(())
    }
    unsafe fn pool_get_access(&self, _pool: PoolHandle, _location: Location) -> Result<u64> {
        Ok(3)
    }
    unsafe fn alloc_from_pool_async(
        &self,
        _pool: PoolHandle,
        _size: u64,
        _stream: StreamHandle,
    ) -> Result<DevicePtr> {
        Ok(self.memory)
    }
    unsafe fn free_async(&self, _ptr: DevicePtr, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
}
