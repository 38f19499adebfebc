//! The side that reads.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

use bytemuck::{AnyBitPattern, NoUninit};

use super::memory::{HEAD, RingMemory, TAIL, Untyped};
use crate::driver::DevicePtr;
use crate::memory::CpuView;
use crate::{Result, check, until};

/// The CPU's end of a ring that reads records: one thread at a time.
///
/// See [`Ring`](super::Ring).
pub struct Consumer<T> {
    pub(super) memory: Arc<RingMemory>,
    /// The records released so far. The counter in the memory is a copy: a GPU cannot change this one.
    pub(super) tail: u64,
    /// The records that the producer had committed when last looked at. They are looked at again only when there seem
    /// to be too few.
    head: u64,
    records: PhantomData<fn() -> T>,
}

impl<T> Consumer<T> {
    /// Takes this side on where its counter is.
    pub(super) fn resume(memory: Arc<RingMemory>) -> Result<Self> {
        // The sides of a ring that the CPU may not use are the kernels' alone.
        let counts = memory.is_cpus().then(|| memory.counts()).transpose()?;
        let (head, tail) = counts.unwrap_or_default();
        let least = head.wrapping_sub(memory.shape.capacity);
        check("the tail of a ring", tail, (least, head))?;
        Ok(Self {
            memory,
            tail,
            head,
            records: PhantomData,
        })
    }

    /// Returns how many records were released since the ring was created, by this side and by those that had it before in
    /// other processes: the number of the oldest record. It goes on at 0 after 2^64 - 1.
    pub const fn released(&self) -> u64 {
        self.tail
    }

    /// Returns how many records the ring has now. The producer may add more at any time.
    ///
    /// # Errors
    /// [`Error::CursorDamaged`](crate::Error::CursorDamaged) if the producer's counter has a value that it cannot
    /// have; [`Error::NotAccessible`](crate::Error::NotAccessible) if the CPU may not read and write the memory.
    pub fn ready(&mut self) -> Result<usize> {
        let head = self.memory.counter(HEAD)?.load(Acquire);
        let most = self.tail.wrapping_add(self.memory.shape.capacity);
        self.head = check("the head of a ring", head, (self.head, most))?;
        Ok(self.known_ready())
    }

    fn known_ready(&self) -> usize {
        self.head.wrapping_sub(self.tail) as usize
    }

    /// Returns how many records the ring has. Loads the producer's counter only if fewer than `wanted` were seen
    /// before.
    fn look_for(&mut self, wanted: usize) -> Result<usize> {
        match self.known_ready() {
            known if known >= wanted => Ok(known),
            _ => self.ready(),
        }
    }

    /// Returns the oldest records, at most `most` of them. They stay in the ring until they are released.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn peek(&mut self, most: usize) -> Result<Records<'_, T>> {
        self.memory.expect_cpu()?;
        let records = self.look_for(most)?.min(most);
        Ok(Records {
            consumer: self,
            records,
        })
    }

    /// As [`peek`](Self::peek), but waits until there is a record, at most until `deadline`: there is none then, and as soon
    /// as the producer is gone ([`is_alone`](Self::is_alone)) and has left none. A deadline that has passed asks once.
    ///
    /// The thread keeps its CPU for 50 µs, and sleeps 50 µs at a time after a millisecond.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn peek_until(&mut self, most: usize, deadline: Instant) -> Result<Records<'_, T>> {
        let wanted = most.min(1);
        until(deadline, self, Self::is_alone, |side| {
            Ok((side.look_for(wanted)? >= wanted).then_some(()))
        })?;
        self.peek(most)
    }
}

impl<T: AnyBitPattern + NoUninit> Consumer<T> {
    /// Takes the oldest record; `None` if there is none.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn try_pop(&mut self) -> Result<Option<T>> {
        self.peek(1)?.take()
    }

    /// Takes the oldest record as soon as there is one; `None` if there was none until `deadline`. It waits as
    /// [`peek_until`](Self::peek_until) does.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn pop_until(&mut self, deadline: Instant) -> Result<Option<T>> {
        self.peek_until(1, deadline)?.take()
    }

    /// Takes the oldest records, as many as there are and `to` has room for. Returns how many.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    pub fn pop_into(&mut self, to: &mut [T]) -> Result<usize> {
        let records = self.peek(to.len())?;
        let count = records.len();
        records.read(0, &mut to[..count])?;
        records.release()?;
        Ok(count)
    }
}

/// The oldest records of a ring. The producer gets their room when they are released; dropped instead, they stay.
#[must_use = "the producer gets no room before `release`"]
pub struct Records<'a, T> {
    consumer: &'a mut Consumer<T>,
    records: usize,
}

impl<T> Records<'_, T> {
    /// Returns the number of records.
    pub const fn len(&self) -> usize {
        self.records
    }

    /// Returns whether there are no records.
    pub const fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Returns the address of the first record, which the others follow without a gap. It is the same for the CPU and for every
    /// GPU with access. Work on it must have ended before the records are released.
    pub fn device_ptr(&self) -> DevicePtr {
        self.consumer.memory.record(self.consumer.tail)
    }

    /// Gives the room of all records to the producer.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible).
    pub fn release(self) -> Result<()> {
        let all = self.records;
        self.release_first(all)
    }

    /// Gives the room of the first `count` records to the producer, or of all if there are fewer. The others stay in
    /// the ring.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible).
    pub fn release_first(self, count: usize) -> Result<()> {
        let Consumer { memory, tail, .. } = self.consumer;
        let counter = memory.counter(TAIL)?;
        *tail = tail.wrapping_add(count.min(self.records) as u64);
        // Orders the reads of the records before it: the producer may overwrite them now.
        counter.store(*tail, Release);
        Ok(())
    }
}

impl<T: AnyBitPattern + NoUninit> Records<'_, T> {
    /// Returns the record at `index`, from the oldest on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), in bytes.
    pub fn get(&self, index: usize) -> Result<T> {
        self.view()?.get(Self::offset(index))
    }

    /// Copies records from `index` on into `to`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), in bytes, if there are too few.
    pub fn read(&self, index: usize, to: &mut [T]) -> Result<()> {
        self.view()?.read_at(Self::offset(index), to)
    }

    const fn offset(index: usize) -> u64 {
        (index as u64).saturating_mul(size_of::<T>() as u64)
    }

    /// Takes the first record, if there is one, and releases it.
    fn take(self) -> Result<Option<T>> {
        if self.is_empty() {
            return Ok(None);
        }
        let record = self.get(0)?;
        self.release_first(1)?;
        Ok(Some(record))
    }
}

impl<T> Records<'_, T> {
    pub(super) fn view(&self) -> Result<CpuView<'_>> {
        let Consumer { memory, tail, .. } = &*self.consumer;
        memory.view(*tail, self.records as u64)
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("capacity", &self.capacity())
            .field("released", &self.tail)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Records<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records")
            .field("records", &self.records)
            .finish_non_exhaustive()
    }
}

impl Records<'_, Untyped> {
    /// Returns the bytes of all records.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible).
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let view = self.view()?;
        let mut bytes = vec![0; view.len() as usize];
        view.read_at(0, &mut bytes)?;
        Ok(bytes)
    }
}
