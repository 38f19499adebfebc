//! Binds memory to the real NUMA node, if this machine has it.

use std::os::fd::AsRawFd;
use std::sync::OnceLock;

use super::memory::Memory;
use crate::Location;

/// Asks the kernel to take the file's pages from its node. A machine with one node has no choice; elsewhere a
/// refusal (no such node, no permission) changes only where the pages lie, not the simulator's answers.
pub(super) fn bind(memory: &Memory, offset: u64, len: u64) {
    let Location::HostNuma(node) = memory.label.location else {
        return;
    };
    if len == 0 || !several_nodes() || !(0..1024).contains(&node) {
        return;
    }
    let mut mask = [0_u64; 16];
    mask[node as usize / 64] = 1 << (node % 64);
    // SAFETY: this block creates, binds and unmaps the mapping, and nothing accesses it; the policy of a
    // shared mapping of a memfd stays with the file. `mask` has 1024 bits and outlives the call.
    unsafe {
        let start = libc::mmap64(
            std::ptr::null_mut(),
            len as usize,
            libc::PROT_NONE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            memory.file().as_raw_fd(),
            offset as i64,
        );
        if start != libc::MAP_FAILED {
            let (mode, bits) = (libc::MPOL_BIND, 1024_u64);
            libc::syscall(libc::SYS_mbind, start, len, mode, mask.as_ptr(), bits, 0);
            libc::munmap(start, len as usize);
        }
    }
}

fn several_nodes() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| {
        let online = std::fs::read_to_string("/sys/devices/system/node/online");
        online.is_ok_and(|list| list.trim().contains(['-', ',']))
    })
}
