//! Choices as maps with exactly one known key.

use std::fmt;

use serde::de::{self, IgnoredAny, MapAccess};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::message::*;

/// Writes a choice's entry in a map.
trait Put {
    fn put<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
}

/// Reads the value under `key`; `None`, with nothing read, if the key is none of the choice's.
trait Take: Sized {
    fn take<'de, M: MapAccess<'de>>(key: &str, map: &mut M) -> Option<Result<Self, M::Error>>;
}

macro_rules! choice {
    ($name:ident { $($key:literal => $variant:ident),* $(,)? }) => {
        impl Put for $name {
            fn put<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
                match self {
                    $(Self::$variant(body) => map.serialize_entry($key, body),)*
                }
            }
        }

        impl Take for $name {
            fn take<'de, M: MapAccess<'de>>(key: &str, map: &mut M) -> Option<Result<Self, M::Error>> {
                match key {
                    $($key => Some(map.next_value().map(Self::$variant)),)*
                    _ => None,
                }
            }
        }
    };
}

choice!(Greeting { "welcome" => Welcome, "refused" => Refused });
choice!(Ask {
    "ping" => Ping,
    "list" => List,
    "wait" => Wait,
    "fetch" => Fetch,
    "redeem" => Redeem,
    "release" => Release,
    "probe" => Probe,
    "watch" => Watch,
    "create" => Create,
    "delete" => Delete,
    "join" => Join,
    "offer" => Offer,
    "gather" => Gather,
    "leave" => Leave,
});
choice!(Answer {
    "done" => Done,
    "refused" => Refused,
    "names" => Names,
    "granted" => Granted,
    "fds" => Fds,
    "probed" => Probed,
    "agreed" => Agreed,
    "members" => Members,
    "incomplete" => Incomplete,
});
choice!(Event {
    "withdrawing" => Withdrawing,
    "ended" => Ended,
    "published" => Published,
    "gone" => Gone,
    "closing" => Closing,
    "lost" => Lost,
    "dismissed" => Dismissed,
});

/// What a server sends.
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

/// A map with an `id` and a choice, each of which may be missing.
struct Envelope<C> {
    id: Option<u64>,
    choice: Option<C>,
}

impl<'de, C: Take> Deserialize<'de> for Envelope<C> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<C>(std::marker::PhantomData<C>);
        impl<'de, C: Take> de::Visitor<'de> for Visitor<C> {
            type Value = Envelope<C>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map with text keys")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let (mut id, mut choice) = (None, None);
                while let Some(key) = map.next_key::<String>()? {
                    if key == "id" {
                        if id.replace(map.next_value()?).is_some() {
                            return Err(de::Error::duplicate_field("id"));
                        }
                    } else if let Some(value) = C::take(&key, &mut map) {
                        if choice.replace(value?).is_some() {
                            return Err(de::Error::custom("two choices in one message"));
                        }
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Envelope { id, choice })
            }
        }
        deserializer.deserialize_map(Visitor(std::marker::PhantomData))
    }
}

fn write<S: Serializer, C: Put>(
    serializer: S,
    id: Option<u64>,
    choice: Option<&C>,
) -> Result<S::Ok, S::Error> {
    let entries = usize::from(id.is_some()) + usize::from(choice.is_some());
    let mut map = serializer.serialize_map(Some(entries))?;
    if let Some(id) = id {
        map.serialize_entry("id", &id)?;
    }
    if let Some(choice) = choice {
        choice.put(&mut map)?;
    }
    map.end()
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
