//! Files read straight into memory, and written from it.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use rustix::fs::{OFlags, fcntl_getfl};

use super::CpuView;
use crate::{Error, Result};

/// The least unit of direct I/O: a direct transfer that ends inside one is the last.
const BLOCK: u64 = 512;
/// The most bytes of one system call. Linux moves no more at once, and this is a multiple of every page size.
const MOST: u64 = 1 << 30;

impl CpuView<'_> {
    /// Reads up to `len` bytes of `file`, from its byte `at` on, to `offset` bytes from the start, without a buffer
    /// in between; returns how many there were before the end of the file. The position of the file stays.
    ///
    /// A file that was opened with `O_DIRECT` is read past the page cache: device, offset, `at` and `len` must then
    /// be multiples of the file system's block, 4096 suffices.
    ///
    /// Source: `pread`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::NotAccessible`] if the CPU may only read; [`Error::System`], where some bytes
    /// may have been read.
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
        transfer(
            "reading a file",
            file.as_fd(),
            len,
            at,
            |fd, done, bytes, at| {
                // SAFETY: the range was checked: mapped and writable for the CPU while the view lives. The kernel
                // writes it as another process would, and every other access in this process is atomic.
                unsafe { libc::pread(fd, to.add(done).cast(), bytes, at) }
            },
        )
    }

    /// Writes `len` bytes from `offset` on to `file`, from its byte `at` on, without a buffer in between; returns how
    /// many were written, which is all of them unless the file system has no more room. Otherwise as
    /// [`read_from_file`](Self::read_from_file). Bytes that others write meanwhile are written as they were or as
    /// they are.
    ///
    /// Source: `pwrite`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::System`], where some bytes may have been written.
    pub fn write_to_file(&self, offset: u64, len: u64, file: impl AsFd, at: u64) -> Result<u64> {
        let from = self.slice(offset, len)?.as_ptr();
        transfer(
            "writing a file",
            file.as_fd(),
            len,
            at,
            |fd, done, bytes, at| {
                // SAFETY: the range was checked: mapped and readable for the CPU while the view lives.
                unsafe { libc::pwrite(fd, from.add(done).cast(), bytes, at) }
            },
        )
    }
}

/// As [`transfer_by`], by a system call.
fn transfer(
    what: &str,
    file: BorrowedFd<'_>,
    len: u64,
    at: u64,
    call: impl Fn(RawFd, usize, usize, i64) -> isize,
) -> Result<u64> {
    let is_direct = fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT));
    transfer_by(what, len, at, is_direct, |done, bytes, at| {
        let moved = call(file.as_raw_fd(), done, bytes, at);
        u64::try_from(moved).map_err(|_| io::Error::last_os_error())
    })
}

/// Calls `call` with the bytes done, the bytes to do and the file's offset, until all are done or there are no more.
///
/// After a short transfer of direct I/O, the next offset may be no multiple of the file system's block. The file ends
/// there: some file systems then answer 0, others EINVAL.
fn transfer_by(
    what: &str,
    len: u64,
    at: u64,
    is_direct: bool,
    mut call: impl FnMut(usize, usize, i64) -> io::Result<u64>,
) -> Result<u64> {
    let end = at.checked_add(len).and_then(|end| i64::try_from(end).ok());
    if end.is_none() {
        let why = format!("{at} and {len} bytes exceed 63 bits");
        return Err(Error::invalid("file offset", why));
    }
    let (mut done, mut was_short) = (0, false);
    while done < len {
        let bytes = (len - done).min(MOST);
        match call(done as usize, bytes as usize, (at + done) as i64) {
            Ok(0) => break,
            Ok(count) => {
                done += count;
                was_short = count < bytes;
                if is_direct && was_short && !done.is_multiple_of(BLOCK) {
                    break;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if is_direct && was_short && error.kind() == ErrorKind::InvalidInput => {
                break;
            }
            Err(error) => return Err(Error::system(what, &error)),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of `size` bytes that moves at most `most` at once, and refuses offsets between blocks.
    fn moved(size: u64, most: u64, len: u64, is_direct: bool) -> Result<u64> {
        transfer_by("reading a file", len, 0, is_direct, |done, bytes, at| {
            assert_eq!(done as i64, at);
            match is_direct && !(at as u64).is_multiple_of(4096) {
                true => Err(io::Error::from_raw_os_error(libc::EINVAL)),
                false => Ok((size - at as u64).min(most).min(bytes as u64)),
            }
        })
    }

    #[test]
    fn a_file_read_past_the_page_cache_ends_inside_a_block() {
        // 512 divides the number of bytes read, the file system's block does not.
        assert_eq!(moved(4096 + 512, MOST, 8192, true), Ok(4096 + 512));
        assert_eq!(moved(4096 + 7, MOST, 8192, true), Ok(4096 + 7));
        assert_eq!(moved(8192, 4096, 8192, true), Ok(8192));
    }

    #[test]
    fn short_transfers_through_the_page_cache_go_on() {
        assert_eq!(moved(10_000, 7, 10_000, false), Ok(10_000));
        assert_eq!(moved(10_000, 7, 20_000, false), Ok(10_000));
    }

    #[test]
    fn a_refusal_that_is_no_end_is_an_error() {
        let refuses = |is_direct, after: u64| {
            transfer_by(
                "reading a file",
                2 * MOST,
                0,
                is_direct,
                |done, bytes, _| {
                    match done as u64 >= after {
                        true => Err(io::Error::from_raw_os_error(libc::EINVAL)),
                        // Half of it, the first time.
                        false => Ok(bytes as u64 / 2),
                    }
                },
            )
        };
        assert!(refuses(true, 0).is_err());
        assert!(refuses(false, 1).is_err());
        assert_eq!(refuses(true, 1), Ok(MOST / 2));
        // All that was asked for came, so the file did not end there: the length is no multiple of a block.
        let whole = transfer_by(
            "reading a file",
            MOST + 1,
            0,
            true,
            |done, bytes, _| match done {
                0 => Ok(bytes as u64),
                _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            },
        );
        assert!(whole.is_err());
    }
}
