//! The bytes that requests, names and events take.

use super::{ENTRY, REQUEST};
use crate::PeerList;
use crate::protocol::{Ask, Create, Event};
use crate::share::{Description, Part};

/// A part of a memory, with its handle, decoded and encoded.
const PART: usize = size_of::<Part>() + 512;

/// Returns the bytes of a memory's description and its handles.
pub(crate) fn memory(description: &Description) -> usize {
    ENTRY + description.parts.len() * PART
}

/// Returns the bytes of a name that was created for a peer: its entry, its access list and its memory's
/// description.
pub(crate) fn name(who: &PeerList, description: &Description) -> usize {
    REQUEST + who.bytes() + memory(description)
}

/// Returns the bytes that a request takes while it is answered.
pub(crate) fn request(ask: &Ask) -> usize {
    match ask {
        Ask::Create(ask) => create(ask),
        // Names are short, and so are lists of handle types.
        _ => REQUEST,
    }
}

/// Returns the bytes of a request for new memory.
pub(crate) fn create(ask: &Create) -> usize {
    REQUEST + ask.peers.capacity()
}

/// Returns the bytes of an event in a queue.
pub(crate) fn event(event: &Event) -> usize {
    ENTRY
        + size_of::<Event>()
        + match event {
            Event::Ended(ended) => ENTRY + ended.why.reason.len() + ended.why.detail.len(),
            Event::Published(entry) => entry.name.len() + memory(&entry.memory),
            Event::Gone(gone) => gone.name.len(),
            Event::Dismissed(why) => why.reason.len() + why.detail.len(),
            Event::Withdrawing(_) | Event::Closing(_) => 0,
        }
}
