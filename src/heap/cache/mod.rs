//! How a heap's threads cache blocks and hand them to each other: three small primitives. Loom (`ci/loom`) has
//! run small models of each in all orders of events with up to three preemptions, and with the processor's
//! fences: loom does not model `membarrier`. [`Front`] has a heap's inbox and its threads.
//!
//! | | written by | read by | cost of the common case |
//! |---|---|---|---|
//! | [`Biased`] | its owner and its holders | the same | two plain stores, two loads |
//! | [`Reserved`] | the thread inside, most often one visitor | the same | two plain stores, two loads |
//! | [`Inbox`](inbox::Inbox) | any thread pushes | any thread drains all at once | one compare-and-swap for each push |

mod biased;
mod front;
mod inbox;
mod local;
mod magazine;
mod medium;
pub(crate) mod member;
mod reserved;
mod shards;
pub(crate) mod sync;

pub(crate) use self::{
    biased::Biased,
    front::Front,
    local::{Local, Tally},
    magazine::{CacheBound, Magazine},
    medium::{MAX_CACHED, Medium},
    member::{Home, InVain, Member, Members},
    reserved::{Inside, Reserved, Visitor},
    shards::{Own, UNIT},
};
