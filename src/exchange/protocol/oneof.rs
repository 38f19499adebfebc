//! The whole messages: maps with an id, a choice, or both.

use serde::de::{self, MapAccess};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::choice::{Envelope, Take, write};
use super::message::*;

/// A choice in a server's message.
enum Sent {
    Answer(Answer),
    Event(Event),
}

impl Take for Sent {
    fn take<'de, M: MapAccess<'de>>(key: &str, map: &mut M) -> Option<Result<Self, M::Error>> {
        match Answer::take(key, map) {
            Some(answer) => Some(answer.map(Self::Answer)),
            None => Event::take(key, map).map(|event| event.map(Self::Event)),
        }
    }
}

impl Serialize for Greeting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write(serializer, None, Some(self))
    }
}

impl<'de> Deserialize<'de> for Greeting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let found = Envelope::<Self>::deserialize(deserializer)?.choice;
        found.ok_or_else(|| de::Error::custom("neither welcome nor refused"))
    }
}

impl Serialize for Request {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write(serializer, Some(self.id), self.ask.as_ref())
    }
}

impl<'de> Deserialize<'de> for Request {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Envelope { id, choice: ask } = Envelope::deserialize(deserializer)?;
        let id = id.ok_or_else(|| de::Error::missing_field("id"))?;
        Ok(Self { id, ask })
    }
}

impl Serialize for Reply {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write(serializer, Some(self.id), self.answer.as_ref())
    }
}

impl<'de> Deserialize<'de> for Reply {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match FromServer::deserialize(deserializer)? {
            FromServer::Reply(reply) => Ok(reply),
            FromServer::Notice(_) => Err(de::Error::missing_field("id")),
        }
    }
}

impl Serialize for Notice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write(serializer, None, self.0.as_ref())
    }
}

impl Serialize for FromServer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Reply(reply) => reply.serialize(serializer),
            Self::Notice(notice) => notice.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for FromServer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Envelope { id, choice } = Envelope::deserialize(deserializer)?;
        match (id, choice) {
            (Some(id), None) => Ok(Self::Reply(Reply { id, answer: None })),
            (Some(id), Some(Sent::Answer(answer))) => {
                let answer = Some(answer);
                Ok(Self::Reply(Reply { id, answer }))
            }
            (None, None) => Ok(Self::Notice(Notice(None))),
            (None, Some(Sent::Event(event))) => Ok(Self::Notice(Notice(Some(event)))),
            (Some(_), Some(Sent::Event(_))) => Err(de::Error::custom("an event with an id")),
            (None, Some(Sent::Answer(_))) => Err(de::Error::missing_field("id")),
        }
    }
}
