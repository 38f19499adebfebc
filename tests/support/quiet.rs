//! Calls of a driver that keeps no record of its memory.

/// In an `unsafe impl Backend` of a type that also implements `PoolCalls`: one GPU and one host NUMA node, 0 and 0, and calls
/// on memory that do nothing and succeed.
#[macro_export]
macro_rules! quiet_calls {
    () => {
        fn driver_pools(&self) -> &dyn egmem::driver::PoolCalls {
            self
        }
        fn driver_version(&self) -> egmem::Result<egmem::driver::CudaVersion> {
            Ok(egmem::driver::CudaVersion(13000))
        }
        fn device_count(&self) -> egmem::Result<i32> {
            Ok(1)
        }
        fn device_attribute(
            &self,
            _device: i32,
            attribute: egmem::driver::DeviceAttribute,
        ) -> egmem::Result<i32> {
            Ok(match attribute {
                egmem::driver::DeviceAttribute::HOST_NUMA_ID => 0,
                egmem::driver::DeviceAttribute::NUMA_ID => -1,
                _ => 1,
            })
        }
        fn mem_granularity(
            &self,
            _props: &egmem::driver::AllocationProps,
            _kind: egmem::driver::GranularityKind,
        ) -> egmem::Result<u64> {
            Ok(2 << 20)
        }
        unsafe fn mem_release(&self, _handle: egmem::driver::PhysicalHandle) -> egmem::Result<()> {
            Ok(())
        }
        unsafe fn mem_map(
            &self,
            _ptr: egmem::driver::DevicePtr,
            _size: u64,
            _offset: u64,
            _handle: egmem::driver::PhysicalHandle,
        ) -> egmem::Result<()> {
            Ok(())
        }
        unsafe fn mem_unmap(
            &self,
            _ptr: egmem::driver::DevicePtr,
            _size: u64,
        ) -> egmem::Result<()> {
            Ok(())
        }
        unsafe fn mem_set_access(
            &self,
            _ptr: egmem::driver::DevicePtr,
            _size: u64,
            _access: &[egmem::driver::AccessDesc],
        ) -> egmem::Result<()> {
            Ok(())
        }
        fn mem_get_access(
            &self,
            _location: egmem::driver::Location,
            _ptr: egmem::driver::DevicePtr,
        ) -> egmem::Result<u64> {
            Ok(3)
        }
    };
}
