//! Pages of this process, and the nodes that they lie on.

use std::collections::BTreeMap;
use std::io;
use std::ptr;

const PAGE: usize = 4096;

/// Anonymous memory, unmapped when dropped.
pub struct Pages {
    start: *mut libc::c_void,
    len: usize,
}

impl Pages {
    /// Maps `bytes` of zeros, of which no page exists yet.
    pub fn map(bytes: u64) -> Self {
        let (len, flags) = (bytes as usize, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Self { start, len }
    }

    /// Maps `bytes` and makes every page on `node`.
    pub fn on(node: i32, bytes: u64) -> io::Result<Self> {
        let pages = Self::map(bytes);
        bind(pages.range(), node)?;
        pages.touch();
        Ok(pages)
    }

    /// Writes to every page.
    pub fn touch(&self) {
        touch(self.range());
    }

    pub fn range(&self) -> (u64, u64) {
        (self.start as u64, self.len as u64)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing borrows it.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

/// Writes to every page of a range that this process owns.
pub fn touch((start, len): (u64, u64)) {
    for at in (0..len).step_by(PAGE) {
        // SAFETY: the callers own the range; a word of each page is inside it.
        unsafe { ptr::write_volatile((start + at) as *mut u8, 1) };
    }
}

/// Lets the pages of a range come from `node` alone (`mbind`, `MPOL_BIND`).
pub fn bind((start, len): (u64, u64), node: i32) -> io::Result<()> {
    let mask = 1_u64 << node;
    // SAFETY: the range is the caller's own, and the mask is one word, of which the kernel reads 63 bits.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            len,
            libc::MPOL_BIND,
            &raw const mask,
            u64::from(u64::BITS),
            0,
        )
    };
    answer(result)
}

/// Lets pages that the calling thread touches come from `node` alone (`set_mempolicy`); from any with `None`.
pub fn bind_thread(node: Option<i32>) -> io::Result<()> {
    let mask = node.map_or(0, |node| 1_u64 << node);
    let mode = node.map_or(libc::MPOL_DEFAULT, |_| libc::MPOL_BIND);
    let words = if node.is_some() {
        &raw const mask
    } else {
        ptr::null()
    };
    // SAFETY: the mask is one word, of which the kernel reads 63 bits.
    let result =
        unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, words, u64::from(u64::BITS)) };
    answer(result)
}

/// Returns how many pages of a range lie on each node (`move_pages`, which moves none here); by negative codes, how many
/// have none.
pub fn nodes_of(range: (u64, u64)) -> BTreeMap<i32, usize> {
    try_nodes_of(range).unwrap()
}

/// As [`nodes_of`], with the kernel's refusal: many containers forbid the call.
pub fn try_nodes_of((start, len): (u64, u64)) -> io::Result<BTreeMap<i32, usize>> {
    let pages: Vec<u64> = (start..start + len).step_by(PAGE).collect();
    let mut status = vec![0_i32; pages.len()];
    let none = ptr::null::<i32>();
    // SAFETY: both arrays have as many elements as the call is told; without target nodes it only asks.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            none,
            status.as_mut_ptr(),
            0,
        )
    };
    answer(result)?;
    let mut counts = BTreeMap::new();
    for node in status {
        *counts.entry(node).or_default() += 1;
    }
    Ok(counts)
}

fn answer(result: libc::c_long) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
