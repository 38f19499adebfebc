//! Reads and writes memory as a stream of bytes, for `std::io`.

use std::io;

use super::CpuMemory;
use crate::Error;

/// A position in memory, which reads, writes and seeks as [`std::io::Cursor`] does in a slice.
///
/// It takes any [`CpuMemory`]: a [`CpuView`](super::CpuView), a reference to a buffer, or a buffer itself.
/// Reads return 0 bytes at the memory's end, and so do writes, which [`write_all`](io::Write::write_all)
/// reports as [`WriteZero`](io::ErrorKind::WriteZero). The position may lie beyond the end.
///
/// Other code may write the memory meanwhile: each read and each write is one copy through the memory's
/// [`CpuView`](super::CpuView), with its guarantees. Pool memory waits for its streams each time: pass the
/// view from its `cpu` to wait once.
///
/// # Errors
/// An [`Error`] of this crate is the inner error of the [`io::Error`]. Its kind is
/// [`PermissionDenied`](io::ErrorKind::PermissionDenied) for [`Error::NotAccessible`], else
/// [`Other`](io::ErrorKind::Other). Seeking before the start is
/// [`InvalidInput`](io::ErrorKind::InvalidInput).
///
/// ```
/// use std::io::{Read, Seek, Write};
///
/// use egmem::memory::Cursor;
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?;
/// let buffer = Buffer::near(&driver, 0, 1 << 20)?;
/// let mut cursor = Cursor::new(&buffer);
/// writeln!(cursor, "step {}", 7)?;
/// cursor.rewind()?;
/// let mut text = [0; 7];
/// cursor.read_exact(&mut text)?;
/// assert_eq!(&text, b"step 7\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Cursor<M> {
    memory: M,
    position: u64,
}

impl<M: CpuMemory> Cursor<M> {
    /// Returns a cursor at the memory's start.
    pub const fn new(memory: M) -> Self {
        let position = 0;
        Self { memory, position }
    }

    /// Returns the position, in bytes from the memory's start.
    pub const fn position(&self) -> u64 {
        self.position
    }

    /// Moves to `position` bytes from the memory's start, which may lie beyond its end.
    pub const fn set_position(&mut self, position: u64) {
        self.position = position;
    }

    /// Returns the memory.
    pub const fn get_ref(&self) -> &M {
        &self.memory
    }

    /// Returns the memory and drops the cursor.
    pub fn into_inner(self) -> M {
        self.memory
    }

    /// Returns how many of `len` bytes follow the position in memory of `size` bytes.
    fn next(&self, len: usize, size: u64) -> usize {
        // At most `len`, so it fits.
        size.saturating_sub(self.position).min(len as u64) as usize
    }
}

impl<M: CpuMemory> io::Read for Cursor<M> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let view = self.memory.cpu().map_err(to_io)?;
        let count = self.next(to.len(), view.len());
        if count > 0 {
            view.read_at(self.position, &mut to[..count])
                .map_err(to_io)?;
            self.position += count as u64;
        }
        Ok(count)
    }
}

impl<M: CpuMemory> io::Write for Cursor<M> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let view = self.memory.cpu().map_err(to_io)?;
        let count = self.next(from.len(), view.len());
        if count > 0 {
            view.write_at(self.position, &from[..count])
                .map_err(to_io)?;
            self.position += count as u64;
        }
        Ok(count)
    }

    /// Does nothing: writes are not buffered.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<M: CpuMemory> io::Seek for Cursor<M> {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        let position = match to {
            io::SeekFrom::Start(position) => Some(position),
            io::SeekFrom::Current(by) => self.position.checked_add_signed(by),
            io::SeekFrom::End(by) => {
                let size = self.memory.cpu().map_err(to_io)?.len();
                size.checked_add_signed(by)
            }
        };
        self.position = position.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "the position would lie before the memory's start or beyond 2^64 bytes",
            )
        })?;
        Ok(self.position)
    }

    fn stream_position(&mut self) -> io::Result<u64> {
        Ok(self.position)
    }
}

fn to_io(error: Error) -> io::Error {
    let kind = match error {
        Error::NotAccessible { .. } => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, SeekFrom, Write};

    use proptest::prelude::*;

    use super::*;
    use crate::memory::view::tests::view;

    #[derive(Clone, Debug)]
    enum Step {
        Read(usize),
        Write(Vec<u8>),
        Seek(SeekFrom),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0_usize..200).prop_map(Step::Read),
            proptest::collection::vec(any::<u8>(), 0..200).prop_map(Step::Write),
            (0_u64..300).prop_map(|at| Step::Seek(SeekFrom::Start(at))),
            (-300_i64..300).prop_map(|by| Step::Seek(SeekFrom::Current(by))),
            (-300_i64..300).prop_map(|by| Step::Seek(SeekFrom::End(by))),
            Just(Step::Seek(SeekFrom::Start(u64::MAX))),
            Just(Step::Seek(SeekFrom::Current(i64::MAX))),
        ]
    }

    /// Returns a step's count or position, or the kind of its error, and the bytes read.
    fn take(
        to: &mut (impl Read + Write + Seek),
        step: &Step,
    ) -> (Result<u64, io::ErrorKind>, Vec<u8>) {
        let mut bytes = Vec::new();
        let result = match step {
            Step::Read(len) => {
                bytes.resize(*len, 0);
                to.read(&mut bytes).map(|count| count as u64)
            }
            Step::Write(from) => to.write(from).map(|count| count as u64),
            Step::Seek(at) => to.seek(*at),
        };
        (result.map_err(|error| error.kind()), bytes)
    }

    proptest! {
        #[test]
        fn it_does_what_stds_cursor_does(steps in proptest::collection::vec(step(), 0..40)) {
            let mut memory = [0_u64; 24];
            let mut expected = [0_u8; 192];
            {
                let mut ours = Cursor::new(view(&mut memory, true));
                let mut stds = io::Cursor::new(&mut expected[..]);
                for step in &steps {
                    prop_assert_eq!(take(&mut ours, step), take(&mut stds, step), "{:?}", step);
                    prop_assert_eq!(ours.position(), stds.position());
                }
            }
            prop_assert_eq!(bytemuck::cast_slice::<_, u8>(&memory), &expected[..]);
        }
    }

    #[test]
    fn writes_to_read_only_memory_are_denied() {
        let mut memory = [0_u64];
        let error = Cursor::new(view(&mut memory, false))
            .write(&[1])
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        let inner = error
            .get_ref()
            .and_then(|inner| inner.downcast_ref::<Error>());
        assert!(
            matches!(inner, Some(Error::NotAccessible { .. })),
            "{error}"
        );
    }
}
