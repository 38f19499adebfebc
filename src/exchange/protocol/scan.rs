//! Checks that bytes are one item of this protocol's CBOR, before anything is built from them.
//!
//! A decoder that trusts a header allocates the length that it claims and recurses as deep as it says. This walk does
//! neither, and afterwards every count is known to fit in the bytes present.

/// The deepest nesting of arrays and maps.
pub(super) const DEPTH: usize = 16;

/// Why bytes are not a message, and where.
pub(super) type Fault = (usize, &'static str);

/// Checks that `bytes` are exactly one well-formed item (RFC 8949) of definite lengths, without
/// tags, nested at most [`DEPTH`] deep.
pub(super) fn scan(bytes: &[u8]) -> Result<(), Fault> {
    // How many items remain at each level.
    let mut open = [0_u64; DEPTH + 1];
    open[0] = 1;
    let mut level = 0;
    let mut at = 0;
    loop {
        while open[level] == 0 {
            if level == 0 {
                return if at == bytes.len() {
                    Ok(())
                } else {
                    Err((at, "bytes after the message"))
                };
            }
            level -= 1;
        }
        open[level] -= 1;
        let start = at;
        let (major, value) = head(bytes, &mut at)?;
        let left = (bytes.len() - at) as u64;
        let items = match major {
            0 | 1 | 7 => continue,
            2 | 3 if value <= left => {
                // It fits in `bytes`, so it fits in a usize.
                at += value as usize;
                continue;
            }
            4 => value,
            5 => value.saturating_mul(2),
            6 => return Err((start, "a tag")),
            _ => return Err((start, "a string that is cut off")),
        };
        // Each item takes at least a byte.
        if items > left {
            return Err((start, "fewer items than announced"));
        }
        if level == DEPTH {
            return Err((start, "too deep"));
        }
        level += 1;
        open[level] = items;
    }
}

/// Parses an item's head: its major type and its argument.
fn head(bytes: &[u8], at: &mut usize) -> Result<(u8, u64), Fault> {
    let start = *at;
    let first = *bytes.get(start).ok_or((start, "the message is cut off"))?;
    *at += 1;
    let (major, info) = (first >> 5, first & 0x1f);
    let argument = match info {
        0..24 => return kind(major, info, u64::from(info), start),
        24..28 => 1 << (info - 24),
        31 => return Err((start, "an indefinite length")),
        _ => return Err((start, "a reserved header")),
    };
    let rest = bytes
        .get(*at..*at + argument)
        .ok_or((start, "the message is cut off"))?;
    *at += argument;
    let value = rest
        .iter()
        .fold(0_u64, |sum, &byte| sum << 8 | u64::from(byte));
    kind(major, info, value, start)
}

/// Of simple values only false, true, null, undefined and floats are valid.
fn kind(major: u8, info: u8, value: u64, start: usize) -> Result<(u8, u64), Fault> {
    if major == 7 && !(20..24).contains(&info) && !(25..28).contains(&info) {
        return Err((start, "an unknown simple value"));
    }
    Ok((major, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_accepted() {
        for item in [
            &b"\x00"[..],
            b"\x18\xff",
            b"\x1b\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x20",
            b"\x40",
            b"\x43abc",
            b"\x63abc",
            b"\x80",
            b"\x82\x01\x02",
            b"\xa1\x61a\x01",
            b"\xa0",
            b"\xf4",
            b"\xf6",
            b"\xf9\x00\x00",
            b"\xfb\x00\x00\x00\x00\x00\x00\x00\x00",
        ] {
            assert_eq!(scan(item), Ok(()), "{item:02x?}");
        }
    }

    #[test]
    fn items_that_lie_about_their_size_are_refused() {
        for (item, why) in [
            (&b""[..], "cut off"),
            (b"\x18", "cut off"),
            (b"\x1b\x00", "cut off"),
            (b"\x00\x00", "after"),
            (b"\x43ab", "cut off"),
            (b"\x5b\xff\xff\xff\xff\xff\xff\xff\xff", "cut off"),
            (b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff", "fewer"),
            (b"\xbb\xff\xff\xff\xff\xff\xff\xff\xff", "fewer"),
            (b"\x82\x01", "fewer"),
            (b"\xa1\x01", "fewer"),
            (b"\x5f\x41a\xff", "indefinite"),
            (b"\x9f\xff", "indefinite"),
            (b"\xff", "indefinite"),
            (b"\xc0\x00", "tag"),
            (b"\x1c", "reserved"),
            (b"\xe0", "simple"),
            (b"\xf8\xff", "simple"),
        ] {
            let (_, said) = scan(item).unwrap_err();
            assert!(said.contains(why), "{item:02x?}: {said}");
        }
    }

    #[test]
    fn nesting_has_a_limit() {
        let nested = |depth: usize| {
            let mut item = vec![0x81; depth];
            item.push(0);
            item
        };
        assert_eq!(scan(&nested(DEPTH)), Ok(()));
        assert_eq!(scan(&nested(DEPTH + 1)), Err((DEPTH, "too deep")));
        assert!(scan(&vec![0x81; 1 << 20]).is_err());
    }
}
