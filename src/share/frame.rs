//! The frames of a [`Channel`](super::Channel): a length (32 bits, big-endian) and that many bytes of JSON.
//!
//! The first byte of a frame carries as many of its fds as one message can; further fds come with bytes of
//! their own, which follow the frame and are zero. The bytes of a text follow its frame.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::{BootId, Description};
use crate::driver::Location;
use egmem_core::{Error, Result};

/// The version of the frames that this crate writes and reads.
pub(super) const VERSION: u16 = 3;
/// The most bytes of JSON in a frame.
pub(super) const MAX_FRAME: usize = 1 << 20;
/// One message.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Body {
    /// Memory, with an fd for each of its parts.
    Memory(Description),
    /// Memory with many parts, with one fd: a [queue](super::queue) of those of its parts.
    Queued(Description),
    /// A pool, with its fd.
    Pool {
        /// The memory's location, as the exporter claims.
        location: Location,
    },
    /// An allocation of the pool that was sent last, with an fd that the importer keeps open while it has the
    /// allocation.
    PoolBuffer {
        /// The allocation's size.
        bytes: u64,
        /// The data with which the driver imports it: 64 bytes.
        pointer: Pointer,
    },
    /// An event of another process, with an fd that the importer keeps open while it has the event.
    Event {
        /// The boot of the machine that it belongs to.
        boot: BootId,
        /// Its GPU's UUID.
        gpu: [u8; 16],
        /// The bytes with which the driver opens it: 64.
        handle: Pointer,
    },
    /// A text of the program's own. Its bytes follow the frame.
    Text { bytes: usize },
    /// One end of a [link](super::Link), with its fd.
    Link {},
}

impl Body {
    /// Returns how many fds come with it.
    pub(super) fn fds(&self) -> usize {
        match self {
            Self::Memory(description) => description.parts.len(),
            Self::Text { .. } => 0,
            _ => 1,
        }
    }

    fn check(&self) -> Result<()> {
        match self {
            Self::Memory(description) | Self::Queued(description) => description.check(),
            Self::PoolBuffer { bytes: 0, .. } => Err(Error::invalid("size", "0 bytes")),
            _ => Ok(()),
        }
    }
}

/// The bytes of an exported pointer or event.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub(super) struct Pointer(pub(super) [u8; 64]);

impl TryFrom<Vec<u8>> for Pointer {
    type Error = String;

    fn try_from(bytes: Vec<u8>) -> Result<Self, String> {
        let wrong = |bytes: Vec<u8>| format!("a pointer or an event of {} bytes", bytes.len());
        bytes.try_into().map(Self).map_err(wrong)
    }
}

impl From<Pointer> for Vec<u8> {
    fn from(pointer: Pointer) -> Self {
        pointer.0.to_vec()
    }
}

impl std::fmt::Debug for Pointer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pointer(redacted)")
    }
}

#[derive(Serialize, Deserialize)]
struct Frame<B> {
    version: u16,
    body: B,
}

/// Encodes a frame, with its length in front.
pub(super) fn encode(body: &Body) -> Result<Vec<u8>> {
    body.check()?;
    let mut bytes = vec![0; 4];
    let frame = Frame {
        version: VERSION,
        body,
    };
    serde_json::to_writer(&mut bytes, &frame)
        .map_err(|error| Error::invalid("message", error.to_string()))?;
    let len = bytes.len() - 4;
    if len > MAX_FRAME {
        let why = format!("{len} bytes, the most are {MAX_FRAME}");
        return Err(Error::invalid("message", why));
    }
    bytes[..4].copy_from_slice(&(len as u32).to_be_bytes());
    Ok(bytes)
}

/// Returns how many bytes follow the length.
///
/// # Errors
/// The reason why it is invalid, as in [`decode`].
pub(super) fn length(prefix: [u8; 4]) -> Result<usize, String> {
    match u32::from_be_bytes(prefix) as usize {
        0 => Err("an empty frame".into()),
        len if len > MAX_FRAME => Err(format!("a frame of {len} bytes")),
        len => Ok(len),
    }
}

/// Decodes and checks a frame.
pub(super) fn decode(bytes: &[u8]) -> Result<Body, String> {
    if !bytes.starts_with(b"{") {
        // Versions 1 and 2 were CBOR.
        return Err(format!(
            "no frame of version {VERSION}: the other end may have an older egmem"
        ));
    }
    let Frame { version, .. } = whole::<Frame<IgnoredAny>>(bytes)?;
    if version != VERSION {
        return Err(format!("version {version}, not {VERSION}"));
    }
    let Frame { body, .. } = whole::<Frame<Body>>(bytes)?;
    body.check().map_err(|error| error.to_string())?;
    Ok(body)
}

fn whole<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Identity, InstanceId, MAX_PARTS, Part};
    use super::*;
    use crate::driver::Access;

    fn memory(parts: usize) -> Body {
        let part = |allocation| Part {
            identity: Identity {
                boot: BootId::from_bytes([0xff; 16]),
                instance: InstanceId::from_bytes([0xff; 16]),
                allocation: u64::MAX - allocation as u64,
                generation: u64::MAX,
            },
            bytes: 1 << 40,
            location: Location::HostNuma(i32::MIN),
        };
        Body::Memory(Description {
            len: parts as u64 * (1 << 40),
            offset: None,
            access: Access::ReadWrite,
            parts: (0..parts).map(part).collect(),
        })
    }

    fn pointer() -> Body {
        Body::PoolBuffer {
            bytes: 77,
            pointer: Pointer([9; 64]),
        }
    }

    fn through(body: &Body) -> Body {
        let bytes = encode(body).unwrap();
        let (prefix, rest) = bytes.split_first_chunk().unwrap();
        assert_eq!(length(*prefix).unwrap(), rest.len());
        decode(rest).unwrap()
    }

    #[test]
    fn an_event_reads_back_and_shows_no_bytes() {
        let event = Body::Event {
            boot: BootId::from_bytes([3; 16]),
            gpu: [4; 16],
            handle: Pointer([5; 64]),
        };
        let read = through(&event);
        assert!(format!("{read:?}").contains("handle: Pointer(redacted)"));
        let Body::Event { gpu, handle, .. } = read else {
            panic!("an event was sent");
        };
        assert_eq!((gpu, handle.0), ([4; 16], [5; 64]));
        for bytes in [0, 63, 65] {
            assert!(Pointer::try_from(vec![5; bytes]).is_err());
        }
        let frame = String::from_utf8(encode(&event).unwrap()[4..].to_vec()).unwrap();
        let short = frame.replacen("5,5,", "5,", 1);
        let why = decode(short.as_bytes()).unwrap_err();
        assert!(why.contains("63 bytes"), "{why}");
    }

    #[test]
    fn messages_read_back() {
        for parts in [1, MAX_PARTS] {
            let (Body::Memory(sent), Body::Memory(got)) = (memory(parts), through(&memory(parts)))
            else {
                panic!("memory was sent");
            };
            assert_eq!(sent, got);
        }
        let Body::PoolBuffer { bytes: 77, pointer } = through(&pointer()) else {
            panic!("a pointer was sent");
        };
        assert_eq!(pointer.0, [9; 64]);
        let location = Location::HostNuma(3);
        let pool = through(&Body::Pool { location });
        assert!(matches!(
            pool,
            Body::Pool {
                location: Location::HostNuma(3)
            }
        ));
    }

    #[test]
    fn a_texts_length_is_in_its_frame() {
        let text = through(&Body::Text { bytes: 3 });
        assert!(matches!(text, Body::Text { bytes: 3 }), "{text:?}");
    }

    #[test]
    fn what_cannot_be_is_neither_sent_nor_taken() {
        let Body::Memory(mut wrong) = memory(2) else {
            panic!("this is memory");
        };
        wrong.len = 1;
        assert!(encode(&Body::Memory(wrong.clone())).is_err());
        let frame = |version, body| serde_json::to_vec(&Frame { version, body }).unwrap();
        let wrong = &Body::Memory(wrong);
        assert!(
            decode(&frame(VERSION, wrong))
                .unwrap_err()
                .contains("description")
        );

        let body = &pointer();
        assert_eq!(decode(&frame(1, body)).unwrap_err(), "version 1, not 3");
        let cbor = decode(&[0xa2, 0x67]).unwrap_err();
        assert!(cbor.contains("an older egmem"), "{cbor}");
        let mut long = encode(body).unwrap()[4..].to_vec();
        long.push(0);
        assert!(decode(&long).is_err());
        assert!(length([0; 4]).is_err());
        assert!(length((MAX_FRAME as u32 + 1).to_be_bytes()).is_err());
        assert!(length((MAX_FRAME as u32).to_be_bytes()).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }

        /// Nearly valid messages reach more of the code.
        #[test]
        fn damaged_messages_are_read_without_a_panic(
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = encode(&memory(2)).unwrap()[4..].to_vec();
            prop_assert!(decode(&bytes[..cut.index(bytes.len())]).is_err());
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(body) = decode(&bytes) {
                prop_assert!(body.check().is_ok());
            }
        }
    }
}
