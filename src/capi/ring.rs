//! Rings: queues of records between CPU and GPUs, also of two processes.

use std::ffi::{c_char, c_void};
use std::mem::{self, MaybeUninit, offset_of};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use egmem::driver::DevicePtr;
use egmem::shapes::ring::{GpuConsumer, GpuProducer, RingOptions, Untyped};
use egmem::shapes::{Consumer, Producer, Ring};
use egmem::share::ImportOptions;

use crate::args::{handle, object, write_one};
use crate::buffer::pointer;
use crate::failure::{Failure, Outcome};
use crate::options::{Options, With, check_flags, nonzero, read, read_gpus};
use crate::{
    EGM_SHAREABLE, args, ask, destroy, egm_channel, egm_driver, egm_location, egm_status, make,
    noted, on,
};

/// A side that writes records.
pub const EGM_RING_PRODUCER: i32 = 1;
/// A side that reads records.
pub const EGM_RING_CONSUMER: i32 = 2;

/// Options of a ring. Set `struct_size` to sizeof(egm_ring_options), and the fields that you do not need to 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_ring_options {
    /// The size of this structure, by which the library knows the program's version.
    pub struct_size: usize,
    /// Where the memory lies: on a host node if the CPU has a side.
    pub location: egm_location,
    /// The size of a record in bytes, at least 1.
    pub record_bytes: u64,
    /// The most records that the ring holds; 0: as many as 2 MiB have room for. All together have at most 2 GiB.
    pub records: u64,
    /// `gpu_count` ordinals of the GPUs that may read and write. A null pointer: every GPU that can reach the memory.
    pub gpus: *const i32,
    /// The number of ordinals.
    pub gpu_count: usize,
    /// Bits: ::EGM_SHAREABLE, so that a side can be sent to another process.
    pub flags: u32,
    /// The memory's name in the ledger; may be null.
    pub label: *const c_char,
}

// SAFETY: numbers and raw pointers only, the size first.
unsafe impl Options for egm_ring_options {
    const END: usize = offset_of!(Self, label) + size_of::<*const c_char>();
}

/// What a side of a ring knows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct egm_ring_info {
    /// The size of a record in bytes.
    pub record_bytes: u64,
    /// The most records that the ring holds.
    pub records: u64,
    /// How many records were committed, or released, by this side and by those that had it before in other processes.
    pub count: u64,
}

/// One side of a ring: a bounded queue of records of one size, with one producer and one consumer, each a thread or a kernel.
/// One thread at a time uses it. docs/shapes.md describes rings; the functions for kernels are in egmem_ring.cuh.
pub enum egm_ring_side {
    /// A producer's, which the CPU has.
    Producer(Producer<Untyped>),
    /// A consumer's, which the CPU has.
    Consumer(Consumer<Untyped>),
    /// A producer's, which a GPU has.
    GpuProducer(GpuProducer<Untyped>),
    /// A consumer's, which a GPU has.
    GpuConsumer(GpuConsumer<Untyped>),
    /// Its counters were wrong when a GPU gave it back.
    Lost,
}

use egm_ring_side as Side;

impl Side {
    fn refused(&self, wanted: &str) -> Failure {
        let found = match self {
            Self::Producer(_) => "a producer's",
            Self::Consumer(_) => "a consumer's",
            Self::GpuProducer(_) | Self::GpuConsumer(_) => "a GPU's, until egm_ring_to_cpu",
            Self::Lost => "lost: its counters were damaged",
        };
        Failure::invalid("side", format!("it is {found}; valid: {wanted}"))
    }

    fn producer(&mut self) -> Outcome<&mut Producer<Untyped>> {
        match self {
            Self::Producer(side) => Ok(side),
            other => Err(other.refused("a producer's")),
        }
    }

    fn consumer(&mut self) -> Outcome<&mut Consumer<Untyped>> {
        match self {
            Self::Consumer(side) => Ok(side),
            other => Err(other.refused("a consumer's")),
        }
    }
}

/// Returns when a wait that begins now ends.
fn deadline(timeout_ms: u64) -> Instant {
    let now = Instant::now();
    let end = now.checked_add(Duration::from_millis(timeout_ms));
    // Longer than any program runs.
    end.unwrap_or_else(|| now + Duration::from_secs(1 << 32))
}

/// Creates a ring and gives both sides. A null pointer instead of `producer` or `consumer` drops that side, so that
/// egm_ring_share() can send it to another process.
///
/// Fails with ::EGM_INVALID_ARGUMENT, ::EGM_NO_SUCH_NODE, ::EGM_NO_SUCH_GPU, ::EGM_OUT_OF_MEMORY, and others of the
/// driver.
///
/// # Safety
/// `driver` is null or a driver; `options` is null or as large as its first field says, with `gpu_count` ordinals and a
/// string or null as its label; `producer` and `consumer` are null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_create(
    driver: Option<&egm_driver>,
    options: *const egm_ring_options,
    producer: Option<NonNull<*mut egm_ring_side>>,
    consumer: Option<NonNull<*mut egm_ring_side>>,
) -> egm_status {
    let create = |driver: &egm_driver| {
        // SAFETY: the caller's promise.
        let options = unsafe { read(options)? };
        check_flags(options.flags, EGM_SHAREABLE)?;
        // SAFETY: the caller's promise.
        let gpus = unsafe { read_gpus(options.gpus, options.gpu_count)? };
        // SAFETY: the caller's promise.
        let label = unsafe { args::optional_text(options.label, "label")? };
        let records = |count| usize::try_from(count).unwrap_or(usize::MAX);
        let shareable = (options.flags & EGM_SHAREABLE != 0).then_some(());
        let ring = Ring::untyped(options.location.read()?, options.record_bytes)
            .with(nonzero(options.records).map(records), RingOptions::records)
            .with(gpus, RingOptions::access_by)
            .with(label, RingOptions::label)
            .with(shareable, |options, ()| options.shareable())
            .create(&driver.0)?;
        let sides = [Side::Producer(ring.producer), Side::Consumer(ring.consumer)];
        for (out, side) in [producer, consumer].into_iter().zip(sides) {
            // SAFETY: the caller's promise.
            unsafe { write_one(out, || args::given(side)) };
        }
        Ok(())
    };
    noted(|| on(driver, create))
}

/// Waits until `records` have room, at most `timeout_ms` milliseconds; 0 asks once. `*out` is the address of the first for
/// the CPU and for GPUs, and the others follow without a gap. It is null if there was no room, or the consumer is gone
/// (egm_ring_is_alone()). Write there, then call egm_ring_commit().
///
/// Fails with ::EGM_DAMAGED if the other side has written a counter that cannot be.
///
/// # Safety
/// `side` is null or a side that no other call uses; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_reserve(
    side: Option<&mut egm_ring_side>,
    records: usize,
    timeout_ms: u64,
    out: Option<&mut MaybeUninit<*mut c_void>>,
) -> egm_status {
    on(side, |side| {
        let out = object(out, "out")?;
        let producer = side.producer()?;
        let batch = producer.reserve_until(records, deadline(timeout_ms))?;
        let address = batch.map_or(DevicePtr(0), |batch| batch.device_ptr());
        out.write(pointer(address.0));
        Ok(())
    })
}

/// Lets the consumer have the next `records`, all at once: at most as many as egm_ring_reserve() gave room for last.
///
/// # Safety
/// `side` is null or a side that no other call uses. Work of GPUs that writes the records has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_commit(
    side: Option<&mut egm_ring_side>,
    records: usize,
) -> egm_status {
    on(side, |side| {
        let batch = side.producer()?.try_reserve(records)?;
        Ok(batch.ok_or_else(|| too_many(records))?.commit()?)
    })
}

/// Waits until there is a record, at most `timeout_ms` milliseconds; 0 asks once. `*out` is the address of the oldest one for
/// the CPU and for GPUs, `*count` how many follow each other there, at most `most`: 0 if none came, or the producer
/// is gone (egm_ring_is_alone()) and has left none. They stay until egm_ring_release().
///
/// Fails with ::EGM_DAMAGED if the other side has written a counter that cannot be.
///
/// # Safety
/// `side` is null or a side that no other call uses; `out` and `count` are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_peek(
    side: Option<&mut egm_ring_side>,
    most: usize,
    timeout_ms: u64,
    out: Option<NonNull<*const c_void>>,
    count: Option<NonNull<usize>>,
) -> egm_status {
    on(side, |side| {
        object(out, "out")?;
        object(count, "count")?;
        let consumer = side.consumer()?;
        let records = consumer.peek_until(most, deadline(timeout_ms))?;
        let first = pointer(records.device_ptr().0).cast_const();
        // SAFETY: the caller's promise.
        unsafe {
            write_one(out, || first);
            write_one(count, || records.len());
        }
        Ok(())
    })
}

/// Gives the room of the oldest `records` to the producer: at most as many as egm_ring_peek() has found last.
///
/// # Safety
/// `side` is null or a side that no other call uses. Work of GPUs that reads the records has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_release(
    side: Option<&mut egm_ring_side>,
    records: usize,
) -> egm_status {
    on(side, |side| {
        let found = side.consumer()?.peek(records)?;
        if found.len() < records {
            return Err(too_many(records));
        }
        Ok(found.release()?)
    })
}

fn too_many(records: usize) -> Failure {
    Failure::invalid("records", format!("{records} are more than there are"))
}

fn lost() -> Failure {
    Side::Lost.refused("one that was not lost")
}

/// Hands a side to kernels: `*out` is what they pass to egmem_ring_open_producer() or egmem_ring_open_consumer(). Until
/// egm_ring_to_cpu() the CPU neither writes nor reads records through it. It does no harm to a side that kernels have.
///
/// # Safety
/// `side` is null or a side that no other call uses; `out` is null or may be written. One kernel at a time uses the side, and
/// ends before the side is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_to_gpu(
    side: Option<&mut egm_ring_side>,
    out: Option<&mut MaybeUninit<*mut c_void>>,
) -> egm_status {
    on(side, |side| {
        let out = object(out, "out")?;
        *side = match mem::replace(side, Side::Lost) {
            Side::Producer(side) => Side::GpuProducer(side.into_gpu()),
            Side::Consumer(side) => Side::GpuConsumer(side.into_gpu()),
            other => other,
        };
        let address = match side {
            Side::GpuProducer(side) => side.device_ptr(),
            Side::GpuConsumer(side) => side.device_ptr(),
            _ => return Err(lost()),
        };
        out.write(pointer(address.0));
        Ok(())
    })
}

/// Gives a side back to the CPU. No kernel may use it any more.
///
/// Fails with ::EGM_NOT_ACCESSIBLE if the CPU may not read and write the memory; the side stays with the GPU then. Fails with
/// ::EGM_DAMAGED if a counter has a value that it cannot have; only egm_ring_destroy() is left then.
///
/// # Safety
/// `side` is null or a side that no other call uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_to_cpu(side: Option<&mut egm_ring_side>) -> egm_status {
    on(side, |side| {
        match side {
            Side::GpuProducer(side) => side.expect_cpu()?,
            Side::GpuConsumer(side) => side.expect_cpu()?,
            _ => {}
        }
        *side = match mem::replace(side, Side::Lost) {
            Side::GpuProducer(side) => Side::Producer(side.into_cpu()?),
            Side::GpuConsumer(side) => Side::Consumer(side.into_cpu()?),
            Side::Lost => return Err(lost()),
            cpu => cpu,
        };
        Ok(())
    })
}

/// Says whether the other side was destroyed, or the process that has it has ended: no record will come, or be released. Records
/// that it committed before are still there: ask this first, and take records until there are none afterwards.
///
/// # Safety
/// `side` is null or a side that no other call changes; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_is_alone(
    side: Option<&egm_ring_side>,
    out: Option<&mut MaybeUninit<bool>>,
) -> egm_status {
    ask(side, out, |side| match side {
        Side::Producer(side) => Ok(side.is_alone()),
        Side::Consumer(side) => Ok(side.is_alone()),
        Side::GpuProducer(side) => Ok(side.is_alone()),
        Side::GpuConsumer(side) => Ok(side.is_alone()),
        Side::Lost => Err(lost()),
    })
}

/// Tells what a side knows. The CPU has it.
///
/// # Safety
/// `side` is null or a side that no other call changes; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_get_info(
    side: Option<&egm_ring_side>,
    out: Option<&mut MaybeUninit<egm_ring_info>>,
) -> egm_status {
    ask(side, out, |side| {
        let (record_bytes, records, count) = match side {
            Side::Producer(side) => (side.record_bytes(), side.capacity(), side.committed()),
            Side::Consumer(side) => (side.record_bytes(), side.capacity(), side.released()),
            other => return Err(other.refused("one that the CPU has")),
        };
        let records = records as u64;
        Ok(egm_ring_info {
            record_bytes,
            records,
            count,
        })
    })
}

/// Sends the other side of a ring, which nobody has, to another process, which calls egm_ring_receive(). The side was given no
/// pointer by egm_ring_create(), or was destroyed, or the process that had it has ended: the next one goes on where that one
/// stopped. Of a side that a kernel had, first wait for the end of the process itself: until then the kernel may still run.
///
/// Fails with ::EGM_STILL_HELD while somebody has the side, ::EGM_DAMAGED, ::EGM_INVALID_ARGUMENT for a ring without
/// ::EGM_SHAREABLE; ::EGM_PEER_LOST, ::EGM_TIMED_OUT.
///
/// # Safety
/// `side` is null or a side that no other call uses; `channel` is null or a channel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_share(
    side: Option<&mut egm_ring_side>,
    channel: Option<&egm_channel>,
) -> egm_status {
    on(side, |side| {
        let mut channel = handle(channel)?.sender();
        match side {
            Side::Producer(side) => side.share_consumer(&mut channel)?,
            Side::GpuProducer(side) => side.share_consumer(&mut channel)?,
            Side::Consumer(side) => side.share_producer(&mut channel)?,
            Side::GpuConsumer(side) => side.share_producer(&mut channel)?,
            Side::Lost => return Err(lost()),
        }
        Ok(())
    })
}

/// Waits for a side of a ring from another process, of the kind `which`: ::EGM_RING_PRODUCER or ::EGM_RING_CONSUMER. It is mapped
/// for the CPU and every GPU that can reach it. egm_ring_get_info() tells the size of its records.
///
/// Fails with ::EGM_TIMED_OUT, after which the call may be made again if no byte had arrived; ::EGM_INVALID_ARGUMENT for another
/// message, ::EGM_DAMAGED, ::EGM_PEER_LOST, ::EGM_PROTOCOL, and others of the driver.
///
/// # Safety
/// `channel` is null or a channel; `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_receive(
    channel: Option<&egm_channel>,
    driver: Option<&egm_driver>,
    which: i32,
    out: Option<&mut MaybeUninit<*mut egm_ring_side>>,
) -> egm_status {
    let receive = |channel: &egm_channel| {
        let driver = &handle(driver)?.0;
        let (options, mut channel) = (ImportOptions::new(), channel.receiver());
        Ok(match which {
            EGM_RING_PRODUCER => {
                Side::Producer(Producer::receive_untyped(driver, &mut channel, options)?)
            }
            EGM_RING_CONSUMER => {
                Side::Consumer(Consumer::receive_untyped(driver, &mut channel, options)?)
            }
            other => {
                let why = format!("{other}; valid: EGM_RING_PRODUCER, EGM_RING_CONSUMER");
                return Err(Failure::invalid("which", why));
            }
        })
    };
    noted(|| make(channel, out, receive))
}

/// Drops a side: the other one is alone then. Records that were committed stay in the ring. A null pointer is left alone.
///
/// # Safety
/// `side` is null, or a side that no thread uses during the call or afterwards: not destroyed yet. Kernels that use it have
/// ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_ring_destroy(side: *mut egm_ring_side) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(side) }
}
