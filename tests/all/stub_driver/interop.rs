//! cudarc's copies and launches on this crate's memory, on the stub libcuda.

use cudarc::driver::{CudaContext, DeviceSlice};
use egmem::driver::sim::Machine;
use egmem::driver::{Access, Location, NodeId, StreamHandle};
use egmem::interop::{EgmSlice, EgmSliceMut};
use egmem::{Buffer, Driver, Error};

use crate::stub_driver::harness::{Stub, cuda_for_cudarc, stubbed};

fn buffer(driver: &Driver) -> Buffer {
    let options = Buffer::on(NodeId(0)).bytes(4096).overcommit(true);
    options
        .access_by([Location::Device(0)])
        .allocate(driver)
        .unwrap()
}

stubbed! {
    fn copies_reach_the_memory_and_are_waited_for(cuda_for_cudarc()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        let mut buffer = buffer(&driver);
        let stream = CudaContext::new(0).unwrap().default_stream();
        let work = |stub: &Stub| {
            let mut calls = stub.calls();
            calls.retain(|call| call.starts_with("cuMemcpy") || call.starts_with("cuStream"));
            calls
        };
        let source = EgmSlice::<u32>::new(&buffer, &stream).unwrap();
        assert_eq!(source.len(), 1024);
        work(&stub);
        let mut host = [0_u32; 2];
        stream.memcpy_dtoh(&source.slice(5..7).unwrap(), &mut host).unwrap();
        assert_eq!(host, [0x0101_0101; 2]);
        assert_eq!(work(&stub), [
            "cuStreamIsCapturing gpu0 stream=(nil)",
            "cuMemcpyDtoHAsync_v2 gpu0 src=0x700000000014 bytes=8 stream=(nil)",
            "cuStreamSynchronize gpu0 stream=(nil)",
        ]);
        let mut target = EgmSliceMut::<i32>::new(&mut buffer, &stream).unwrap();
        stream.memcpy_htod(&[-3], &mut target.slice_mut(1023..1024).unwrap()).unwrap();
        assert_eq!(work(&stub), [
            "cuStreamIsCapturing gpu0 stream=(nil)",
            "cuMemcpyHtoDAsync_v2 gpu0 dst=0x700000000ffc first=-3 bytes=4 stream=(nil)",
            "cuStreamSynchronize gpu0 stream=(nil)",
        ]);
        assert!(target.slice(0..1025).is_err());
        // SAFETY: the stub follows no address.
        let unwaited = unsafe {
            EgmSlice::<i32>::from_raw_parts(egmem::driver::DevicePtr(64), 3, &stream)
        };
        stream.memcpy_dtod(&unwaited, &mut target).unwrap();
        assert_eq!(work(&stub), [
            "cuStreamIsCapturing gpu0 stream=(nil)",
            "cuMemcpyDtoDAsync_v2 gpu0 dst=0x700000000000 src=0x40 bytes=12 stream=(nil)",
            "cuStreamSynchronize gpu0 stream=(nil)",
        ]);
        stream.memcpy_dtoh(&unwaited, &mut [0; 3]).unwrap();
        assert_eq!(work(&stub).len(), 1);
        let handle = StreamHandle::from(&*stream);
        assert_eq!((handle.device, handle.raw), (0, 0));
    }

    fn simulated_memory_is_refused(cuda_for_cudarc()) {
        let _cuda = Driver::open().unwrap();
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let buffer = Buffer::near(&driver, 0, 4096).unwrap();
        let stream = CudaContext::new(0).unwrap().default_stream();
        let error = EgmSlice::<u8>::new(&buffer, &stream).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { what: "memory", .. }), "{error:?}");
    }

    fn a_gpu_without_access_is_named(cuda_for_cudarc().set("STUB_ACCESS", 1)) {
        let driver = Driver::open().unwrap();
        let mut buffer = buffer(&driver);
        let stream = CudaContext::new(1).unwrap().default_stream();
        EgmSlice::<u8>::new(&buffer, &stream).unwrap();
        let error = EgmSliceMut::<u8>::new(&mut buffer, &stream).unwrap_err();
        let (who, have) = (Location::Device(1), Access::Read);
        assert_eq!(error, Error::NotAccessible { who, have, need: Access::ReadWrite });
    }
}
