//! File descriptors that the driver returns as bare integers.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use crate::Call;
use crate::{Error, Result};

/// Takes ownership of the fd that `call` has just written, and sets close-on-exec on it.
///
/// # Safety
/// `fd` is an fd that the driver has just created for the caller and that has no other owner, or a negative
/// number.
pub(super) unsafe fn take(call: Call, fd: RawFd) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(Error::failed(
            call.name(),
            format!("the driver reports success, but its file descriptor is {fd}"),
        ));
    }
    // SAFETY: the fd is not −1, is open and has no other owner (this function's contract).
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    close_on_exec(&fd).map_err(|error| Error::system(call.name(), &error))?;
    Ok(fd)
}

/// Sets close-on-exec, which the driver may leave off: a child program must not inherit memory by accident.
fn close_on_exec(fd: &OwnedFd) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: the fd is open; F_SETFD takes an integer and accesses no memory.
    let set = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    if set == -1 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, IntoRawFd};

    use super::*;

    #[test]
    fn a_taken_fd_closes_on_exec() {
        let file = tempfile::tempfile().unwrap();
        // SAFETY: the file is open and owns its fd; F_SETFD accesses no memory.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, 0) };
        // SAFETY: the fd is open and given up by `file` here.
        let fd = unsafe { take(Call::MemExportToShareableHandle, file.into_raw_fd()) }.unwrap();
        // SAFETY: as above.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }

    #[test]
    fn a_negative_fd_is_an_error() {
        // SAFETY: a negative number is allowed.
        let error = unsafe { take(Call::MemExportToShareableHandle, -1) }.unwrap_err();
        assert!(error.to_string().contains("-1"), "{error}");
    }
}
