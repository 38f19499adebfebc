//! Frames that come in pieces of any size: the first byte says of which.
#![no_main]

use egmem::exchange::fuzzing::frames;

const LIMIT: u32 = 1 << 16;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((&piece, bytes)) = bytes.split_first() else {
        return;
    };
    let whole = frames(bytes, usize::MAX, LIMIT);
    let pieces = frames(bytes, usize::from(piece).max(1), LIMIT);
    assert_eq!(whole, pieces, "the pieces make a difference");
    let (found, room) = pieces;
    let bytes_in: usize = found.iter().map(|frame| frame.len() + 4).sum();
    assert!(bytes_in <= bytes.len());
    // Room for twice the received bytes, or for a first piece.
    assert!(
        room <= (2 * bytes.len()).max(16 << 10),
        "{room} bytes of room"
    );
});
