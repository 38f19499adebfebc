//! Parses and formats sizes of configuration files: `"16GiB"`.

use serde::{Deserialize, Deserializer, Serializer, de};

use crate::size::Bytes;

/// Formats bytes so that they parse back exactly.
fn bytes_text(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    units
        .iter()
        .find(|(_, shift)| bytes != 0 && bytes.is_multiple_of(1_u64 << shift))
        .map_or_else(
            || bytes.to_string(),
            |(unit, shift)| format!("{}{unit}", bytes >> shift),
        )
}

/// For `#[serde(with)]`: a size in bytes.
pub(super) mod bytes {
    use super::*;

    pub fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&bytes_text(*value))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map(|Bytes(bytes)| bytes)
            .map_err(de::Error::custom)
    }
}

/// For `#[serde(with)]`: a size in bytes that may be left out.
pub(super) mod maybe_bytes {
    use super::*;

    pub fn serialize<S: Serializer>(value: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => super::bytes::serialize(value, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<u64>, D::Error> {
        super::bytes::deserialize(deserializer).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_reads_back(size in any::<u64>(), shift in 0_u32..64) {
            let size = size >> shift << (shift / 2);
            prop_assert_eq!(bytes_text(size).parse::<Bytes>().unwrap().0, size);
        }
    }
}
