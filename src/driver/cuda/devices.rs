//! The calls about the driver and its devices.

use std::ffi::CStr;

use super::core::{Core, methods};
use crate::{CudaVersion, DeviceAttribute, P2pAttribute};

/// The buffer of a text. The driver gets one byte less, so the text always ends with a NUL.
const TEXT: [u8; 256] = [0; 256];
const TEXT_LEN: i32 = TEXT.len() as i32 - 1;

fn text(buffer: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(buffer).unwrap_or_default();
    text.to_string_lossy().into_owned()
}

impl Core {
    methods! { |this|
    [pub(super) fn] driver_version() -> CudaVersion {
        let mut version = 0;
        @here() driver_get_version(&mut version) => CudaVersion(version)
    }
    [pub(super) fn] device_count() -> i32 {
        let mut count = 0;
        @here() device_get_count(&mut count) => count
    }
    [pub(super) fn] device_name(device: i32) -> String {
        let (device, mut name) = (this.device(device)?, TEXT);
        @here() device_get_name(name.as_mut_ptr().cast(), TEXT_LEN, device) => text(&name)
    }
    [pub(super) fn] device_uuid(device: i32) -> [u8; 16] {
        let (device, mut uuid) = (this.device(device)?, [0; 16]);
        @here() device_get_uuid(&mut uuid, device) => uuid
    }
    [pub(super) fn] device_pci_bus_id(device: i32) -> String {
        let (device, mut id) = (this.device(device)?, TEXT);
        @here() device_get_pci_bus_id(id.as_mut_ptr().cast(), TEXT_LEN, device) => text(&id)
    }
    [pub(super) fn] device_total_mem(device: i32) -> u64 {
        let (device, mut bytes) = (this.device(device)?, 0);
        @here() device_total_mem(&mut bytes, device) => bytes as u64
    }
    [pub(super) fn] device_attribute(device: i32, attribute: DeviceAttribute) -> i32 {
        let (device, mut value) = (this.device(device)?, 0);
        @here() device_get_attribute(&mut value, attribute.0, device) => value
    }
    [pub(super) fn] device_can_access_peer(device: i32, peer: i32) -> bool {
        let (device, peer, mut can) = (this.device(device)?, this.device(peer)?, 0);
        @here() device_can_access_peer(&mut can, device, peer) => can != 0
    }
    [pub(super) fn] device_p2p_attribute(device: i32, peer: i32, attribute: P2pAttribute) -> i32 {
        let (device, peer, mut value) = (this.device(device)?, this.device(peer)?, 0);
        @here() device_get_p2p_attribute(&mut value, attribute.0, device, peer) => value
    }
    [pub(super) fn] mem_info(device: i32) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        @on(device) mem_get_info(&mut free, &mut total) => (free as u64, total as u64)
    }
    }
}
