//! Messages to a client after the greeting: answers and notices.

use std::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Answer, Entry, Refused};
use crate::protocol::sanitize;

/// A message to a client after the greeting: `[id, answer]` or `[null, event]`.
#[derive(Clone, Debug, PartialEq)]
pub enum FromServer {
    /// The answer to the request with this id.
    Reply(u64, Answer),
    /// An event.
    Event(Event),
}

impl Serialize for FromServer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Reply(id, answer) => (id, answer).serialize(serializer),
            Self::Event(event) => ((), event).serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for FromServer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pair;
        impl<'de> Visitor<'de> for Pair {
            type Value = FromServer;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an id or null, and a message")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<FromServer, A::Error> {
                let id = pair.next_element::<Option<u64>>()?;
                let message = match id.flatten() {
                    Some(id) => pair
                        .next_element()?
                        .map(|answer| FromServer::Reply(id, answer)),
                    None => pair.next_element()?.map(FromServer::Event),
                };
                message.ok_or_else(|| A::Error::invalid_length(1, &self))
            }
        }
        deserializer.deserialize_tuple(2, Pair)
    }
}

/// An unsolicited message of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The exporter recalls memory: unmap and release it by then.
    Withdrawing(Withdrawing),
    /// The server has ended a lease.
    Ended(Ended),
    /// A watched name exists, or has other memory than before.
    Published(Entry),
    /// A watched name is gone.
    Gone(Gone),
    /// The server is about to end.
    Closing(Closing),
    /// The server has ended the session: it cannot be resumed, and the connection ends.
    Dismissed(Refused),
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
