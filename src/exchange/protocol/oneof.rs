//! Choices as maps with exactly one known key.

use std::fmt;

use serde::de::{self, IgnoredAny, MapAccess};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::message::*;

/// A choice's entry in a map.
trait Choice: Sized {
    /// Writes the entry.
    fn put<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;

    /// Reads the value under `key`; `None`, with nothing read, if the key is none of these.
    fn take<'de, M: MapAccess<'de>>(key: &str, map: &mut M) -> Option<Result<Self, M::Error>>;
}

macro_rules! choice {
    ($name:ident { $($key:literal => $variant:ident),* $(,)? }) => {
        impl Choice for $name {
            fn put<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
                match self {
                    $(Self::$variant(body) => map.serialize_entry($key, body),)*
                }
            }

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

/// No choice of this kind.
enum Never {}

impl Choice for Never {
    fn put<M: SerializeMap>(&self, _: &mut M) -> Result<(), M::Error> {
        match *self {}
    }

    fn take<'de, M: MapAccess<'de>>(_: &str, _: &mut M) -> Option<Result<Self, M::Error>> {
        None
    }
}

/// A map with an `id`, a choice of `A` and a choice of `B`, each of which may be missing.
struct Envelope<A, B> {
    id: Option<u64>,
    first: Option<A>,
    second: Option<B>,
}

impl<'de, A: Choice, B: Choice> Deserialize<'de> for Envelope<A, B> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<A, B>(std::marker::PhantomData<(A, B)>);
        impl<'de, A: Choice, B: Choice> de::Visitor<'de> for Visitor<A, B> {
            type Value = Envelope<A, B>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map with text keys")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut found = Envelope {
                    id: None,
                    first: None,
                    second: None,
                };
                while let Some(key) = map.next_key::<String>()? {
                    if key == "id" {
                        if found.id.replace(map.next_value()?).is_some() {
                            return Err(de::Error::duplicate_field("id"));
                        }
                        continue;
                    }
                    if let Some(value) = A::take(&key, &mut map) {
                        found.only_one()?;
                        found.first = Some(value?);
                    } else if let Some(value) = B::take(&key, &mut map) {
                        found.only_one()?;
                        found.second = Some(value?);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(found)
            }
        }
        deserializer.deserialize_map(Visitor(std::marker::PhantomData))
    }
}

impl<A, B> Envelope<A, B> {
    fn only_one<E: de::Error>(&self) -> Result<(), E> {
        if self.first.is_some() || self.second.is_some() {
            return Err(de::Error::custom("two choices in one message"));
        }
        Ok(())
    }
}

fn write<S: Serializer, C: Choice>(
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
        let found = Envelope::<Self, Never>::deserialize(deserializer)?;
        found
            .first
            .ok_or_else(|| de::Error::custom("neither welcome nor refused"))
    }
}

impl Serialize for Request {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write(serializer, Some(self.id), self.ask.as_ref())
    }
}

impl<'de> Deserialize<'de> for Request {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let found = Envelope::<Ask, Never>::deserialize(deserializer)?;
        let id = found.id.ok_or_else(|| de::Error::missing_field("id"))?;
        Ok(Self {
            id,
            ask: found.first,
        })
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

impl<'de> Deserialize<'de> for Notice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match FromServer::deserialize(deserializer)? {
            FromServer::Notice(notice) => Ok(notice),
            FromServer::Reply(_) => Err(de::Error::custom("an event with an id")),
        }
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
        let found = Envelope::<Answer, Event>::deserialize(deserializer)?;
        match (found.id, found.first, found.second) {
            (Some(id), answer, None) => Ok(Self::Reply(Reply { id, answer })),
            (None, None, event) => Ok(Self::Notice(Notice(event))),
            (Some(_), ..) => Err(de::Error::custom("an event with an id")),
            (None, ..) => Err(de::Error::missing_field("id")),
        }
    }
}
