//! Bounded queues between the CPU and GPUs.

mod consumer;
mod memory;
mod producer;
mod share;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::Backing;
use egmem_core::capability::shareable::handle_types_of;

use crate::Placement;
use crate::driver::{DevicePtr, HandleTypes, Location, setters};
use crate::ledger::{Label, Site};
use crate::{Driver, Result};

use memory::{HEAD, RingMemory, TAIL};

pub use consumer::{Consumer, Records};
pub use memory::Untyped;
pub use producer::{Batch, Producer};

/// A queue of records of type `T` in the order in which they came, bounded, with one producer and one consumer. Each
/// side is a thread or a kernel: CPU to CPU, CPU to GPU, GPU to CPU, or GPU to GPU.
///
/// ```text
/// addresses   │ counters, 1 granule │ records, 2^k bytes      │ the same records again  │
///             │ head  tail          │ 0  1  2  …       n-2 n-1│ 0  1  2  …       n-2 n-1│
///             └──────────┬──────────┴────────────┬────────────┴────────────┬────────────┘
/// memory                 A                       B                         B
///
///                                           a batch: │n-2 n-1│ 0  1│ one range of addresses
/// ```
/// The records' memory is mapped twice, side by side, so a batch that goes on at the start has one range of
/// addresses, and a record of any size stays whole.
///
/// A producer reserves room for a batch, writes it and commits it; a consumer looks at records and releases them. The
/// consumer sees a batch as a whole or not at all, and the producer gets room back only for released records: a full
/// ring refuses, or waits until a deadline. Both sides count in 64 bits from 0 on.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use egmem::driver::NodeId;
/// use egmem::shapes::Ring;
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let Ring { mut producer, mut consumer } = Ring::<[u64; 2]>::on(NodeId(0)).records(1000).create(&driver)?;
///
/// let thread = std::thread::spawn(move || -> egmem::Result<u64> {
///     let (mut sum, mut left) = (0, 5000);
///     while left > 0 {
///         let soon = Instant::now() + Duration::from_secs(10);
///         let records = consumer.peek_until(64, soon)?;
///         for index in 0..records.len() {
///             sum += records.get(index)?[1];
///         }
///         left -= records.len();
///         records.release()?;
///     }
///     Ok(sum)
/// });
/// for first in (0..5000).step_by(100) {
///     let soon = Instant::now() + Duration::from_secs(10);
///     let mut batch = producer.reserve_until(100, soon)?.expect("the consumer makes room");
///     for index in 0..100 {
///         batch.write(index, &[[7, (first + index) as u64]])?;
///     }
///     batch.commit()?; // all 100 at once
/// }
/// assert_eq!(thread.join().unwrap()?, 4999 * 5000 / 2);
/// # Ok::<(), egmem::Error>(())
/// ```
///
/// # On a GPU
/// [`Producer::into_gpu`] and [`Consumer::into_gpu`] hand a side to kernels. The device functions are in
/// [`device::HEADERS`](crate::device::HEADERS), for CUDA C++, and in [`device::PTX`](crate::device::PTX), which also
/// has kernels that push and pop. A side belongs to one kernel at a time, and in it to one thread, or to the threads
/// of one warp or block that take turns by a barrier.
///
/// Both sides keep the memory mapped; it is unmapped when both are dropped. Neither knows which kernels run on a GPU:
/// a kernel that has the ring's address must have ended before the last side is dropped, because a GPU that accesses
/// unmapped addresses loses its context. The unsafe call that launches the kernel promises that.
///
/// # Order
/// `commit` and `release` store a counter with release order, and the other side loads it with acquire order: by
/// `stlr`/`ldar` or plain stores and loads of x86-64 on CPUs, by `st.release.sys` and `ld.acquire.sys` on GPUs. These
/// have system scope, so the order is the same over PCIe and over NVLink-C2C: a side that sees a counter sees the
/// records before it. Neither atomic read-modify-writes nor stream memory operations are used: a GPU's
/// read-modify-writes of host memory over PCIe are not atomic for the CPU, and drivers refuse stream memory
/// operations on such memory.
///
/// The counters lie on cache lines of their own. Each side keeps its own counter and the last value of the other's,
/// and loads the other's only if the ring seems to be full, or empty. A CPU that waits reads its cache. A GPU that
/// waits for a counter in host memory reads it across the link each time; one look serves all records that have come
/// by then.
///
/// # Between processes
/// A process hands one side of a [`shareable`](RingOptions::shareable) ring to another process over
/// a channel: `Producer::share_consumer` and `Consumer::share_producer` send it, `Consumer::receive` and
/// `Producer::receive` get it. Each process maps the memory by itself and keeps it, whatever the other does.
///
/// [`is_alone`](Consumer::is_alone) is true as soon as the other process has dropped its side or has ended; the kernel of the
/// operating system tells that, and no time has to pass. Waits end then. A process that is stopped is still there: a wait
/// ends at its deadline. A producer that is killed in the middle of a batch never commits it, and records that a killed
/// consumer has not released stay. The side that is left can hand the other one to a new process, which goes on where its
/// counter is: [`Producer::committed`] and [`Consumer::released`] say where that is. A consumer that does something with
/// records before it releases them gets some of them twice if it is killed in between.
///
/// A GPU's kernels run on for a moment after their process has been killed, until the driver has ended them. They use that
/// process's mappings, which the driver keeps until then. The side that is left has its own, and sees whole batches.
///
/// In a forked child both sides are the parent's, and the child's calls are refused. The child keeps the connection open,
/// though: if its parent is killed, that is seen when the child has ended too.
///
/// # Damaged counters
/// Kernels, and the other process of a shared ring, may write anything anywhere in the ring. The CPU's ends never read or write outside the ring for it, and
/// never panic: a counter that is out of its range is [`Error::CursorDamaged`](crate::Error::CursorDamaged), at each
/// call until it is right again. A wrong counter within its range turns the bytes there into records; any bytes are
/// valid records. The size and number of the records are this process's own: of a shared ring also those that its kernels
/// use, which lie in memory that no other process has.
#[derive(Debug)]
pub struct Ring<T> {
    /// The side that writes.
    pub producer: Producer<T>,
    /// The side that reads.
    pub consumer: Consumer<T>,
}

/// Options for a ring; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct RingOptions<T> {
    placement: Placement,
    /// The size of a record in bytes.
    record: u64,
    records: Option<usize>,
    shareable: bool,
    elements: PhantomData<fn() -> T>,
}

impl<T: AnyBitPattern + NoUninit> Ring<T> {
    /// Returns options for a ring at `location`: a node's id, or any [`Location`].
    ///
    /// A ring that the CPU uses lies on a host node. One between GPUs lies best on the consumer's, which then polls its
    /// own memory.
    pub fn on(location: impl Into<Location>) -> RingOptions<T> {
        RingOptions::new(location.into(), size_of::<T>() as u64)
    }
}

impl Ring<Untyped> {
    /// Returns options for a ring at `location` with records of `bytes` bytes, which the program reads and writes by their
    /// addresses.
    pub fn untyped(location: impl Into<Location>, bytes: u64) -> RingOptions<Untyped> {
        RingOptions::new(location.into(), bytes)
    }
}

impl<T> RingOptions<T> {
    fn new(location: Location, record: u64) -> Self {
        Self {
            placement: Placement::at(location),
            record,
            records: None,
            shareable: false,
            elements: PhantomData,
        }
    }

    setters! {
        /// Sets the most records that the ring holds: at least 1. All records together have at most 2 GiB. By default as many
        /// as one granule of memory has room for, which is 2 MiB on every driver measured so far.
        records(records: usize) => records = Some(records);
        /// Makes the ring shareable, so that a process can hand one side to another process: see `shapes::sharing`. By default
        /// it is not. It takes one granule more in each process, for what kernels must trust.
        shareable() => shareable = true;
    }

    /// Sets which locations may read and write besides the host; [`Location::Host`] adds the CPU to memory of a GPU,
    /// where the machine allows that. The default is every GPU that can reach the memory.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.placement.access.set_all(who);
        self
    }

    /// Sets the name of its memory in the [ledger](egmem_core::ledger).
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.placement.label = Some(label.into());
        self
    }

    /// Creates the ring: one granule for its counters, and a power of two of bytes for its records, mapped twice.
    ///
    /// Source: `cuMemCreate` twice, `cuMemMap` and `cuMemSetAccess` three times; each once more for a shareable ring.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for records of 0 bytes, for room for none, and for records
    /// of more than 2 GiB, alone or together; those of [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create),
    /// [`Reservation::map`](crate::vmm::Reservation::map) and
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access); the reason why it cannot be shareable. Nothing stays behind
    /// then.
    #[track_caller]
    pub fn create(self, driver: &Driver) -> Result<Ring<T>> {
        let access = self.placement.grants(driver)?;
        let handle_types = match self.shareable {
            false => HandleTypes::NONE,
            true => handle_types_of(driver, self.placement.location, Backing::Driver)?.handle_types,
        };
        let memory = (self.placement.memory(Site::here()), handle_types);
        let shape = (self.records, self.record);
        let memory = RingMemory::create(driver, memory, &access, shape)?;
        Ok(Ring {
            producer: Producer::resume(Arc::clone(&memory))?,
            consumer: Consumer::resume(memory)?,
        })
    }
}

/// Defines the queries that every side of a ring answers.
macro_rules! side {
    ($($name:ident),*) => { $(
        impl<T> $name<T> {
            /// Returns the most records that the ring holds.
            pub fn capacity(&self) -> usize {
                self.memory.shape.capacity as usize
            }

            /// Returns the size of a record in bytes.
            pub fn record_bytes(&self) -> u64 {
                self.memory.shape.record
            }

            /// Returns whether the other side was dropped, or the process that has it has ended: no record is released any more, or
            /// none comes. Its earlier writes are seen then: a consumer asks this first, and takes records until there are none
            /// afterwards.
            pub fn is_alone(&self) -> bool {
                self.memory.has_one_side()
            }
        }
    )* };
}

side!(Producer, Consumer, GpuProducer, GpuConsumer);

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
            memory: Arc<RingMemory>,
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
                self.expect_cpu()?;
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
