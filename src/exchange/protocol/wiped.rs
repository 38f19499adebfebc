//! Bytes of a limited length that are wiped when dropped.

/// Defines a type of at most `$max` bytes, which are a byte string on the wire.
macro_rules! wiped_bytes {
    ($(#[$attribute:meta])* $name:ident, at most $max:ident) => {
        $(#[$attribute])*
        pub struct $name(zeroize::Zeroizing<Vec<u8>>);

        impl $name {
            #[doc = concat!("Returns the value with these bytes; `None` for more than [`", stringify!($max), "`].")]
            pub fn new(bytes: &[u8]) -> Option<Self> {
                (bytes.len() <= $max).then(|| Self(zeroize::Zeroizing::new(bytes.to_vec())))
            }

            /// Returns the bytes.
            pub fn expose(&self) -> &[u8] {
                &self.0
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_bytes(&self.0)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Visitor;
                impl serde::de::Visitor<'_> for Visitor {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        write!(f, "at most {} bytes", $max)
                    }

                    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<$name, E> {
                        $name::new(bytes).ok_or_else(|| E::invalid_length(bytes.len(), &self))
                    }
                }
                deserializer.deserialize_bytes(Visitor)
            }
        }
    };
}
pub(super) use wiped_bytes;
