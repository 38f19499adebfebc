//! Growable vectors in other processes, which follow their growth.
//!
//! ```text
//! exporter:  Growable ─▶ GrowableExport ── send ──┐  how many elements there are, and the new chunks
//!                                                 │  Unix socket (share::Channel)
//! importer:  GrowableView ◀── receive, follow ────┘  one range of addresses, reserved at the start
//! ```
//!
//! The exporter decides when it sends: after it has added elements. An update has the new chunks, each once, and the number of
//! elements; so the importer's addresses never change either. A chunk's handle grants all of the chunk, also the elements that
//! come later, and to write: give it only to peers that may have that. A channel checks the other end
//! ([`Peers`](egmem_share::Peers)); a process that it does not admit gets nothing.

mod export;
mod view;

pub use export::{Follower, GrowableExport};
pub(crate) use export::{SharedPart, share};
pub use view::GrowableView;
