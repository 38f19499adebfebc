//! The driver in use: CUDA's, or a simulated one. [`Relaxed`] leaves captures of streams into CUDA graphs undisturbed.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use crate::fork::Generation;
use crate::{Backend, CaptureMode, Error, PoolApi, PoolCalls, Result, cuda};

/// A driver: CUDA's, or a simulated one. Cheap to clone; clones are the same driver.
///
/// It dereferences to [`Backend`], whose methods are the driver's calls, one by one. Most programs
/// need only `Buffer`, `Pool` and `Topology`.
#[derive(Clone)]
pub struct Driver {
    backend: Arc<dyn Backend>,
    /// The process that opened the driver.
    born: Generation,
}

impl Driver {
    /// Opens the CUDA driver of this machine and initialises it.
    ///
    /// Source: `cuInit`, through `libcuda.so.1`, loaded at run time.
    ///
    /// # Errors
    /// [`Error::NoDriver`] without a usable library, [`Error::DriverTooOld`] before CUDA 12.2,
    /// [`Error::Driver`] if `cuInit` fails, for example with `NO_DEVICE`.
    pub fn open() -> Result<Self> {
        cuda::open().map(Self::from_backend)
    }

    /// Creates a driver from a backend of your own.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        Self {
            backend,
            born: Generation::current(),
        }
    }

    /// Returns whether the machine is simulated: times measured on it mean nothing.
    pub fn is_simulated(&self) -> bool {
        self.simulated_host().is_some()
    }

    /// Returns the pool calls of one API.
    ///
    /// # Errors
    /// For [`PoolApi::Runtime`]: [`Error::MissingLibrary`] without a CUDA runtime library.
    pub fn pools(&self, api: PoolApi) -> Result<&dyn PoolCalls> {
        match api {
            PoolApi::Driver => Ok(self.driver_pools()),
            PoolApi::Runtime => self.runtime_pools(),
        }
    }

    /// Returns whether both are the same driver.
    #[inline]
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.backend, &other.backend)
    }

    /// Returns an address that is unique among living drivers. CUDA opened several times is one driver.
    pub fn address(&self) -> usize {
        if self.name() == "cuda" {
            return 0;
        }
        Arc::as_ptr(&self.backend).cast::<()>().addr()
    }

    /// Returns whether this process opened the driver, rather than an ancestor that forked it. A forked child
    /// frees nothing: a lock may never be released, and the memory is the parent's.
    #[inline]
    pub fn is_of_this_process(&self) -> bool {
        self.born.is_current()
    }

    /// Checks that this process opened the driver: in a forked child a lock may be held for ever.
    #[inline]
    pub fn expect_this_process(&self, what: &'static str) -> Result<()> {
        if self.is_of_this_process() {
            Ok(())
        } else {
            Err(forked(what))
        }
    }

    /// Returns a reference that does not keep the driver alive.
    pub fn downgrade(&self) -> WeakDriver {
        WeakDriver(Arc::downgrade(&self.backend))
    }

    /// Checks that `other` is the same driver: handles mean nothing to another driver.
    #[inline]
    pub fn expect_same(&self, other: &Self, what: &'static str) -> Result<()> {
        if self.same(other) {
            Ok(())
        } else {
            Err(Error::invalid(what, "it belongs to another driver"))
        }
    }
}

#[cold]
fn forked(what: &'static str) -> Error {
    let why = "it is the parent process's, and a forked child has no GPU: use it in the parent";
    Error::invalid(what, why)
}

/// Tells whether a driver still exists and which one it is, without keeping it alive.
#[derive(Clone, Debug)]
pub struct WeakDriver(Weak<dyn Backend>);

impl WeakDriver {
    /// Returns whether any clone of the driver exists.
    pub fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Returns whether both are of the same driver. A driver's identity is not used again while either lives.
    pub fn same(&self, other: &Self) -> bool {
        self.0.ptr_eq(&other.0)
    }
}

impl Deref for Driver {
    type Target = dyn Backend;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &*self.backend
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({})", self.name())
    }
}

thread_local! {
    /// The driver whose mode a value of this thread has relaxed, by its address; `None` if none has.
    static RELAXED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Sets the calling thread's capture mode to [`CaptureMode::RELAXED`] until dropped, on that thread.
///
/// ```compile_fail
/// fn sent<T: Send>() {}
/// sent::<egmem_driver::Relaxed<'static>>();
/// ```
///
/// Querying an event is one of the calls that a capture forbids: in the default mode it fails while any
/// thread of the process captures in that mode, and invalidates that capture. A library that queries its own
/// events must not spoil a graph that it knows nothing of.
///
/// Source: `cuThreadExchangeStreamCaptureMode`.
pub struct Relaxed<'a> {
    driver: &'a Driver,
    /// `None`: the mode was not changed.
    before: Option<CaptureMode>,
    /// [`RELAXED`] before.
    outer: Option<usize>,
    /// Stays on its thread.
    _not_send: PhantomData<*const ()>,
}

impl<'a> Relaxed<'a> {
    /// Sets the mode. Inside the life of another value for the driver this costs no call.
    pub fn new(driver: &'a Driver) -> Self {
        let (own, outer) = (Some(driver.address()), RELAXED.get());
        let mut before = None;
        if outer != own {
            // A driver without this call cannot capture either, or the later calls return an error.
            match driver.thread_exchange_capture_mode(CaptureMode::RELAXED) {
                Ok(mode) => before = Some(mode),
                Err(error) => {
                    tracing::debug!(%error, "the capture mode cannot be relaxed: a capture may fail");
                }
            }
        }
        if before.is_some() {
            RELAXED.set(own);
        }
        Self {
            driver,
            before,
            outer,
            _not_send: PhantomData,
        }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let Some(before) = self.before else { return };
        RELAXED.set(self.outer);
        if before == CaptureMode::RELAXED {
            return;
        }
        if let Err(error) = self.driver.thread_exchange_capture_mode(before) {
            tracing::warn!(%error, "this thread's capture mode stays relaxed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;
    use crate::{Call, Code};

    #[test]
    fn the_thread_has_its_mode_back_afterwards() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let swap = |mode| driver.thread_exchange_capture_mode(mode).unwrap();
        assert_eq!(swap(CaptureMode::THREAD_LOCAL), CaptureMode::GLOBAL);
        {
            let _outer = Relaxed::new(&driver);
            let _inner = Relaxed::new(&driver);
            assert_eq!(swap(CaptureMode::RELAXED), CaptureMode::RELAXED);
        }
        assert_eq!(swap(CaptureMode::THREAD_LOCAL), CaptureMode::THREAD_LOCAL);
        let sim = driver.sim().unwrap();
        sim.fail(Call::ThreadExchangeStreamCaptureMode, 1, Code::UNKNOWN);
        drop(Relaxed::new(&driver));
        assert_eq!(swap(CaptureMode::GLOBAL), CaptureMode::THREAD_LOCAL);
    }
}
