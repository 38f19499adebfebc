//! For tests/fuzz.

use super::*;

/// Returns the frames in the bytes if they arrive in pieces of `piece` bytes, and the most room allocated for
/// one. An error or a cut-off frame ends the list.
pub(crate) fn assemble(bytes: &[u8], piece: usize, limit: u32) -> (Vec<Vec<u8>>, usize) {
    let (mut frames, mut most) = (Vec::new(), 0);
    let mut assembly = Assembly::default();
    for mut piece in bytes.chunks(piece.min(bytes.len().max(1))) {
        while !piece.is_empty() {
            let Ok(room) = assembly.room("peer", limit) else {
                return (frames, most);
            };
            let count = room.len().min(piece.len());
            room[..count].copy_from_slice(&piece[..count]);
            piece = &piece[count..];
            let whole = assembly.came(count);
            most = most.max(assembly.body.len());
            if whole {
                frames.push(assembly.take().to_vec());
            }
        }
    }
    (frames, most)
}
