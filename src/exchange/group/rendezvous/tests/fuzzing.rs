//! For tests/fuzz.

use super::*;

/// Receives the bytes after the first, the number of ranks, as rank 0's reply, and as a rank's hello.
pub(crate) fn receive_all(bytes: &[u8]) {
    let Some((&size, bytes)) = bytes.split_first() else {
        return;
    };
    let _ = decode::<Reply>(bytes);
    let Ok(hello) = decode::<Hello>(bytes) else {
        return;
    };
    let seats: Vec<Option<()>> = (1..size.max(1)).map(|_| None).collect();
    if let Ok(index) = seat(&hello, &[0; CHALLENGE], &seats, None) {
        assert!(index < seats.len());
    }
    let secret = GroupSecret::new(b"0123456789abcdef").expect("long enough");
    let seated = seat(&hello, &[0; CHALLENGE], &seats, Some(&secret));
    assert!(seated.is_err(), "no proof of the secret");
}
