//! A number of bytes, displayed in binary units.

use std::fmt;

/// Bytes, displayed in the largest binary unit that keeps the number short: `1.5 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let exponent = (63 - self.0.leading_zeros()) as usize / 10;
        let unit = 1_u64 << (10 * exponent);
        if self.0.is_multiple_of(unit) {
            write!(f, "{} {}", self.0 / unit, UNITS[exponent - 1])
        } else {
            write!(
                f,
                "{:.2} {}",
                self.0 as f64 / unit as f64,
                UNITS[exponent - 1]
            )
        }
    }
}
