//! The side that writes.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

use bytemuck::{AnyBitPattern, NoUninit};

use super::memory::{HEAD, RingMemory, TAIL, Untyped};
use crate::driver::DevicePtr;
use crate::memory::CpuView;
use crate::{Error, Result, check, until};

/// The CPU's end of a ring that writes records: one thread at a time.
///
/// See [`Ring`](super::Ring).
pub struct Producer<T> {
    pub(super) memory: Arc<RingMemory>,
    /// The records committed so far. The counter in the memory is a copy: a GPU cannot change this one.
    pub(super) head: u64,
    /// The records that the consumer had released when last looked at. They are looked at again only when there seems
    /// to be no room.
    tail: u64,
    records: PhantomData<fn(T)>,
}

impl<T> Producer<T> {
    /// Takes this side on where its counter is.
    pub(super) fn resume(memory: Arc<RingMemory>) -> Result<Self> {
        // The sides of a ring that the CPU may not use are the kernels' alone.
        let counts = memory.is_cpus().then(|| memory.counts()).transpose()?;
        let (head, tail) = counts.unwrap_or_default();
        let most = tail.wrapping_add(memory.shape.capacity);
        check("the head of a ring", head, (tail, most))?;
        Ok(Self {
            memory,
            head,
            tail,
            records: PhantomData,
        })
    }

    /// Returns how many records were committed since the ring was created, by this side and by those that had it before in
    /// other processes. It goes on at 0 after 2^64 - 1.
    pub const fn committed(&self) -> u64 {
        self.head
    }

    /// Returns how many records there is room for now. The consumer may make more at any time.
    ///
    /// # Errors
    /// [`Error::CursorDamaged`] if the consumer's counter has a value that it cannot have;
    /// [`Error::NotAccessible`] if the CPU may not read and write the memory.
    pub fn room(&mut self) -> Result<usize> {
        let tail = self.memory.counter(TAIL)?.load(Acquire);
        self.tail = check("the tail of a ring", tail, (self.tail, self.head))?;
        Ok(self.known_room() as usize)
    }

    fn known_room(&self) -> u64 {
        self.memory.shape.capacity - self.head.wrapping_sub(self.tail)
    }

    /// Returns whether `records` have room, and looks at the consumer's counter only where they seem not to.
    fn has_room(&mut self, records: usize) -> Result<bool> {
        if records as u64 <= self.known_room() {
            return Ok(true);
        }
        let capacity = self.capacity();
        if records > capacity {
            let why = format!("a batch of {records} records never has room");
            return Err(Error::invalid_of(
                "records",
                why,
                format!("0 to {capacity}"),
            ));
        }
        Ok(self.room()? >= records)
    }

    /// Returns a batch of `records` to be written and committed together, or `None` if there is no room for all of them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than [`capacity`](Self::capacity); as [`room`](Self::room).
    pub fn try_reserve(&mut self, records: usize) -> Result<Option<Batch<'_, T>>> {
        self.memory.expect_cpu()?;
        Ok(self.has_room(records)?.then_some(Batch {
            producer: self,
            records,
        }))
    }

    /// Waits until `records` have room, at most until `deadline`: `None` then, and as soon as the consumer is gone
    /// ([`is_alone`](Self::is_alone)). A deadline that has passed asks once.
    ///
    /// The thread keeps its CPU for 50 µs, and sleeps 50 µs at a time after a millisecond.
    ///
    /// # Errors
    /// As [`try_reserve`](Self::try_reserve).
    pub fn reserve_until(
        &mut self,
        records: usize,
        deadline: Instant,
    ) -> Result<Option<Batch<'_, T>>> {
        let ready = until(deadline, self, Self::is_alone, |side| {
            Ok(side.has_room(records)?.then_some(()))
        })?;
        match ready {
            Some(()) => self.try_reserve(records),
            None => Ok(None),
        }
    }
}

impl<T: AnyBitPattern + NoUninit> Producer<T> {
    /// Writes and commits one record. Returns `false`, and writes nothing, if there is no room.
    ///
    /// # Errors
    /// As [`room`](Self::room).
    pub fn try_push(&mut self, record: T) -> Result<bool> {
        self.try_push_all(&[record])
    }

    /// Writes all of `records` and commits them together. Returns `false`, and writes nothing, if they have no room.
    ///
    /// # Errors
    /// As [`try_reserve`](Self::try_reserve).
    pub fn try_push_all(&mut self, records: &[T]) -> Result<bool> {
        let Some(mut batch) = self.try_reserve(records.len())? else {
            return Ok(false);
        };
        batch.write(0, records)?;
        batch.commit().map(|()| true)
    }

    /// Writes as many of `records` as have room and commits them together. Returns how many.
    ///
    /// # Errors
    /// As [`room`](Self::room).
    pub fn push_some(&mut self, records: &[T]) -> Result<usize> {
        let mut count = records.len().min(self.capacity());
        if !self.has_room(count)? {
            count = count.min(self.known_room() as usize);
        }
        self.try_push_all(&records[..count]).map(|_| count)
    }

    /// Writes and commits one record as soon as there is room. Returns `false`, and writes nothing, if there was none
    /// until `deadline`. It waits as [`reserve_until`](Self::reserve_until) does.
    ///
    /// # Errors
    /// As [`room`](Self::room).
    pub fn push_until(&mut self, record: T, deadline: Instant) -> Result<bool> {
        let Some(mut batch) = self.reserve_until(1, deadline)? else {
            return Ok(false);
        };
        batch.write(0, &[record])?;
        batch.commit().map(|()| true)
    }
}

/// Room for records, which the consumer sees when they are committed, all at once. Dropped instead, it was never there.
#[must_use = "the consumer sees no record before `commit`"]
pub struct Batch<'a, T> {
    producer: &'a mut Producer<T>,
    records: usize,
}

impl<T> Batch<'_, T> {
    /// Returns the number of records.
    pub const fn len(&self) -> usize {
        self.records
    }

    /// Returns whether there are no records.
    pub const fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Returns the address of the first record, which the others follow without a gap. It is the same for the CPU and for every
    /// GPU with access. Work on it must have ended before the batch is committed or dropped.
    pub fn device_ptr(&self) -> DevicePtr {
        self.producer.memory.record(self.producer.head)
    }

    /// Lets the consumer have all records.
    ///
    /// # Errors
    /// [`Error::NotAccessible`].
    pub fn commit(self) -> Result<()> {
        let Producer { memory, head, .. } = self.producer;
        let counter = memory.counter(HEAD)?;
        *head = head.wrapping_add(self.records as u64);
        // Orders the records' bytes before it, for threads and for the GPUs of the system.
        counter.store(*head, Release);
        Ok(())
    }
}

impl<T: AnyBitPattern + NoUninit> Batch<'_, T> {
    /// Writes `records` from the batch's record `index` on. A record that is never written has the bytes of an earlier one.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], in bytes, if they are not all in the batch.
    pub fn write(&mut self, index: usize, records: &[T]) -> Result<()> {
        let offset = (index as u64).saturating_mul(size_of::<T>() as u64);
        self.view()?.write_at(offset, records)
    }
}

impl<T> Batch<'_, T> {
    pub(super) fn view(&self) -> Result<CpuView<'_>> {
        let Producer { memory, head, .. } = &*self.producer;
        memory.view(*head, self.records as u64)
    }
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("capacity", &self.capacity())
            .field("committed", &self.head)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Batch<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("records", &self.records)
            .finish_non_exhaustive()
    }
}

impl Batch<'_, Untyped> {
    /// Writes bytes from the start of the batch on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) for more bytes than the batch has.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.view()?.write_at(0, bytes)
    }
}
