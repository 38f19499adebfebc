//! The side that maps another process's vector.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_share::{Channel, GrowingImport, ImportOptions};

use crate::driver::{DevicePtr, Driver};
use crate::memory::{CpuMemory, CpuView, access_checks, check_range, impl_memory};
use crate::{Error, Result, numbers};

/// Another process's [`Growable`](crate::Growable) at one range of addresses, which grows as that process sends more.
///
/// A clone has the elements that were there when it was made, mapped for a GPU or another thread, while the original
/// follows. The other process may change elements at any time. GPU work that uses the memory must have finished
/// before the last clone is dropped. [`GrowableExport`](super::GrowableExport) has an example.
pub struct GrowableView<T> {
    memory: GrowingImport,
    options: ImportOptions,
    max_len: u64,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T> Clone for GrowableView<T> {
    fn clone(&self) -> Self {
        Self {
            memory: self.memory.clone(),
            options: self.options.clone(),
            ..*self
        }
    }
}

impl<T: AnyBitPattern + NoUninit> GrowableView<T> {
    const ELEMENT: u64 = size_of::<T>() as u64;

    /// Waits for the first update, reserves addresses for as many elements as the other process's vector can have,
    /// and maps the chunks that were sent. Nothing is reserved for an update that is refused.
    ///
    /// # Errors
    /// As [`follow`](Self::follow); [`Error::OutOfAddresses`].
    #[track_caller]
    pub fn receive(
        driver: &Driver,
        channel: &mut Channel,
        options: ImportOptions,
    ) -> egmem_share::Result<Self> {
        let first = Update::read(&channel.receive_text(MAX_TEXT)?)?;
        channel.together(|channel| {
            Self::check(&first, first.max_len, 0)?;
            let bytes = first.max_len.checked_mul(Self::ELEMENT);
            let bytes = bytes.ok_or_else(|| refused("it can have more elements than addresses"))?;
            let mut view = Self {
                memory: GrowingImport::reserve(driver, bytes)?,
                options,
                max_len: first.max_len,
                len: 0,
                elements: PhantomData,
            };
            view.apply(first, channel)?;
            Ok(view)
        })
    }

    /// Waits for an update, maps the chunks that came with it, and returns the number of elements from then on.
    ///
    /// # Errors
    /// The channel's: after a timeout the caller may retry if nothing had arrived, and the channel is closed otherwise.
    /// [`Error::InvalidArgument`] for another kind of text, and for an update that does not continue the chunks received so
    /// far, or is of another type; those of [`ImportOptions::import`]. After an error of an update the channel is closed, and
    /// the view has its earlier chunks and maybe some of the new ones.
    #[track_caller]
    pub fn follow(&mut self, channel: &mut Channel) -> egmem_share::Result<usize> {
        let update = Update::read(&channel.receive_text(MAX_TEXT)?)?;
        channel.together(|channel| self.apply(update, channel))
    }

    #[track_caller]
    fn apply(&mut self, first: Update, channel: &mut Channel) -> egmem_share::Result<usize> {
        let mut update = first;
        loop {
            Self::check(&update, self.max_len, self.memory.len())?;
            if update.chunks > 0 {
                let offer = channel.receive()?;
                if offer.description().parts.len() as u64 != update.chunks {
                    return Err(refused("another number of chunks came").into());
                }
                self.memory.add_offer(offer, &self.options)?;
            }
            if update.more == 0 {
                break;
            }
            update = Update::read(&channel.receive_text(MAX_TEXT)?)?;
        }
        // Below `max_len`, whose bytes have addresses.
        if update.len * Self::ELEMENT > self.memory.len() {
            return Err(refused("it has more elements than memory").into());
        }
        self.len = update.len as usize;
        Ok(self.len)
    }

    /// Checks that an update is of this type, of a vector of `max_len` elements, and continues the chunks received so
    /// far, which have `mapped` bytes.
    fn check(update: &Update, max_len: u64, mapped: u64) -> Result<()> {
        if update.element != Self::ELEMENT {
            let why = format!("its elements have {} bytes", update.element);
            let valid = format!("{} bytes", Self::ELEMENT);
            return Err(Error::invalid_of(VECTOR, why, valid));
        }
        if update.max_len != max_len || update.len > update.max_len {
            return Err(refused("it has other sizes than before"));
        }
        if update.before != mapped {
            return Err(refused("chunks before those sent are missing"));
        }
        Ok(())
    }

    /// Returns the element at `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::NotAccessible`].
    pub fn get(&self, index: usize) -> Result<T> {
        self.element(index)?.get(0)
    }

    /// Replaces the element at `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::NotAccessible`] unless the exporter and the import's options let the CPU
    /// write.
    pub fn set(&self, index: usize, element: T) -> Result<()> {
        self.element(index)?.put(0, element)
    }

    fn element(&self, index: usize) -> Result<CpuView<'_>> {
        let offset = (index as u64).saturating_mul(Self::ELEMENT);
        check_range(offset, Self::ELEMENT, self.bytes())?;
        self.memory.cpu_at(offset, Self::ELEMENT)
    }
}

const VECTOR: &str = "growable vector of another process";

fn refused(why: &str) -> Error {
    Error::invalid(VECTOR, why)
}

impl<T> GrowableView<T> {
    /// Returns the number of elements, as the exporter said last.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes that are mapped.
    pub const fn mapped_bytes(&self) -> u64 {
        self.memory.len()
    }

    /// Returns the address of the first element, another one than in the exporter. It does not change, except when the first chunk of
    /// registered memory comes, before which there are no elements.
    pub fn device_ptr(&self) -> DevicePtr {
        self.memory.device_ptr()
    }

    /// Returns the CPU's view of the elements.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        self.memory.cpu_at(0, self.bytes())
    }

    const fn bytes(&self) -> u64 {
        self.len as u64 * size_of::<T>() as u64
    }
}

impl<T> fmt::Debug for GrowableView<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrowableView")
            .field("start", &self.device_ptr())
            .field("len", &self.len)
            .field("mapped_bytes", &self.mapped_bytes())
            .finish_non_exhaustive()
    }
}

impl<T> CpuMemory for GrowableView<T> {
    fn cpu(&self) -> Result<CpuView<'_>> {
        Self::cpu(self)
    }
}

access_checks! {
    // SAFETY: the import answers for its memory, which the value owns and which begins at the same address. It may be longer
    // than the elements: the length is checked.
    unsafe impl [T] for GrowableView<T>, |this| this.memory, this.bytes()
}

impl_memory! {
    [T] for GrowableView<T>, |this| this.memory.driver(), Self::device_ptr(this), this.bytes(), this.memory.location()
}

/// The most bytes of the text.
pub(super) const MAX_TEXT: usize = 256;

/// The most chunks of one update; more come in several. Each has one fd.
pub(super) const MAX_CHUNKS: usize = 32;

/// The beginning of the text: the kind of message and its version.
const KIND: &str = "egmem-growable 1";

/// A vector, as far as it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Update {
    /// The size of an element in bytes.
    pub(super) element: u64,
    /// The most elements that the vector can have.
    pub(super) max_len: u64,
    /// Elements at the end of this update.
    pub(super) len: u64,
    /// Bytes of the chunks that were sent before.
    pub(super) before: u64,
    /// Chunks that follow.
    pub(super) chunks: u64,
    /// Updates that follow at once.
    pub(super) more: u64,
}

impl fmt::Display for Update {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (element, max_len, len) = (self.element, self.max_len, self.len);
        let (before, chunks, more) = (self.before, self.chunks, self.more);
        write!(
            f,
            "{KIND} {element} {max_len} {len} {before} {chunks} {more}"
        )
    }
}

impl Update {
    /// Reads a text of another process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another kind of text, for more chunks than an update has, and for fewer
    /// where another update follows.
    pub(super) fn read(text: &str) -> Result<Self> {
        let wrong = |why: &str| Error::invalid("update of a growable vector", why);
        let [element, max_len, len, before, chunks, more] = numbers(KIND, text)
            .ok_or_else(|| wrong("the other process sent another kind of text"))?;
        // More come only behind a full update: so the vector's length bounds their number.
        if chunks > MAX_CHUNKS as u64 || (more > 0 && chunks < MAX_CHUNKS as u64) {
            return Err(wrong(
                "the other process announced too many chunks, or too few before more",
            ));
        }
        Ok(Self {
            element,
            max_len,
            len,
            before,
            chunks,
            more,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use egmem_share::Peers;

    use super::*;
    use crate::driver::Call;
    use egmem_core::Machine;

    #[test]
    fn no_addresses_are_reserved_for_an_update_that_is_refused() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let sim = driver.sim().unwrap();
        let right = Update {
            element: 8,
            max_len: 1 << 20,
            len: 0,
            before: 0,
            chunks: 0,
            more: 0,
        };
        let other_type = Update {
            element: 1 << 20,
            max_len: 1 << 27,
            ..right
        };
        let too_many = Update {
            len: right.max_len + 1,
            ..right
        };
        let not_the_first = Update {
            before: 2 << 20,
            ..right
        };
        let before = sim.count(Call::MemAddressReserve);
        for (update, valid) in [
            (other_type, false),
            (too_many, false),
            (not_the_first, false),
            (right, true),
        ] {
            let (one, other) = UnixStream::pair().unwrap();
            let [mut one, mut other] =
                [one, other].map(|end| Channel::new(end, &Peers::same_user()).unwrap());
            one.send_text(&update.to_string()).unwrap();
            let view = GrowableView::<u64>::receive(&driver, &mut other, ImportOptions::new());
            assert_eq!(view.is_ok(), valid, "{update:?}");
            let reserved = sim.count(Call::MemAddressReserve) - before;
            assert_eq!(reserved, u64::from(valid), "{update:?}");
        }
    }
}

#[cfg(test)]
mod update_tests {
    use super::*;

    const UPDATE: Update = Update {
        element: 4,
        max_len: u64::MAX,
        len: 7,
        before: 2 << 20,
        chunks: MAX_CHUNKS as u64,
        more: 1,
    };

    #[test]
    fn an_update_is_read_as_it_was_written() {
        let text = UPDATE.to_string();
        assert!(text.len() < MAX_TEXT);
        assert_eq!(Update::read(&text), Ok(UPDATE));
    }

    #[test]
    fn invalid_updates_are_refused() {
        for text in [
            "",
            "egmem-growable 2 4 9 7 0 0 0",
            "egmem-growable 1",
            "egmem-growable 1 4 9 7 0 0",
            "egmem-growable 1 4 9 7 0 0 0 0",
            "egmem-growable 1 4 9 7 0 0 -1",
            "egmem-growable 1 4 9 7 0 x 0",
            "egmem-growable 1 4 9 7 0 33 0",
            "egmem-growable 1 4 9 7 0 0 1",
            "egmem-growable 1 4 9 7 0 31 1",
            "egmem-growable 1 4 9 7 0 0 99999999999999999999",
        ] {
            let error = Update::read(text).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{text}");
        }
    }
}
