//! Makes a pool a device's current one, from which plain `cudaMallocAsync` allocates.

use std::sync::{Mutex, MutexGuard};

use super::{Pool, PoolBuffer};
use crate::driver::{Code, PoolHandle};
use crate::explain::name_missing_gpu;
use crate::per_driver::lock;
use crate::stream::Stream;
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

/// The devices whose current pool belongs to a guard, each with its driver's address. The lock is held over
/// every change and every allocation from the current pool, so that an allocation cannot come from another
/// pool.
static CURRENT: Mutex<Vec<(usize, i32)>> = Mutex::new(Vec::new());

fn current() -> MutexGuard<'static, Vec<(usize, i32)>> {
    lock(&CURRENT)
}

/// While it lives, the pool is the device's current one, for the whole process.
///
/// A device has one guard at a time: with two, the earlier pool could become current again after it was
/// destroyed.
#[derive(Debug)]
#[must_use = "dropped, it makes the earlier pool current again"]
pub struct DevicePoolGuard {
    pool: Pool,
    device: i32,
    previous: PoolHandle,
}

impl Pool {
    /// Makes this pool the current one of GPU `device`, until the guard is dropped.
    ///
    /// Source: `cuDeviceSetMemPool`, `cudaDeviceSetMemPool`.
    ///
    /// # Errors
    /// [`Error::PlatformUnsupported`] if a host pool cannot be a device's pool, as on x86 machines with CUDA
    /// 13.0: allocate from the pool itself there. [`Error::InvalidArgument`] while another guard lives for
    /// the device; [`Error::NoSuchGpu`].
    pub fn make_current(&self, device: i32) -> Result<DevicePoolGuard> {
        let calls = self.calls()?;
        let mut current = current();
        let key = (self.driver().address(), device);
        if current.contains(&key) {
            let why =
                format!("GPU {device} has a current pool by another guard: drop that one first");
            return Err(Error::invalid("device", why));
        }
        let previous = calls
            .device_pool(device)
            .map_err(|error| name_missing_gpu(self.driver(), error, device))?;
        // SAFETY: the guard holds the pool while it is current.
        unsafe { calls.device_set_pool(device, self.handle()) }.map_err(|error| match error {
            Error::Driver(source)
                if self.props().location.is_host()
                    && matches!(source.code, Code::INVALID_VALUE | Code::NOT_SUPPORTED) =>
            {
                let what =
                    "a host memory pool as a device's current pool; allocate from the pool itself";
                Error::unsupported(what, Some(source))
            }
            other => other,
        })?;
        current.push(key);
        Ok(DevicePoolGuard {
            pool: self.clone(),
            device,
            previous,
        })
    }
}

impl DevicePoolGuard {
    /// Allocates `bytes` from the device's current pool.
    ///
    /// Source: `cuMemAllocAsync`, `cudaMallocAsync`.
    ///
    /// # Errors
    /// As [`Pool::allocate`]; [`Error::InvalidArgument`] for a stream of another GPU, or if code outside this
    /// crate has made another pool current meanwhile.
    #[track_caller]
    pub fn allocate(&self, bytes: u64, stream: &Stream) -> Result<PoolBuffer> {
        if stream.device() != self.device || bytes == 0 {
            let why = format!("{bytes} bytes on a stream of GPU {}", stream.device());
            return Err(Error::invalid("allocation", why));
        }
        self.pool.allocate_by(bytes, stream, |calls| {
            let _unchanged = current();
            if calls.device_pool(self.device)? != self.pool.handle() {
                let why = format!("it is no longer the current one of GPU {}", self.device);
                return Err(Error::invalid("pool", why));
            }
            // SAFETY: `stream` keeps its handle alive.
            unsafe { calls.alloc_async(bytes, stream.handle()) }
        })
    }
}

impl Drop for DevicePoolGuard {
    fn drop(&mut self) {
        if !self.pool.driver().is_of_this_process() {
            return;
        }
        let key = (self.pool.driver().address(), self.device);
        let mut current = current();
        current.retain(|&other| other != key);
        give_back_or_log(self.pool.driver(), "a device's current pool", || {
            // SAFETY: the earlier pool was current before and did not belong to a guard, so it is the
            // device's default one, or code outside this crate keeps it alive.
            unsafe {
                self.pool
                    .calls()?
                    .device_set_pool(self.device, self.previous)
            }
        });
    }
}
