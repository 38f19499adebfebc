//! SPIFFE ids: `spiffe://trust-domain/path`. Source: the SPIFFE-ID specification, sections 2.1 to 2.4.

/// The prefix of an id.
pub(super) const SCHEME: &str = "spiffe://";
/// The longest id in bytes.
pub(super) const MAX: usize = 2048;
/// The longest trust domain in bytes.
const MAX_DOMAIN: usize = 255;

/// Checks the id of a workload, which has a path.
///
/// # Errors
/// The fault.
pub(super) fn check(id: &str) -> Result<(), String> {
    match check_any(id)? {
        true => Ok(()),
        false => Err(format!(
            "the SPIFFE id '{id}' has no path, so it names no workload"
        )),
    }
}

/// Checks an id with or without a path. Returns whether it has one.
///
/// # Errors
/// The fault.
pub(super) fn check_any(id: &str) -> Result<bool, String> {
    let wrong = |why: &str| Err(format!("'{}' is not a SPIFFE id: {why}", shown(id)));
    if id.len() > MAX {
        return wrong("it is longer than 2048 bytes");
    }
    let Some(rest) = id.strip_prefix(SCHEME) else {
        return wrong("it does not begin with spiffe://");
    };
    let (domain, path) = match rest.split_once('/') {
        Some((domain, path)) => (domain, Some(path)),
        None => (rest, None),
    };
    let in_domain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_');
    if !(1..=MAX_DOMAIN).contains(&domain.len()) || !domain.bytes().all(in_domain) {
        return wrong(
            "a trust domain has 1 to 255 lower-case letters, digits, '.', '-' and '_', and no port",
        );
    }
    let in_path = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let segment = |segment: &str| {
        !segment.is_empty() && !matches!(segment, "." | "..") && segment.bytes().all(in_path)
    };
    match path {
        Some(path) if !path.split('/').all(segment) => wrong(
            "its path has segments of letters, digits, '.', '-' and '_', none of them empty, '.' or '..'",
        ),
        path => Ok(path.is_some()),
    }
}

/// Returns the beginning of an id, for an error.
fn shown(id: &str) -> String {
    id.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_workloads_are_told_from_others() {
        let long = format!("spiffe://td/{}", "x".repeat(MAX - 12));
        for good in ["spiffe://td/a", "spiffe://a.b-c_1/ns/X_y/sa/z.1-", &long] {
            check(good).unwrap();
        }
        let too_long = format!("{long}x");
        let domain = format!("spiffe://{}/a", "d".repeat(256));
        for bad in [
            "",
            "spiffe:/td/a",
            "SPIFFE://td/a",
            "https://td/a",
            "spiffe:///a",
            "spiffe://TD/a",
            "spiffe://td:80/a",
            "spiffe://user@td/a",
            "spiffe://td",
            "spiffe://td/",
            "spiffe://td//a",
            "spiffe://td/a/",
            "spiffe://td/./a",
            "spiffe://td/../a",
            "spiffe://td/a?b",
            "spiffe://td/a#b",
            "spiffe://td/a%20",
            "spiffe://td/ä",
            &too_long,
            &domain,
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
        assert_eq!(check_any("spiffe://td"), Ok(false));
    }
}
