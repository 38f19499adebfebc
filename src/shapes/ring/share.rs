//! Sides in other processes.
//!
//! ```text
//! one process   Producer ── share_consumer ──▶ a line of text: which side, the ring's shape
//!                  │                           memory: the counters' part, the records' part
//!                  │ link                      one end of a link
//! another       Consumer ◀───── receive ─────┘
//! ```
//! The link tells each side whether the other is there. Both may hand on the other's side when it is not.

use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::Backing;
use egmem_core::per_driver::lock;
use egmem_share::{Channel, Description, ImportOptions, Result, Shared};

use super::memory::{HEAD, Parts, RingMemory, Shape, TAIL};
use super::{Consumer, GpuConsumer, GpuProducer, Producer, Untyped};
use crate::driver::{Access, Driver, HandleTypes, Location};
use crate::ledger::{AllocPath, Site};
use crate::sharing::{SharedPart, share};
use crate::size::Granularity;
use crate::vmm::PhysicalMemory;
use crate::{Error, numbers};

impl RingMemory {
    /// Sends the side that nobody has. If that fails, nobody has it still.
    fn send(self: &Arc<Self>, side: Side, channel: &mut Channel) -> Result<()> {
        self.expect_this_process()?;
        if !self.has_one_side() {
            let holder = match Arc::strong_count(self) {
                1 => "another process",
                _ => "this process",
            };
            return Err(Error::StillHeld {
                name: side.name().into(),
                holders: vec![holder.into()],
            }
            .into());
        }
        let (kind, shape) = (side.kind(), self.shape);
        let (capacity, record) = (shape.capacity, shape.record);
        let text = format!("{kind} {capacity} {record} {}", shape.bytes);
        let link = match &self.parts {
            Parts::Created(parts) => {
                let shared = share_both(parts)?;
                channel.together(|channel| {
                    channel.send_text(&text)?;
                    channel.send(&shared, Access::ReadWrite)?;
                    channel.send_link()
                })
            }
            Parts::Imported(parts) => channel.together(|channel| {
                channel.send_text(&text)?;
                channel.pass_on(parts)?;
                channel.send_link()
            }),
        };
        *lock(&self.peer) = Some(link?);
        Ok(())
    }

    /// Receives a side and maps its ring.
    #[track_caller]
    fn receive(
        driver: &Driver,
        channel: &mut Channel,
        options: ImportOptions,
        wanted: (Side, Option<u64>),
    ) -> Result<Arc<Self>> {
        let sent = read(&channel.receive_text(MAX_TEXT)?)?;
        // All of the message, so that a ring that is refused leaves the channel usable.
        let (offer, link) =
            channel.together(|channel| Ok((channel.receive()?, channel.receive_link()?)))?;
        check(sent, wanted, offer.description(), |place| {
            // The other process of this machine has created it so.
            let options = PhysicalMemory::options(place).handle_types(HandleTypes::POSIX_FD);
            options.granularity_of(driver)
        })?;
        let parts = offer.import_parts(driver, options)?;
        let access = parts.access().to_vec();
        let [counters, records] = [parts.part(0), parts.part(1)];
        if [counters, records].map(PhysicalMemory::backing) != [Backing::Driver; 2] {
            return Err(Error::invalid("ring", "it is not memory of the driver").into());
        }
        let constants = PhysicalMemory::options(records.location());
        let constants = constants.recorded_as(AllocPath::ShapeChunk, None, Site::here());
        let constants = constants.create(driver, counters.size().padded())?;
        let parts = Parts::Imported(parts);
        let memory = Self::map(driver, parts, (Some(constants), &access), sent.1)?;
        *lock(&memory.peer) = Some(link);
        Ok(Arc::new(memory))
    }
}

/// Returns both parts to be sent.
fn share_both(parts: &[Arc<PhysicalMemory>; 2]) -> Result<Shared> {
    let types = parts[0].props().handle_types;
    if !types.contains(HandleTypes::POSIX_FD) {
        let why = "it was created without `shareable`";
        return Err(Error::invalid("ring", why).into());
    }
    share(
        &parts
            .each_ref()
            .map(|part| SharedPart::new(Arc::clone(part))),
    )
}

/// Defines how the other side of `$side` is sent, and how `$side` is received.
macro_rules! shared_side {
    ($cpu:ident, $gpu:ident, $send:ident, $own:ident: $which:literal, $other:ident: $others:literal, $counter:ident, $own_count:ident, $count:ident) => {
        impl<T> $cpu<T> {
            #[doc = concat!("Sends the ", $others, "'s side, which nobody has, to another process, which receives it by")]
            #[doc = concat!("[`", stringify!($other), "::receive`].")]
            ///
            /// The ring was created with [`shareable`](crate::ring::RingOptions::shareable), or came from another process, and
            /// the side was dropped here, or its process has ended or dropped it ([`is_alone`](Self::is_alone)): the next one
            /// goes on where its counter is. Of a side that a kernel had, the caller first waits for the end of the process
            /// itself (`waitpid`, a pidfd): until then its kernel may still run.
            ///
            /// # Errors
            /// [`StillHeld`](Error::StillHeld) while the side is held; [`CursorDamaged`](Error::CursorDamaged) if its counter has
            /// a value that it cannot have; [`InvalidArgument`](Error::InvalidArgument) for a ring that is not shareable;
            /// nothing is sent then. Those of [`Channel::send`]; the channel is closed then, and nobody has the side.
            pub fn $send(&mut self, channel: &mut Channel) -> Result<()> {
                // Of a ring in a GPU's memory the kernels check the counters.
                if self.memory.is_cpus() {
                    self.$count()?;
                    // Something else may have changed it.
                    self.memory.counter($counter)?.store(self.$own_count, Release);
                }
                self.memory.send(Side::$other, channel)
            }
        }
        impl<T> $gpu<T> {
            #[doc = concat!("Sends the ", $others, "'s side to another process, as [`", stringify!($cpu), "::", stringify!($send), "`]")]
            /// does. Kernels may use this side meanwhile.
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($cpu), "::", stringify!($send), "`].")]
            pub fn $send(&mut self, channel: &mut Channel) -> Result<()> {
                self.memory.send(Side::$other, channel)
            }
        }

        impl<T: AnyBitPattern + NoUninit> $cpu<T> {
            #[doc = concat!("Waits for a ", $which, "'s side from another process, and maps the ring. The options say which GPUs")]
            /// may use it.
            ///
            /// # Errors
            /// The channel's: after a timeout the caller may retry if nothing had arrived, and the channel is closed
            /// otherwise; [`InvalidArgument`](Error::InvalidArgument) for another kind of message, for the other side, for
            /// records of another size and for a ring that cannot be; those of [`ImportOptions::import`] and of creating a
            /// ring; [`CursorDamaged`](Error::CursorDamaged). The sender's side is alone then.
            #[track_caller]
            pub fn receive(driver: &Driver, channel: &mut Channel, options: ImportOptions) -> Result<Self> {
                let record = Some(size_of::<T>() as u64);
                Ok(Self::resume(RingMemory::receive(driver, channel, options, (Side::$own, record))?)?)
            }
        }
        impl $cpu<Untyped> {
            #[doc = concat!("Waits for a ", $which, "'s side with records of any size.")]
            ///
            /// # Errors
            /// As for records of a type.
            #[track_caller]
            pub fn receive_untyped(driver: &Driver, channel: &mut Channel, options: ImportOptions) -> Result<Self> {
                Ok(Self::resume(RingMemory::receive(driver, channel, options, (Side::$own, None))?)?)
            }
        }
    };
}

shared_side!(Producer, GpuProducer, share_consumer, Producer: "producer", Consumer: "consumer", HEAD, head, room);
shared_side!(Consumer, GpuConsumer, share_producer, Consumer: "consumer", Producer: "producer", TAIL, tail, ready);

/// One of a ring's sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Producer,
    Consumer,
}

impl Side {
    /// Returns the beginning of the text: the kind of message, its version, and the side.
    const fn kind(self) -> &'static str {
        match self {
            Self::Producer => "egmem-ring 1 producer",
            Self::Consumer => "egmem-ring 1 consumer",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Producer => "the producer's side of a ring",
            Self::Consumer => "the consumer's side of a ring",
        }
    }
}

/// The most bytes of the text before the memory: the side, and the shape of its ring.
const MAX_TEXT: usize = 128;

/// Reads a text of another process.
///
/// # Errors
/// [`Error::InvalidArgument`] for another kind of text.
fn read(text: &str) -> egmem_core::Result<(Side, Shape)> {
    let shape = |side: Side| {
        let [capacity, record, bytes] = numbers(side.kind(), text)?;
        let shape = Shape {
            capacity,
            record,
            bytes,
        };
        Some((side, shape))
    };
    let found = shape(Side::Producer).or_else(|| shape(Side::Consumer));
    found.ok_or_else(|| refused("the other process sent another kind of text"))
}

/// Checks what another process says about a ring, all of it before any of its memory is imported.
///
/// # Errors
/// [`Error::InvalidArgument`] for the other side, for records of another size than `record`, for a shape that no ring
/// has, and for memory that is not the shape's. Those of `granularity`, which tells that of a location.
fn check(
    (found, shape): (Side, Shape),
    (side, record): (Side, Option<u64>),
    memory: &Description,
    granularity: impl FnOnce(Location) -> egmem_core::Result<Granularity>,
) -> egmem_core::Result<()> {
    if found != side {
        return Err(refused(format!("it is {}", found.name())));
    }
    let (records, bytes) = (shape.capacity, shape.record);
    if let Some(wanted) = record.filter(|&wanted| wanted != bytes) {
        let why = format!("records of {bytes} bytes");
        return Err(Error::invalid_of("ring", why, format!("{wanted} bytes")));
    }
    let place = memory
        .parts
        .first()
        .map_or(Location::Host, |part| part.location);
    let granule = granularity(place)?.bytes();
    let capacity = usize::try_from(records).map_err(|_| refused(format!("{records} records")))?;
    if Shape::new(Some(capacity), bytes, granule)? != shape {
        let all = shape.bytes;
        let why = format!("{records} records of {bytes} bytes do not have {all} bytes");
        return Err(refused(why));
    }
    let sizes: Vec<u64> = memory.parts.iter().map(|part| part.bytes).collect();
    if sizes != [granule, shape.bytes] {
        return Err(refused(format!("its memory has parts of {sizes:?} bytes")));
    }
    Ok(())
}

fn refused(why: impl Into<String>) -> Error {
    Error::invalid("ring", why.into())
}

#[cfg(test)]
mod tests {
    use egmem_core::Machine;

    use super::*;

    /// No driver with another granularity than 2 MiB was measured.
    #[test]
    fn the_parts_have_the_driver_s_granularity() {
        const MIB: u64 = 1 << 20;
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let options = PhysicalMemory::options(Location::HostNuma(0));
        let options = options.handle_types(HandleTypes::POSIX_FD);
        let parts = [4 * MIB, 8 * MIB].map(|bytes| options.clone().create(&driver, bytes).unwrap());
        let shared = Shared::from_physical(parts.into(), 12 * MIB).unwrap();
        let shape = Shape::new(Some(1_000_000), 8, 4 * MIB).unwrap();
        let check_with = |granule| {
            let (sent, wanted) = ((Side::Producer, shape), (Side::Producer, Some(8)));
            check(
                sent,
                wanted,
                &shared.describe(Access::ReadWrite).unwrap(),
                |_| Granularity::new(granule),
            )
        };
        assert_eq!(check_with(4 * MIB), Ok(()));
        assert!(check_with(2 * MIB).is_err());
    }
}
