//! Parses and formats sizes and durations of configuration files: `"16GiB"`, `"500ms"`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de};

use crate::size::Bytes;
use crate::{Error, Result};

/// The units of time, and their milliseconds.
const UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1000), ("min", 60_000), ("h", 3_600_000)];

/// Parses `500ms`, `2s`, `5min`, `1h`: whole numbers.
pub(super) fn parse_duration(text: &str) -> Result<Duration> {
    let bad = |why: &str| Error::invalid("duration", format!("'{text}': {why}"));
    let trimmed = text.trim();
    let split = trimmed
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let number: u64 = number
        .parse()
        .map_err(|_| bad("a whole number and a unit are expected"))?;
    let unit = unit.trim();
    let (_, ms) = UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(|| bad("the unit must be ms, s, min or h"))?;
    number
        .checked_mul(*ms)
        .map(Duration::from_millis)
        .ok_or_else(|| bad("more milliseconds than 64 bits hold"))
}

/// Formats a duration in the largest unit that divides it.
fn duration_text(duration: Duration) -> String {
    let ms = duration.as_millis() as u64;
    let (unit, size) = UNITS
        .iter()
        .rev()
        .find(|(_, size)| ms >= *size && ms.is_multiple_of(*size))
        .unwrap_or(&UNITS[0]);
    format!("{}{unit}", ms / size)
}

/// For `#[serde(with)]`: a duration.
pub(super) mod duration {
    use super::*;

    pub fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&duration_text(*value))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        parse_duration(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

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
        fn what_is_written_reads_back(ms in 0_u64..1 << 50, size in any::<u64>(), shift in 0_u32..64) {
            let duration = Duration::from_millis(ms);
            prop_assert_eq!(parse_duration(&duration_text(duration)).unwrap(), duration);
            let size = size >> shift << (shift / 2);
            prop_assert_eq!(bytes_text(size).parse::<Bytes>().unwrap().0, size);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[-0-9a-z. ]{0,24}") {
            let _ = parse_duration(&text);
        }
    }

    #[test]
    fn durations_have_units() {
        for (text, ms) in [
            ("500ms", 500),
            ("2s", 2000),
            (" 5 min", 300_000),
            ("1h", 3_600_000),
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(ms));
        }
        for text in ["", "2", "s", "-1s", "1.5s", "1d", "99999999999999999h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
