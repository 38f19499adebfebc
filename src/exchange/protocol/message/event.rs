//! Messages to a client after the greeting: answers and notices.

use serde::{Deserialize, Serialize};

use super::{Entry, Refused, Reply};
use crate::protocol::choice::choice;
use crate::protocol::sanitize;

/// A message to a client after the greeting: a reply has an `id`, a notice has none.
#[derive(Clone, Debug, PartialEq)]
pub enum FromServer {
    /// An answer.
    Reply(Reply),
    /// An event.
    Notice(Notice),
}

/// An unsolicited message of the server; `None` if this version does not know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Notice(pub Option<Event>);

choice! {
    /// See [`Notice`].
    #[derive(Clone, Debug, PartialEq)]
    #[non_exhaustive]
    pub enum Event {
        /// The exporter recalls memory: unmap and release it by then.
        "withdrawing" => Withdrawing(Withdrawing),
        /// The server has ended a lease.
        "ended" => Ended(Ended),
        /// A watched name exists, or has other memory than before.
        "published" => Published(Entry),
        /// A watched name is gone.
        "gone" => Gone(Gone),
        /// The server is about to end.
        "closing" => Closing(Closing),
        /// Ranks of a group are gone without having left.
        "lost" => Lost(Lost),
        /// The server has ended the session: it cannot be resumed, and the connection ends.
        "dismissed" => Dismissed(Refused),
    }
}

/// See [`Event::Withdrawing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withdrawing {
    /// The lease.
    pub lease: u64,
    /// In how many milliseconds.
    pub ms: u64,
}

/// See [`Event::Ended`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// The lease.
    pub lease: u64,
    /// The reason.
    pub why: Refused,
}

/// See [`Event::Gone`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gone {
    /// The name.
    #[serde(deserialize_with = "sanitize::name")]
    pub name: String,
}

/// See [`Event::Closing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closing {
    /// In how many milliseconds.
    pub ms: u64,
}

/// See [`Event::Lost`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// The group.
    #[serde(deserialize_with = "sanitize::name")]
    pub group: String,
    /// The round from [`Agreed`](super::Agreed).
    pub round: u64,
    /// The ranks.
    pub ranks: Vec<u32>,
}
