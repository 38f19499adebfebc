//! The sides while a GPU has them.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use super::memory::{HEAD, RingMemory, TAIL};
use super::{Consumer, Producer};
use crate::Result;
use crate::cursor::check;
use crate::driver::DevicePtr;

/// Defines a side that a GPU has. The other side's CPU end has the counter that is not this one's own.
macro_rules! gpu_side {
    ($name:ident of $cpu:ident, $what:literal, $elements:ty, $counter:ident, $own:ident) => {
        #[doc = concat!("The ", $what, " of a ring while kernels have it.")]
        ///
        /// It keeps the ring's memory mapped. Launching a kernel is unsafe: the caller that launches one with
        /// [`device_ptr`](Self::device_ptr) promises that it ends before this value and the other side are dropped,
        /// and that one kernel at a time has this side. Each kernel continues where the one before it stopped.
        ///
        /// See [`Ring`](super::Ring).
        pub struct $name<T> {
            pub(super) memory: Arc<RingMemory>,
            records: PhantomData<$elements>,
        }

        impl<T> $name<T> {
            /// Returns the ring's address, which a kernel's argument is and the device functions take.
            pub fn device_ptr(&self) -> DevicePtr {
                self.memory.address()
            }

            /// Returns the address of the ring's records, which are mapped twice side by side.
            pub fn records_ptr(&self) -> DevicePtr {
                self.memory.first_record()
            }

            /// Returns the most records that the ring holds.
            pub fn capacity(&self) -> usize {
                self.memory.shape.capacity as usize
            }

            /// Returns the size of a record in bytes.
            pub fn record_bytes(&self) -> u64 {
                self.memory.shape.record
            }

            /// Returns whether the other side was dropped, or the process that has it has ended. Its earlier writes are seen then: a consumer asks this
            /// first, and takes records until there are none afterwards.
            pub fn is_alone(&self) -> bool {
                self.memory.has_one_side()
            }

            /// Fails if the CPU cannot have the side, which then stays with the GPU.
            ///
            /// # Errors
            /// [`Error::NotAccessible`](crate::Error::NotAccessible) if the CPU may not read and write the memory;
            /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) in a forked child.
            pub fn expect_cpu(&self) -> Result<()> {
                self.memory.expect_cpu()
            }

            /// Gives the side back to the CPU. No kernel may use it any more.
            ///
            /// # Errors
            /// [`Error::CursorDamaged`](crate::Error::CursorDamaged) if a counter has a value that it cannot have;
            /// [`Error::NotAccessible`](crate::Error::NotAccessible) if the CPU may not read and write the memory.
            /// This side is dropped then: [`expect_cpu`](Self::expect_cpu) asks before.
            pub fn into_cpu(self) -> Result<$cpu<T>> {
                $cpu::resume(self.memory)
            }
        }

        impl<T> $cpu<T> {
            /// Hands this side to a GPU. Records that are in the ring stay. Kernels go on from this side's own count:
            /// where the CPU may write the memory, a counter there that something else has changed is set right.
            pub fn into_gpu(self) -> $name<T> {
                // Where the CPU may not, this side never counted. In a forked child the counter is the parent's.
                if let Ok(counter) = self.memory.counter($counter) {
                    counter.store(self.$own, Release);
                }
                $name {
                    memory: self.memory,
                    records: PhantomData,
                }
            }
        }

        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("ring", &self.device_ptr())
                    .field("capacity", &self.capacity())
                    .finish_non_exhaustive()
            }
        }
    };
}

gpu_side!(GpuProducer of Producer, "producer's side", fn(T), HEAD, head);
gpu_side!(GpuConsumer of Consumer, "consumer's side", fn() -> T, TAIL, tail);

impl<T> Producer<T> {
    /// Takes this side on where its counter is.
    pub(super) fn resume(memory: Arc<RingMemory>) -> Result<Self> {
        let (head, tail) = memory.counts()?;
        let most = tail.wrapping_add(memory.shape.capacity);
        check("the head of a ring", head, (tail, most))?;
        Ok(Self::new(memory, head, tail))
    }
}

impl<T> Consumer<T> {
    /// Takes this side on where its counter is.
    pub(super) fn resume(memory: Arc<RingMemory>) -> Result<Self> {
        let (head, tail) = memory.counts()?;
        let least = head.wrapping_sub(memory.shape.capacity);
        check("the tail of a ring", tail, (least, head))?;
        Ok(Self::new(memory, tail, head))
    }
}
