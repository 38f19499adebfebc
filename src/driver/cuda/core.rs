//! The driver's functions, and its devices' primary contexts: retained once per device, made current for a call, and
//! released.

use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use super::abi::Opaque;
use super::library::Library;
use super::symbols::DriverApi;
use crate::fork::Generation;
use crate::*;

/// The driver's own name comes first: the other may be the toolkit's stub, which is only for linking.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// From 12.4 on VMM works without a context on every visible device.
const VMM_WITHOUT_CONTEXTS: CudaVersion = CudaVersion(12040);

/// A call of the driver. Not a type parameter, of which the compiler would make the functions here once for each call.
pub(super) type Work<'a> = &'a mut dyn FnMut() -> Result<()>;

#[derive(Default)]
struct Device {
    /// `CUdevice`
    id: OnceLock<i32>,
    /// `CUcontext`, as a number so that it can be shared; never dereferenced here.
    context: OnceLock<usize>,
    /// The context's number, which the driver gives to no other one.
    number: OnceLock<u64>,
    /// The call that showed that the context was destroyed. Its streams and events are gone, and a context that another
    /// library makes anew may have the same address.
    destroyed: OnceLock<DriverError>,
    /// Whether a call has shown that the context is lost.
    lost: AtomicBool,
}

/// The state that both APIs share.
pub(super) struct Core {
    pub api: DriverApi,
    devices: Box<[Device]>,
    // Held while a context is being retained, so that it is retained only once.
    retaining: Mutex<()>,
    // A forked child has a copy of this value, but not of the driver's state.
    born: Generation,
    /// Granularities never change, and a query takes over 1 % of the time to create 2 MiB.
    pub granularities: Mutex<Vec<(AllocationProps, GranularityKind, u64)>>,
}

impl Core {
    pub fn open() -> Result<Self> {
        let mut api = DriverApi::new(load()?, PoolApi::Driver, None);
        // SAFETY: the flags must be 0.
        unsafe { api.init(0)? };
        let have = api.learn_version()?;
        if have < CudaVersion::OLDEST {
            return Err(Error::DriverTooOld {
                what: "egmem",
                have,
                need: CudaVersion::OLDEST,
            });
        }
        let mut count = 0;
        // SAFETY: `count` is a live integer.
        unsafe { api.device_get_count(&mut count)? };
        let core = Self {
            api,
            devices: (0..count).map(|_| Device::default()).collect(),
            retaining: Mutex::new(()),
            born: Generation::current(),
            granularities: Mutex::default(),
        };
        if have < VMM_WITHOUT_CONTEXTS {
            (0..count).try_for_each(|ordinal| core.primary(ordinal).map(drop))?;
        }
        Ok(core)
    }

    /// Runs a call that needs no context.
    pub fn here(&self, work: Work<'_>) -> Result<()> {
        work()
    }

    /// Replaces the error if a location or handle type is newer than the driver.
    pub fn age(&self, error: Error, location: Location, handle_types: HandleTypes) -> Error {
        versions::explain(error, self.api.version(), location, handle_types)
    }

    fn slot(&self, ordinal: i32) -> Option<&Device> {
        self.devices.get(usize::try_from(ordinal).ok()?)
    }

    /// Returns the `CUdevice` of an ordinal. The driver refuses ordinals that do not exist.
    pub fn device(&self, ordinal: i32) -> Result<i32> {
        let known = self.slot(ordinal);
        if let Some(id) = known.and_then(|device| device.id.get()) {
            return Ok(*id);
        }
        let mut id = -1;
        // SAFETY: `id` is a live integer.
        unsafe { self.api.device_get(&mut id, ordinal)? };
        Ok(known.map_or(id, |device| *device.id.get_or_init(|| id)))
    }

    /// Returns the primary context of an ordinal; retains it on first use.
    fn primary(&self, ordinal: i32) -> Result<Opaque> {
        let id = self.device(ordinal)?;
        let slot = self
            .slot(ordinal)
            .ok_or(Error::driver(Call::DeviceGet, Code::INVALID_DEVICE))?;
        if let Some(context) = slot.context.get() {
            return Ok(*context as Opaque);
        }
        let _retaining = lock(&self.retaining);
        if let Some(context) = slot.context.get() {
            return Ok(*context as Opaque);
        }
        let mut context = ptr::null_mut();
        // SAFETY: `context` is a live pointer; `id` is a device; `drop` releases the context retained here.
        unsafe { self.api.device_primary_ctx_retain(&mut context, id)? };
        // Drivers before 12.0 number no contexts.
        if let Ok(number) = number_of(&self.api, context) {
            let _first = slot.number.set(number);
        }
        Ok(*slot.context.get_or_init(|| context as usize) as Opaque)
    }

    /// Runs `work` with the primary context of `ordinal` current, and restores the caller's. A context that was destroyed is
    /// never used again.
    pub fn on(&self, ordinal: i32, work: Work<'_>) -> Result<()> {
        let _guard = self.enter(ordinal)?;
        work().map_err(|error| self.lost(error, ordinal))
    }

    fn enter(&self, ordinal: i32) -> Result<Current<'_>> {
        let entered = Current::enter(&self.api, self.live(ordinal)?);
        entered.map_err(|error| self.lost(error, ordinal))
    }

    /// Runs `work`, which finds the context by this stream where the driver lets it: making a context current waits for other
    /// threads' calls.
    pub fn at(&self, stream: StreamHandle, work: Work<'_>) -> Result<()> {
        if stream.is_default() {
            return self.on(stream.device, work);
        }
        self.live(stream.device)?;
        match work() {
            Err(error)
                if matches!(
                    error.code(),
                    Some(Code::INVALID_CONTEXT | Code::INVALID_HANDLE)
                ) =>
            {
                self.on(stream.device, work)
            }
            result => result.map_err(|error| self.lost(error, stream.device)),
        }
    }

    /// Returns the primary context of an ordinal, which was not destroyed.
    fn live(&self, ordinal: i32) -> Result<Opaque> {
        if let Some(&source) = self.slot(ordinal).and_then(|slot| slot.destroyed.get()) {
            let device = ordinal;
            return Err(Error::ContextLost { device, source });
        }
        let context = self.primary(ordinal)?;
        // The driver crashes where it is given a stream of a context that was reset.
        if let Some(call) = self.shown_gone(ordinal, context) {
            return Err(self.lost(Error::driver(call, Code::CONTEXT_IS_DESTROYED), ordinal));
        }
        Ok(context)
    }

    /// Converts the error if its code means that the device's context is lost, and notes that it was destroyed.
    fn lost(&self, error: Error, device: i32) -> Error {
        let Error::Driver(source) = error else {
            return error;
        };
        let is_destroyed = match source.code {
            Code::CONTEXT_IS_DESTROYED => true,
            Code::INVALID_CONTEXT => {
                source.call == Call::CtxPushCurrent
                    || self
                        .primary(device)
                        .is_ok_and(|context| self.shown_gone(device, context).is_some())
            }
            _ => false,
        };
        if !is_destroyed && !source.code.loses_context() {
            return error;
        }
        if let Some(slot) = self.slot(device) {
            slot.lost.store(true, Ordering::Relaxed);
            if is_destroyed {
                let _first = slot.destroyed.set(source);
            }
        }
        Error::ContextLost { device, source }
    }

    /// Returns whether the primary context of an ordinal exists in this process; `None` if the driver does not tell.
    pub fn is_active(&self, ordinal: i32) -> Option<bool> {
        let (mut flags, mut active) = (0, 0);
        let id = self.device(ordinal).ok()?;
        // SAFETY: both are live integers.
        unsafe {
            self.api
                .device_primary_ctx_get_state(id, &mut flags, &mut active)
        }
        .ok()?;
        Some(active != 0)
    }

    /// Returns the first ordinal whose primary context exists in this process and was not seen lost.
    pub fn active_device(&self) -> Option<i32> {
        let is_usable = |ordinal: &i32| {
            let slot = self.slot(*ordinal);
            slot.is_none_or(|slot| !slot.lost.load(Ordering::Relaxed))
                && self.is_active(*ordinal) == Some(true)
        };
        (0..self.devices.len() as i32).find(is_usable)
    }

    /// Returns the call by which the driver says that a primary context, which is retained, does not exist or is another one by
    /// now.
    ///
    /// By its number, which takes no lock: `cuDevicePrimaryCtxGetState` waits for other threads' calls.
    fn shown_gone(&self, ordinal: i32, context: Opaque) -> Option<Call> {
        let known = self.slot(ordinal).and_then(|slot| slot.number.get());
        if let Some(known) = known {
            match number_of(&self.api, context) {
                Ok(now) => return (now != *known).then_some(Call::CtxGetId),
                Err(error) if error.code() == Some(Code::CONTEXT_IS_DESTROYED) => {
                    return Some(Call::CtxGetId);
                }
                Err(_) => {}
            }
        }
        let is_gone = self.is_active(ordinal) == Some(false);
        is_gone.then_some(Call::DevicePrimaryCtxGetState)
    }

    /// Runs `work`, which needs no particular context, in the caller's; in that of the first device that has one, or else
    /// of the first device, if the driver needs one and the caller has none.
    pub fn anywhere(&self, work: Work<'_>) -> Result<()> {
        match work() {
            Err(error) if error.code() == Some(Code::INVALID_CONTEXT) => self.on_any(work),
            result => result,
        }
    }

    /// Runs `work` in the context of the first device that has one, or else of the first device; again in that of the next, if the
    /// first one shows that it is lost.
    pub fn on_any(&self, work: Work<'_>) -> Result<()> {
        let first = self.active_device();
        match self.on(first.unwrap_or(0), work) {
            Err(lost @ Error::ContextLost { .. }) => match self.active_device() {
                Some(next) if Some(next) != first => self.on(next, work),
                _ => Err(lost),
            },
            result => result,
        }
    }
}

/// Releases the retained contexts.
impl Drop for Core {
    fn drop(&mut self) {
        if !self.born.is_current() {
            return;
        }
        for device in &self.devices {
            if let (Some(id), Some(_)) = (device.id.get(), device.context.get()) {
                // SAFETY: `primary` retained it once, and no code can use it through this value, which is
                // being dropped.
                let released = unsafe { self.api.device_primary_ctx_release(*id) };
                if let Err(error) = released {
                    tracing::debug!(%error, "a primary context was not released");
                }
            }
        }
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.api, f)
    }
}

fn load() -> Result<Library> {
    let mut tried = Vec::new();
    for name in LIBRARIES {
        match Library::open(Path::new(name), name) {
            Ok(library) => return Ok(library),
            Err(words) => tried.push(words),
        }
    }
    Err(Error::NoDriver {
        detail: tried.join("; "),
    })
}

/// Returns the number of a retained context.
fn number_of(api: &DriverApi, context: Opaque) -> Result<u64> {
    let mut number = 0;
    // SAFETY: `number` is a live integer; the primary context is retained, so the driver knows the handle also after a reset.
    unsafe { api.ctx_get_id(context, &mut number)? };
    Ok(number)
}

/// Keeps a context current on this thread until dropped.
struct Current<'a> {
    /// `None`: it was current already.
    api: Option<&'a DriverApi>,
}

impl<'a> Current<'a> {
    fn enter(api: &'a DriverApi, context: Opaque) -> Result<Self> {
        let mut current = ptr::null_mut();
        // SAFETY: `current` is a live pointer.
        let known = unsafe { api.ctx_get_current(&mut current) }.is_ok();
        if known && current == context {
            return Ok(Self { api: None });
        }
        // SAFETY: the context is retained for as long as the backend, which `api` belongs to, lives.
        let pushed = unsafe { api.ctx_push_current(context) };
        if let Err(error) = pushed {
            // The call may report an error of earlier work although it has pushed the context.
            let mut after = ptr::null_mut();
            // SAFETY: as above.
            if known && unsafe { api.ctx_get_current(&mut after) }.is_ok() && after == context {
                drop(Self { api: Some(api) });
            }
            return Err(error);
        }
        Ok(Self { api: Some(api) })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let Some(api) = self.api else { return };
        let mut popped = ptr::null_mut();
        // SAFETY: `popped` is a live pointer; this thread pushed in `enter`, and everything pushed since has
        // been popped.
        if let Err(error) = unsafe { api.ctx_pop_current(&mut popped) } {
            tracing::debug!(%error, "the context was not popped cleanly");
        }
    }
}
