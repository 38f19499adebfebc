//! Choices as maps with exactly one known key.

use std::fmt;

use serde::de::{self, IgnoredAny, MapAccess};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serializer};

/// Writes a choice's entry in a map.
pub(super) trait Put {
    fn put<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
}

/// Reads the value under `key`; `None`, with nothing read, if the key is none of the choice's.
pub(super) trait Take: Sized {
    fn take<'de, M: MapAccess<'de>>(key: &str, map: &mut M) -> Option<Result<Self, M::Error>>;
}

/// Defines an enumeration whose variants are entries of a map, each under its key.
macro_rules! choice {
    ($(#[$meta:meta])* pub enum $name:ident {
        $($(#[$about:meta])* $key:literal => $variant:ident($body:ty),)*
    }) => {
        $(#[$meta])*
        pub enum $name {
            $($(#[$about])* $variant($body),)*
        }

        impl $crate::protocol::choice::Put for $name {
            fn put<M: serde::ser::SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
                match self {
                    $(Self::$variant(body) => map.serialize_entry($key, body),)*
                }
            }
        }

        impl $crate::protocol::choice::Take for $name {
            fn take<'de, M: serde::de::MapAccess<'de>>(
                key: &str,
                map: &mut M,
            ) -> Option<Result<Self, M::Error>> {
                match key {
                    $($key => Some(map.next_value().map(Self::$variant)),)*
                    _ => None,
                }
            }
        }
    };
}
pub(super) use choice;

/// A map with an `id` and a choice, each of which may be missing.
pub(super) struct Envelope<C> {
    pub id: Option<u64>,
    pub choice: Option<C>,
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

/// Writes such a map.
pub(super) fn write<S: Serializer, C: Put>(
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
