//! The calls about the driver and its devices.

use std::ffi::{CStr, c_char};

use super::backend::Cuda;
use crate::{CudaVersion, DeviceAttribute, P2pAttribute, Result};

/// Reads a string that `read` writes, NUL-terminated, into a buffer of the given length.
fn string(read: impl FnOnce(*mut c_char, i32) -> Result<()>) -> Result<String> {
    let mut buffer = [0_u8; 256];
    // One byte less, so that the text ends with a NUL whatever the driver does.
    read(buffer.as_mut_ptr().cast(), buffer.len() as i32 - 1)?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

// The SAFETY comments below refer to this: pointers are to live values of the types in CUDA's headers. The
// call fills or reads them before it returns and does not keep them. The driver checks numbers and handles.
// The caller guarantees, by the contract of `Backend`, that nothing uses memory that a call removes.

impl Cuda {
    pub(super) fn driver_version(&self) -> Result<CudaVersion> {
        let mut version = 0;
        // SAFETY: as said above.
        unsafe { self.api().driver_get_version(&mut version)? };
        Ok(CudaVersion(version))
    }

    pub(super) fn device_count(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: as said above.
        unsafe { self.api().device_get_count(&mut count)? };
        Ok(count)
    }

    pub(super) fn device_name(&self, device: i32) -> Result<String> {
        let device = self.core.device(device)?;
        // SAFETY: as said above; the buffer is as long as said.
        string(|text, len| unsafe { self.api().device_get_name(text, len, device) })
    }

    pub(super) fn device_uuid(&self, device: i32) -> Result<[u8; 16]> {
        let device = self.core.device(device)?;
        let mut uuid = [0; 16];
        // SAFETY: as said above.
        unsafe { self.api().device_get_uuid(&mut uuid, device)? };
        Ok(uuid)
    }

    pub(super) fn device_pci_bus_id(&self, device: i32) -> Result<String> {
        let device = self.core.device(device)?;
        // SAFETY: as said above; the buffer is as long as said.
        string(|text, len| unsafe { self.api().device_get_pci_bus_id(text, len, device) })
    }

    pub(super) fn device_total_mem(&self, device: i32) -> Result<u64> {
        let device = self.core.device(device)?;
        let mut bytes = 0;
        // SAFETY: as said above.
        unsafe { self.api().device_total_mem(&mut bytes, device)? };
        Ok(bytes as u64)
    }

    pub(super) fn device_attribute(&self, device: i32, attribute: DeviceAttribute) -> Result<i32> {
        let device = self.core.device(device)?;
        let mut value = 0;
        // SAFETY: as said above. A driver refuses an attribute that it does not know.
        unsafe {
            self.api()
                .device_get_attribute(&mut value, attribute.0, device)?;
        }
        Ok(value)
    }

    pub(super) fn device_can_access_peer(&self, device: i32, peer: i32) -> Result<bool> {
        let (device, peer) = (self.core.device(device)?, self.core.device(peer)?);
        let mut can = 0;
        // SAFETY: as said above.
        unsafe { self.api().device_can_access_peer(&mut can, device, peer)? };
        Ok(can != 0)
    }

    pub(super) fn device_p2p_attribute(
        &self,
        device: i32,
        peer: i32,
        attribute: P2pAttribute,
    ) -> Result<i32> {
        let (device, peer) = (self.core.device(device)?, self.core.device(peer)?);
        let mut value = 0;
        // SAFETY: as said above. A driver refuses an attribute that it does not know.
        unsafe {
            self.api()
                .device_get_p2p_attribute(&mut value, attribute.0, device, peer)?;
        }
        Ok(value)
    }

    pub(super) fn mem_info(&self, device: i32) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().mem_get_info(&mut free, &mut total)
        })?;
        Ok((free as u64, total as u64))
    }
}
