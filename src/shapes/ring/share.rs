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
use egmem_share::{Channel, ImportOptions, Result, Shared};

use super::header::{Header, Side};
use super::memory::{HEAD, Parts, RingMemory, TAIL};
use super::{Consumer, GpuConsumer, GpuProducer, Producer, Untyped};
use crate::Error;
use crate::driver::{Access, Driver, HandleTypes};
use crate::ledger::{AllocPath, Site};
use crate::sharing::{SharedPart, share};
use crate::vmm::PhysicalMemory;

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
        let header = Header {
            side,
            shape: self.shape,
        };
        let text = header.to_string();
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
        self.peer.set(link?);
        Ok(())
    }

    /// Receives a side and maps its ring.
    #[track_caller]
    fn receive(
        driver: &Driver,
        channel: &mut Channel,
        options: ImportOptions,
        (side, record): (Side, Option<u64>),
    ) -> Result<Arc<Self>> {
        let header = Header::read(&channel.receive_text(Header::MAX_TEXT)?)?;
        // All of the message, so that a ring that is refused leaves the channel usable.
        let (offer, link) =
            channel.together(|channel| Ok((channel.receive()?, channel.receive_link()?)))?;
        header.check(side, record, offer.description())?;
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
        let memory = Self::map(driver, parts, (Some(constants), &access), header.shape)?;
        memory.peer.set(link);
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
                Self::receive_any(driver, channel, options, Some(size_of::<T>() as u64))
            }
        }
        impl $cpu<Untyped> {
            #[doc = concat!("Waits for a ", $which, "'s side with records of any size.")]
            ///
            /// # Errors
            /// As for records of a type.
            #[track_caller]
            pub fn receive_untyped(driver: &Driver, channel: &mut Channel, options: ImportOptions) -> Result<Self> {
                Self::receive_any(driver, channel, options, None)
            }
        }
        impl<T> $cpu<T> {
            #[track_caller]
            fn receive_any(
                driver: &Driver,
                channel: &mut Channel,
                options: ImportOptions,
                record: Option<u64>,
            ) -> Result<Self> {
                let memory = RingMemory::receive(driver, channel, options, (Side::$own, record))?;
                if memory.is_cpus() {
                    return Ok(Self::resume(memory)?);
                }
                Ok(Self::new(memory, 0, 0))
            }
        }
    };
}

shared_side!(Producer, GpuProducer, share_consumer, Producer: "producer", Consumer: "consumer", HEAD, head, room);
shared_side!(Consumer, GpuConsumer, share_producer, Consumer: "consumer", Producer: "producer", TAIL, tail, ready);
