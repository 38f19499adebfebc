//! A frame as its bytes arrive: a length of four bytes, big-endian, and that many bytes.

use zeroize::Zeroizing;

/// Bytes of a frame's length.
pub(super) const HEADER: usize = 4;
/// How many bytes are allocated for a frame before any of it has arrived.
pub(super) const FIRST: usize = 4 << 10;

/// Why no frame follows.
#[derive(Debug, PartialEq)]
pub(super) enum NoFrame {
    /// The peer speaks TLS: its bytes are a record's.
    Tls,
    /// The length is not allowed.
    Length(String),
}

/// Assembles frames from pieces of any size.
#[derive(Default)]
pub(super) struct Assembly {
    header: [u8; HEADER],
    body: Zeroizing<Vec<u8>>,
    /// Bytes received of header and body.
    pub(super) have: usize,
}

impl Assembly {
    /// Returns where the next bytes belong. Never beyond the present frame, and a body's room grows only as
    /// it arrives: a header that announces many bytes gets few at first.
    pub(super) fn room(&mut self, limit: u32) -> Result<&mut [u8], NoFrame> {
        if self.have < HEADER {
            return Ok(&mut self.header[self.have..]);
        }
        let want = self.want();
        if want == 0 {
            return Err(NoFrame::Length("an empty frame".into()));
        }
        if want > limit as usize {
            // A TLS record begins with its type, here an alert or a handshake, and version 3.x.
            return Err(match self.header {
                [0x15 | 0x16, 3, _, _] => NoFrame::Tls,
                _ => NoFrame::Length(format!(
                    "a frame of {want} bytes; at most {limit} are allowed"
                )),
            });
        }
        let have = self.have - HEADER;
        if let Some(size) = self.growth() {
            // Copied by hand: a vector that grows leaves its bytes behind.
            let mut more = Zeroizing::new(vec![0; size]);
            more[..have].copy_from_slice(&self.body);
            self.body = more;
        }
        Ok(&mut self.body[have..])
    }

    /// Returns the size that the body must grow to before more can be read, if it has to.
    pub(super) fn growth(&self) -> Option<usize> {
        let have = self.have.checked_sub(HEADER)?;
        let size = self.want().min(FIRST.max(have.saturating_mul(2)));
        (have == self.body.len()).then_some(size)
    }

    fn want(&self) -> usize {
        u32::from_be_bytes(self.header) as usize
    }

    /// Records `count` bytes received in [`room`](Self::room); returns whether the frame is complete.
    pub(super) fn came(&mut self, count: usize) -> bool {
        self.have += count;
        self.have >= HEADER && self.want() > 0 && self.have - HEADER == self.want()
    }

    pub(super) fn take(&mut self) -> Zeroizing<Vec<u8>> {
        self.have = 0;
        std::mem::take(&mut self.body)
    }
}

/// Returns the frames in the bytes if they arrive in pieces of `piece` bytes, and the most room allocated for
/// one. An error or a cut-off frame ends the list.
#[cfg(fuzzing)]
pub(crate) fn assemble(bytes: &[u8], piece: usize, limit: u32) -> (Vec<Vec<u8>>, usize) {
    let (mut frames, mut most) = (Vec::new(), 0);
    let mut assembly = Assembly::default();
    for mut piece in bytes.chunks(piece.min(bytes.len().max(1))) {
        while !piece.is_empty() {
            let Ok(room) = assembly.room(limit) else {
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
