//! The form of names.

use super::MAX_NAME;
use crate::{Error, Result};

/// For messages; a test compares it with MAX_NAME.
const VALID: &str = "1 to 255 of A–Z a–z 0–9 . _ - / :";

/// Checks a name of memory: 1 to [`MAX_NAME`] bytes of `A–Z a–z 0–9 . _ - / :`.
///
/// ```
/// use egmem::exchange::protocol::check_name;
///
/// assert!(check_name("job-7/rank:0").is_ok());
/// assert!(check_name("").is_err());
/// assert!(check_name("a b").is_err());
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) with the fault, without the name.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::invalid_of("name", "it is empty", VALID));
    }
    check_prefix(name)
}

/// Checks a prefix of names: as [`check_name`], but it may be empty.
///
/// # Errors
/// As [`check_name`].
pub fn check_prefix(prefix: &str) -> Result<()> {
    if prefix.len() > MAX_NAME {
        let why = format!("it has {} bytes", prefix.len());
        return Err(Error::invalid_of("name", why, VALID));
    }
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:".contains(&byte);
    match prefix.bytes().position(|byte| !good(byte)) {
        Some(at) => {
            let why = format!("byte {at} may not be in a name");
            Err(Error::invalid_of("name", why, VALID))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        let longest = "x".repeat(MAX_NAME);
        for good in ["a", "A-Z_a.z/0:9", longest.as_str()] {
            check_name(good).unwrap();
        }
        let long = "x".repeat(MAX_NAME + 1);
        for bad in ["", " ", "a\0", "ä", "a\n", "*", "a,b", long.as_str()] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        check_prefix("").unwrap();
        assert!(check_prefix("a*").is_err());
    }
}
