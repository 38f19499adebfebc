//! Files read straight into memory, and written from it.

use std::io::{Error as IoError, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};

use super::CpuView;
use crate::{Error, Result};

/// The unit of direct I/O: a transfer that ends inside one is the last.
const BLOCK: u64 = 512;
/// The most bytes of one system call. Linux moves no more at once, and this is a multiple of every page size.
const MOST: u64 = 1 << 30;

impl CpuView<'_> {
    /// Reads up to `len` bytes of `file`, from its byte `at` on, to `offset` bytes from the start, without a buffer in
    /// between; returns how many there were before the end of the file. The position of the file stays.
    ///
    /// A file that was opened with `O_DIRECT` is read past the page cache: device, offset, `at` and `len` must then be
    /// multiples of the file system's block, 4096 suffices.
    ///
    /// Source: `pread`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::NotAccessible`] if the CPU may only read; [`Error::System`], where some bytes may
    /// have been read.
    ///
    /// ```
    /// use std::io::Write;
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let mut file = tempfile::tempfile()?;
    /// file.write_all(b"weights")?;
    /// let buffer = Buffer::near(&driver, 0, 1 << 20)?;
    /// assert_eq!(buffer.cpu()?.read_from_file(0, 1 << 20, &file, 0)?, 7);
    /// assert_eq!(buffer.get::<[u8; 7]>(0)?, *b"weights");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read_from_file(&self, offset: u64, len: u64, file: impl AsFd, at: u64) -> Result<u64> {
        let to = self.check_write(offset, len)?;
        let fd = file.as_fd();
        transfer("reading a file", len, at, |done, bytes, at| {
            // SAFETY: the range was checked: mapped and writable for the CPU while the view lives. The kernel writes it as
            // another process would, and every other access in this process is atomic.
            unsafe { libc::pread(fd.as_raw_fd(), to.add(done).cast(), bytes, at) }
        })
    }

    /// Writes `len` bytes from `offset` on to `file`, from its byte `at` on, without a buffer in between; returns how many
    /// were written, which is all of them unless the file system has no more room. Otherwise as
    /// [`read_from_file`](Self::read_from_file). Bytes that others write meanwhile are written as they were or as they are.
    ///
    /// Source: `pwrite`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::System`], where some bytes may have been written.
    pub fn write_to_file(&self, offset: u64, len: u64, file: impl AsFd, at: u64) -> Result<u64> {
        let part = self.slice(offset, len)?;
        let fd = file.as_fd();
        transfer("writing a file", len, at, |done, bytes, at| {
            // SAFETY: the range was checked: mapped and readable for the CPU while the view lives.
            unsafe { libc::pwrite(fd.as_raw_fd(), part.as_ptr().add(done).cast(), bytes, at) }
        })
    }
}

/// Calls `call` with the bytes done, the bytes to do and the file's offset, until all are done or there are no more.
fn transfer(
    what: &str,
    len: u64,
    at: u64,
    mut call: impl FnMut(usize, usize, i64) -> isize,
) -> Result<u64> {
    let end = at.checked_add(len).and_then(|end| i64::try_from(end).ok());
    if end.is_none() {
        return Err(Error::invalid(
            "file offset",
            format!("{at} and {len} bytes exceed 63 bits"),
        ));
    }
    let mut done = 0;
    while done < len {
        let bytes = (len - done).min(MOST);
        let answer = call(done as usize, bytes as usize, (at + done) as i64);
        match u64::try_from(answer) {
            Ok(0) => break,
            Ok(count) => {
                done += count;
                // A file ends there, and direct I/O could not go on.
                if count < bytes && !done.is_multiple_of(BLOCK) {
                    break;
                }
            }
            Err(_) => {
                let error = IoError::last_os_error();
                if error.kind() != ErrorKind::Interrupted {
                    return Err(Error::system(what, &error));
                }
            }
        }
    }
    Ok(done)
}
