//! Lets programs that use [cudarc](https://docs.rs/cudarc) pass this crate's memory to cudarc's copies and
//! launches. Needs the feature `interop`.
//!
//! The program depends on cudarc 0.19 itself and chooses its CUDA version (`cuda-12080`, …) and its linking.
//! This crate chooses neither: it compiles with every CUDA version of cudarc. If no crate of the build
//! selects a version, cudarc takes that of `nvcc`, or its newest if there is no `nvcc`.
//!
//! - [`DevicePtr`] is a kernel argument: `builder.arg(&buffer.device_ptr())`, kept in a variable.
//! - [`EgmSlice`] and [`EgmSliceMut`] are memory seen as elements, which cudarc copies from and to
//!   (`memcpy_dtoh`, `memcpy_htod`, `memcpy_dtod`, …), and kernel arguments too.
//!
//! The driver must come from [`Driver::open`](crate::Driver::open). Open it first: without libcuda it returns
//! an error, but cudarc panics. Both use the devices' primary contexts, so they can share addresses, streams
//! and events. `examples/cudarc` has complete examples.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use cudarc::driver::{
    CudaStream, DevicePtr as CudarcPtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg,
    SyncOnDrop, sys,
};

use crate::driver::{Access, DevicePtr, Location};
use crate::memory::{Engine, GrantUse, Memory, expect_gpu_access};
use crate::{Error, Result};

/// Memory of this crate as elements `T` for cudarc to read: a source of its copies.
///
/// If it was made with [`new`](Self::new), every copy finishes before it returns, so the memory may be freed
/// when the borrow ends. The driver refuses a copy on a stream that is being captured into a graph
/// (INVALID_VALUE). Kernels are launched by unsafe code, which is responsible for them. A copy to a slice of
/// another context is queued on that context's stream: synchronise it before the memory is dropped.
pub type EgmSlice<'a, T> = Elements<T, &'a [T]>;

/// Memory of this crate as elements `T` for cudarc to read and write: source and destination of its copies.
/// Otherwise like [`EgmSlice`].
///
/// An `Arc` of memory can make several for the same bytes. Work on both then leaves a mix of both.
pub type EgmSliceMut<'a, T> = Elements<T, &'a mut [T]>;

/// Memory as elements `T`, borrowed as `B`: [`EgmSlice`] and [`EgmSliceMut`].
#[derive(Debug)]
pub struct Elements<T, B> {
    raw: Raw,
    stream: Arc<CudaStream>,
    /// `None` in parts: they borrow the whole, which has the grants.
    _grants: Option<GrantUse>,
    memory: PhantomData<(B, T)>,
}

#[derive(Clone, Copy, Debug)]
struct Raw {
    ptr: DevicePtr,
    len: usize,
    wait: bool,
}

/// Refuses memory in whose copies the driver would crash the process (docs/driver-behaviour.md, "Traps"): cudarc makes
/// each by one call, and from memory of any kind.
fn expect_copies(memory: &impl Memory, need: Access) -> Result<()> {
    let len = memory.len();
    if memory.of_one_copy(0, len) != len {
        let why = "one copy by the driver cannot take all of it: it has several registrations, or some of it is the CPU's \
                   and some a GPU's";
        return Err(Error::invalid("memory", why));
    }
    if need == Access::ReadWrite && memory.is_read_only_for_cpu(0, len) {
        return Err(Error::not_accessible(Location::Host, Access::Read, need));
    }
    Ok(())
}

impl Raw {
    fn new<T>(
        memory: &impl Memory,
        stream: &CudaStream,
        need: Access,
    ) -> Result<(Self, Option<GrantUse>)> {
        memory.driver().expect_this_process("memory")?;
        // Before the checks: their result stays valid.
        let grants = memory.hold_grants();
        if memory.driver().name() != "cuda" {
            let why = "cudarc works on CUDA's memory, this is a simulated driver's";
            return Err(Error::invalid("memory", why));
        }
        // SAFETY: cudarc's stream is live while borrowed, and there is one CUDA driver in a process.
        unsafe { memory.ready_on(stream.into())? };
        let ptr = memory.device_ptr();
        let len = memory
            .len()
            .checked_div(size_of::<T>() as u64)
            .ok_or_else(|| Error::invalid("element type", "it has no size"))?;
        if !ptr.0.is_multiple_of(align_of::<T>() as u64) {
            let why = format!("{ptr:?} is not aligned to its {} bytes", align_of::<T>());
            return Err(Error::invalid("element type", why));
        }
        expect_copies(memory, need)?;
        let gpu = stream.context().ordinal() as i32;
        expect_gpu_access(memory, (gpu, Engine::Copy), (0, memory.len()), need)?;
        let mapped = memory.driver().mem_get_access(Location::Device(gpu), ptr);
        if !mapped.is_ok_and(|flags| flags != 0) {
            // Waits for a pool's allocation, because cudarc may use the slice on other streams too. SAFETY:
            // cudarc's stream is live while borrowed.
            unsafe { memory.driver().stream_synchronize(stream.into())? }
        }
        let raw = Self {
            ptr,
            len: len as usize,
            wait: true,
        };
        Ok((raw, grants))
    }

    fn part<T>(self, range: &Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.len {
            let size = size_of::<T>() as u64;
            return Err(Error::OutOfRange {
                offset: (range.start as u64).saturating_mul(size),
                len: (range.end.saturating_sub(range.start) as u64).saturating_mul(size),
                size: self.len as u64 * size,
            });
        }
        Ok(Self {
            ptr: self.ptr.add((range.start * size_of::<T>()) as u64),
            len: range.len(),
            ..self
        })
    }

    fn lend<'a>(&self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        // A graph would run the copy at any later time, after the borrow of the memory. This function cannot
        // return an error to cudarc, but the driver refuses the null address.
        let free = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        if self.wait && stream.capture_status() != Ok(free) {
            return (0, SyncOnDrop::Sync(None));
        }
        let done = if self.wait {
            SyncOnDrop::sync_stream(stream)
        } else {
            SyncOnDrop::Sync(None)
        };
        (self.ptr.0, done)
    }
}

impl<'a, T: AnyBitPattern> EgmSlice<'a, T> {
    /// Returns all of `memory` as elements; leaves out bytes beyond the last whole element.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for simulated memory or a `T` without size, [`Error::NotAccessible`] unless
    /// the stream's GPU may read.
    pub fn new(memory: &'a impl Memory, stream: &Arc<CudaStream>) -> Result<Self> {
        let (raw, grants) = Raw::new::<T>(memory, stream, Access::Read)?;
        Ok(Self::with(raw, stream, grants))
    }

    /// Returns `len` elements at `ptr`; their copies are not waited for.
    ///
    /// # Safety
    /// Until all work that uses the slice is done, which may be long after it is dropped, the range stays
    /// mapped and readable for the stream's GPU, and nothing writes it. Its bytes are initialised, and `ptr`
    /// is aligned to `T`.
    pub unsafe fn from_raw_parts(ptr: DevicePtr, len: usize, stream: &Arc<CudaStream>) -> Self {
        let wait = false;
        Self::with(Raw { ptr, len, wait }, stream, None)
    }
}

impl<'a, T: AnyBitPattern + NoUninit> EgmSliceMut<'a, T> {
    /// Returns all of `memory` as elements; leaves out bytes beyond the last whole element.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for simulated memory or a `T` without size, [`Error::NotAccessible`] unless
    /// the stream's GPU may read and write.
    pub fn new(memory: &'a mut impl Memory, stream: &Arc<CudaStream>) -> Result<Self> {
        let (raw, grants) = Raw::new::<T>(memory, stream, Access::ReadWrite)?;
        Ok(Self::with(raw, stream, grants))
    }

    /// Returns `len` elements at `ptr`; their copies are not waited for.
    ///
    /// # Safety
    /// Until all work that uses the slice is done, which may be long after it is dropped, the range stays
    /// mapped, readable and writable for the stream's GPU, and nothing else reads or writes it. Its bytes are
    /// initialised, and `ptr` is aligned to `T`.
    pub unsafe fn from_raw_parts(ptr: DevicePtr, len: usize, stream: &Arc<CudaStream>) -> Self {
        let wait = false;
        Self::with(Raw { ptr, len, wait }, stream, None)
    }

    /// Returns the elements of `range`, to read and write.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<EgmSliceMut<'_, T>> {
        let part = self.raw.part::<T>(&range)?;
        Ok(EgmSliceMut::with(part, &self.stream, None))
    }
}

impl<T, B> Elements<T, B> {
    fn with(raw: Raw, stream: &Arc<CudaStream>, grants: Option<GrantUse>) -> Self {
        Self {
            raw,
            stream: stream.clone(),
            _grants: grants,
            memory: PhantomData,
        }
    }

    /// Returns the elements of `range`, to read.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice(&self, range: Range<usize>) -> Result<EgmSlice<'_, T>> {
        let part = self.raw.part::<T>(&range)?;
        Ok(EgmSlice::with(part, &self.stream, None))
    }
}

impl<T, B> DeviceSlice<T> for Elements<T, B> {
    fn len(&self) -> usize {
        self.raw.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T, B> CudarcPtr<T> for Elements<T, B> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.raw.lend(stream)
    }
}

impl<T> DevicePtrMut<T> for EgmSliceMut<'_, T> {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.raw.lend(stream)
    }
}

// SAFETY: this pushes the address of the first element, borrowed for as long as the launch.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b EgmSlice<'_, T>> for LaunchArgs<'a> {
    fn arg(&mut self, slice: &'b EgmSlice<'_, T>) -> &mut Self {
        self.arg(&slice.raw.ptr)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut EgmSliceMut<'_, T>> for LaunchArgs<'a> {
    fn arg(&mut self, slice: &'b mut EgmSliceMut<'_, T>) -> &mut Self {
        self.arg(&slice.raw.ptr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: Raw = Raw {
        ptr: DevicePtr(0x1000),
        len: 10,
        wait: true,
    };

    #[test]
    fn a_part_starts_at_its_first_element() {
        let part = RAW.part::<u32>(&(3..7)).unwrap();
        assert_eq!((part.ptr, part.len), (DevicePtr(0x100c), 4));
        assert_eq!(RAW.part::<u32>(&(10..10)).unwrap().len, 0);
    }

    #[test]
    fn a_part_beyond_the_end_is_refused() {
        #[allow(clippy::reversed_empty_ranges)] // the test wants the reversed range
        for range in [9..11, 11..11, 5..4, usize::MAX..usize::MAX] {
            assert!(
                matches!(RAW.part::<u64>(&range), Err(Error::OutOfRange { .. })),
                "{range:?}"
            );
        }
    }
}
