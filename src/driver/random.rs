//! Random bytes.

use std::io;

/// Returns random bytes from the operating system.
///
/// # Errors
/// The system's, for example `ENOSYS` in a sandbox without `getrandom`.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: the pointer and length are those of `bytes`, which the call writes.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if got == N as isize {
        Ok(bytes)
    } else {
        Err(io::Error::last_os_error())
    }
}
