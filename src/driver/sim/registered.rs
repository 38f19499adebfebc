//! Memory of the process that the driver pins and maps: `cuMemHostRegister`.

use std::sync::Arc;

use super::answer::{Answer, fail};
use super::capacity::Charge;
use super::state::State;
use crate::{Code, DevicePtr, NodeId};

/// Bytes that are checked at a time.
const STEP: u64 = 1 << 30;

/// A registered range.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) len: u64,
    pub(super) device: i32,
    /// The room that its pages take on a simulated node.
    _charge: Option<Charge>,
}

impl State {
    /// Maps the range for every GPU. Not measured: codes follow CUDA's documentation.
    pub(super) fn mem_host_register(
        &mut self,
        device: i32,
        ptr: DevicePtr,
        size: u64,
        _read_only: bool,
        node: Option<NodeId>,
    ) -> Answer<()> {
        self.context(device)?;
        let end = ptr.0.checked_add(size).ok_or(Code::INVALID_VALUE)?;
        if ptr.0 == 0 || size == 0 || !is_mapped(ptr.0, end) {
            return fail(Code::INVALID_VALUE);
        }
        let overlaps = |(&start, range): (&u64, &Registered)| start + range.len > ptr.0;
        let before = self.registered.range(..end).next_back();
        if before.is_some_and(overlaps) || self.is_ours(ptr.0, size) {
            return fail(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let take = |node: NodeId| Arc::clone(&self.capacity).take(node.into(), size);
        let charge = match node {
            Some(node) => Some(take(node).ok_or(Code::OUT_OF_MEMORY)?),
            None => None,
        };
        let range = Registered {
            len: size,
            device,
            _charge: charge,
        };
        self.registered.insert(ptr.0, range);
        Ok(())
    }

    /// Ends a registration after all work of all devices, as CUDA does.
    pub(super) fn mem_host_unregister(&mut self, device: i32, ptr: DevicePtr) -> Answer<()> {
        self.device(device)?;
        if !self.registered.contains_key(&ptr.0) {
            return fail(Code::HOST_MEMORY_NOT_REGISTERED);
        }
        self.synchronize_all();
        self.registered.remove(&ptr.0);
        self.context(device).map(drop)
    }

    /// The address for GPUs is the CPU's.
    pub(super) fn mem_host_device_pointer(
        &mut self,
        device: i32,
        ptr: DevicePtr,
    ) -> Answer<DevicePtr> {
        self.context(device)?;
        let known = self.registration(ptr.0, 1);
        Ok(known.map(|_| ptr).ok_or(Code::INVALID_VALUE)?)
    }

    /// Returns the registration that contains a whole range, with its start.
    pub(super) fn registration(&self, start: u64, len: u64) -> Option<(u64, &Registered)> {
        let (&at, range) = self.registered.range(..=start).next_back()?;
        let end = start.checked_add(len)?;
        (end <= at + range.len).then_some((at, range))
    }

    /// Returns whether registrations that lie side by side contain a whole range: kernels reach over their borders, copies
    /// and fills do not.
    pub(super) fn is_registered(&self, start: u64, len: u64) -> bool {
        let Some(end) = start.checked_add(len) else {
            return false;
        };
        let mut at = start;
        while at < end {
            let Some((first, range)) = self.registration(at, 1) else {
                return false;
            };
            at = first + range.len;
        }
        true
    }
}

/// Returns whether the process has mapped all of a range.
fn is_mapped(start: u64, end: u64) -> bool {
    // SAFETY: `sysconf` has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let mut resident = vec![0_u8; STEP.div_ceil(page) as usize];
    let mut at = start - start % page;
    while at < end {
        let len = (end - at).min(STEP);
        // SAFETY: the kernel checks the range, and writes a byte for each of its pages, for which there is room.
        let answer = unsafe { libc::mincore(at as *mut _, len as usize, resident.as_mut_ptr()) };
        if answer != 0 {
            return false;
        }
        at += len;
    }
    true
}
