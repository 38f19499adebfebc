//! The bytes that requests, names and events take.

use super::{ENTRY, REQUEST};
use crate::Who;
use crate::protocol::{Admission, Ask, Create, Event, Gather, Join, Operation};
use crate::share::{Description, Part};

/// A part of a memory, with its handle, decoded and encoded.
const PART: usize = size_of::<Part>() + 512;

/// Returns the bytes of a memory's description and its handles.
pub(crate) fn memory(description: &Description) -> usize {
    ENTRY + description.parts.len() * PART
}

/// Returns the bytes of a name that was created for a peer: its entry, its access list and its memory's
/// description.
pub(crate) fn name(who: &Who, description: &Description) -> usize {
    REQUEST + who.patterns().bytes() + memory(description)
}

/// Returns the bytes that a request takes while it is answered.
pub(crate) fn request(ask: &Ask) -> usize {
    match ask {
        Ask::Create(ask) => create(ask),
        Ask::Join(ask) => join(ask),
        Ask::Offer(offer) => REQUEST + offer.fabric.len() * 2 * ENTRY,
        // Names are short, and so are lists of handle types. A rank's contribution to a gather has its own charge.
        _ => REQUEST,
    }
}

/// Returns the bytes of a request for new memory.
pub(crate) fn create(ask: &Create) -> usize {
    REQUEST + ask.peers.bytes()
}

/// Returns the bytes of a rank that joins.
pub(crate) fn join(ask: &Join) -> usize {
    let admitted = match &ask.admission {
        Admission::Peers(peers) => peers.bytes(),
        Admission::Secret(_) => ENTRY,
        Admission::SamePeer => 0,
    };
    let reasons = ask.cannot.iter().map(|why| ENTRY + why.len());
    let reasons: usize = reasons.sum();
    REQUEST + admitted + reasons + ask.memory.as_ref().map_or(0, memory)
}

/// Returns the bytes of a rank that has entered a gather, and of its part of the result: its contribution, plain
/// and encoded.
pub(crate) fn gather(ask: &Gather) -> usize {
    REQUEST
        + match &ask.operation {
            Operation::Barrier => 0,
            Operation::Bytes(bytes) => 2 * bytes.expose().len(),
            Operation::Memory(brought) => {
                // A part includes its handle; handles without parts are refused.
                let handles = brought.fabric.len() * 2 * ENTRY;
                handles.max(brought.memory.as_ref().map_or(0, memory))
            }
        }
}

/// Returns the bytes of an event in a queue.
pub(crate) fn event(event: &Event) -> usize {
    ENTRY
        + size_of::<Event>()
        + match event {
            Event::Ended(ended) => ENTRY + ended.why.reason.len() + ended.why.detail.len(),
            Event::Published(entry) => entry.name.len() + memory(&entry.memory),
            Event::Gone(gone) => gone.name.len(),
            Event::Lost(lost) => lost.group.len() + lost.ranks.len() * size_of::<u32>(),
            Event::Dismissed(why) => why.reason.len() + why.detail.len(),
            Event::Withdrawing(_) | Event::Closing(_) => 0,
        }
}
