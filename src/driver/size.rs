//! Sizes: a granularity, and a size that is rounded up to it once and then carried everywhere.

use serde::{Deserialize, Serialize};

pub use crate::text::Bytes;
use crate::{Error, Result};

/// The unit in which the driver creates and maps physical memory, in bytes: a power of two.
///
/// Source: `cuMemGetAllocationGranularity`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Granularity(u64);

impl Granularity {
    /// The 2 MiB that every driver measured so far reports.
    pub const TWO_MIB: Self = Self(2 << 20);

    /// Returns a granularity of `bytes`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless `bytes` is a power of two.
    pub fn new(bytes: u64) -> Result<Self> {
        if bytes.is_power_of_two() {
            Ok(Self(bytes))
        } else {
            let why = format!("{bytes} bytes is not a power of two");
            Err(Error::invalid("granularity", why))
        }
    }

    /// Returns the granularity in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Returns `bytes` in whole units, rounded down.
    pub const fn round_down(self, bytes: u64) -> u64 {
        bytes & !(self.0 - 1)
    }

    /// Returns whether `bytes` is a whole number of units.
    pub const fn divides(self, bytes: u64) -> bool {
        bytes & (self.0 - 1) == 0
    }
}

impl TryFrom<u64> for Granularity {
    type Error = Error;
    fn try_from(bytes: u64) -> Result<Self> {
        Self::new(bytes)
    }
}

impl From<Granularity> for u64 {
    fn from(granularity: Granularity) -> u64 {
        granularity.0
    }
}

/// Checks that an allocation has bytes.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 bytes.
pub fn not_empty(bytes: u64) -> Result<()> {
    if bytes > 0 {
        return Ok(());
    }
    let why = "0 bytes cannot be allocated";
    Err(Error::invalid_of("size", why, "1 byte or more"))
}

/// A requested size, and the same size rounded up to a granularity.
///
/// Physical memory, reservation and mapping must agree on the padded size exactly, so it is computed once,
/// here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PaddedSize {
    requested: u64,
    padded: u64,
}

impl PaddedSize {
    /// Rounds `requested` bytes up to `granularity`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `requested` is 0 or the padded size does not fit `isize`.
    pub fn new(requested: u64, granularity: Granularity) -> Result<Self> {
        not_empty(requested)?;
        let rest = granularity.bytes() - 1;
        match requested
            .checked_add(rest)
            .map(|sum| granularity.round_down(sum))
        {
            Some(padded) if padded <= isize::MAX as u64 => Ok(Self { requested, padded }),
            _ => {
                let why = format!("{requested} bytes is more than an address space holds");
                Err(Error::invalid("size", why))
            }
        }
    }

    /// Returns the bytes requested: at least 1.
    pub const fn requested(self) -> u64 {
        self.requested
    }

    /// Returns the bytes allocated: a multiple of the granularity.
    pub const fn padded(self) -> u64 {
        self.padded
    }
}

impl std::str::FromStr for Bytes {
    type Err = Error;

    /// Parses `4096`, `64KiB`, `1.5 GiB`, `2G`: binary units, case ignored.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::invalid("size", format!("'{text}': {why}"));
        let text_trimmed = text.trim();
        let split = text_trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(text_trimmed.len());
        let (number, unit) = text_trimmed.split_at(split);
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            "t" | "tib" => 40,
            _ => return Err(bad("the unit must be B, KiB, MiB, GiB or TiB")),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole
                .checked_mul(1 << shift)
                .map(Self)
                .ok_or_else(|| bad("more than 64 bits hold"));
        }
        let value: f64 = number.parse().map_err(|_| bad("not a number"))?;
        let bytes = value * (1_u64 << shift) as f64;
        if bytes.is_finite() && (0.0..u64::MAX as f64).contains(&bytes) {
            Ok(Self(bytes as u64))
        } else {
            Err(bad("more than 64 bits hold"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn padding_is_the_least_multiple_that_holds_the_request(
            requested in 1_u64..1 << 50,
            shift in 0_u32..31,
        ) {
            let granularity = Granularity::new(1 << shift).unwrap();
            let size = PaddedSize::new(requested, granularity).unwrap();
            prop_assert!(granularity.divides(size.padded()));
            prop_assert!(size.padded() >= requested);
            prop_assert!(size.padded() - requested < granularity.bytes());
        }

        #[test]
        fn displayed_bytes_read_back_to_within_the_digits_shown(bytes in 0_u64..1 << 50) {
            let read: Bytes = Bytes(bytes).to_string().parse().unwrap();
            let error = read.0.abs_diff(bytes) as f64;
            prop_assert!(error <= 0.005 * bytes as f64 + 1.0, "{bytes} read back as {}", read.0);
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(PaddedSize::new(0, Granularity::TWO_MIB).is_err());
        assert!(PaddedSize::new(u64::MAX, Granularity::TWO_MIB).is_err());
        assert!(PaddedSize::new(isize::MAX as u64, Granularity::TWO_MIB).is_err());
        assert!(Granularity::new(0).is_err());
        assert!(Granularity::new(3 << 20).is_err());
    }

    #[test]
    fn sizes_are_read_in_binary_units() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64KiB", 65536),
            ("1.5 GiB", 3 << 29),
            ("2G", 2 << 30),
        ] {
            assert_eq!(text.parse::<Bytes>().unwrap().0, bytes, "{text}");
        }
        for text in ["", "GiB", "1 XB", "99999999 TiB", "-1"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }
}
