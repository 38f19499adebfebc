//! Bounded queues between the CPU and GPUs.

mod consumer;
mod gpu;
#[cfg(feature = "share")]
mod header;
mod memory;
mod options;
mod producer;
#[cfg(feature = "share")]
mod share;

pub use consumer::{Consumer, Records};
pub use gpu::{GpuConsumer, GpuProducer};
pub use memory::Untyped;
pub use options::RingOptions;
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
/// With the feature `share`, a process hands one side of a [`shareable`](RingOptions::shareable) ring to another process over
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
