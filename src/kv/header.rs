//! The header of a tier in its memory.

use crate::geometry::{Geometry, HEADER, SLOT};
use crate::hash::hash;
use crate::memory::CpuView;
use crate::{Error, MemoryError, Result};

/// The first word of a tier, and of a tier that was not written completely.
const MAGIC: u64 = u64::from_le_bytes(*b"EGMEM-KV");
const UNFINISHED: u64 = u64::from_le_bytes(*b"egmem-k?");
const VERSION: u64 = 2;

// Where the fields lie. The fields from the magic to the tag do not change; the check is theirs.
const FIELDS: usize = 10;
const CHECK: u64 = 8 * FIELDS as u64;
/// How often the tier was attached.
const GENERATION: u64 = 128;
/// The process that has it.
pub(crate) const OWNER: u64 = 136;

/// The meaning of the pages, in the caller's words.
pub(crate) type Tag = [u8; 32];

/// The contents at the beginning of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum There {
    /// Zeros, or the header of a tier that was not written completely.
    Nothing,
    /// A tier, whose table fits into the memory.
    Tier(Geometry, Tag),
}

fn fields(geometry: &Geometry, tag: &Tag) -> [u64; FIELDS] {
    let mut fields = [0; FIELDS];
    fields[..6].copy_from_slice(&[
        MAGIC,
        VERSION,
        geometry.pages.into(),
        geometry.page_bytes,
        geometry.pages_at,
        SLOT,
    ]);
    for (field, bytes) in fields[6..].iter_mut().zip(tag.as_chunks().0) {
        *field = u64::from_le_bytes(*bytes);
    }
    fields
}

/// Reads the header. Everything in it may be wrong.
///
/// # Errors
/// [`Error::NotATier`]; those of the view.
pub(crate) fn read(view: &CpuView<'_>) -> Result<There> {
    let mut words = [0_u64; HEADER as usize / 8];
    view.read_at(0, &mut words)?;
    let zeros = words.iter().enumerate();
    let mut zeros = zeros.filter(|&(at, _)| at as u64 * 8 != OWNER);
    if words[0] == UNFINISHED || zeros.all(|(_, word)| *word == 0) {
        return Ok(There::Nothing);
    }
    let not = |why: String| Error::NotATier {
        why,
        is_other_version: false,
    };
    if words[0] != MAGIC {
        return Err(not("it begins with other data".into()));
    }
    if words[1] != VERSION {
        return Err(Error::NotATier {
            why: format!("its format is version {}, not {VERSION}", words[1]),
            is_other_version: true,
        });
    }
    if words[CHECK as usize / 8] != hash(&words[..FIELDS]) {
        return Err(not("its header is damaged".into()));
    }
    // Anyone can compute the check: a header with the right one may still be invalid.
    let geometry = Geometry::new(words[2], words[3]).map_err(|error| not(error.to_string()))?;
    let mut tag = Tag::default();
    for (bytes, word) in tag.as_chunks_mut().0.iter_mut().zip(&words[6..FIELDS]) {
        *bytes = word.to_le_bytes();
    }
    if fields(&geometry, &tag)[..] != words[..FIELDS] {
        return Err(not("its pages lie elsewhere".into()));
    }
    if geometry.total > view.len() {
        let (total, len) = (geometry.total, view.len());
        return Err(not(format!("it has {total} bytes, and the memory {len}")));
    }
    Ok(There::Tier(geometry, tag))
}

/// Returns whether the memory begins as a tier does: its header may be damaged, of another version, or being written,
/// and its owner's word is one.
///
/// # Errors
/// Those of the view.
pub(crate) fn is_of_a_tier(view: &CpuView<'_>) -> Result<bool, MemoryError> {
    Ok(matches!(view.get::<u64>(0)?, MAGIC | UNFINISHED))
}

/// Writes the header and a table of free pages. Killed within, it leaves [`There::Nothing`].
///
/// # Errors
/// Those of the view.
pub(crate) fn format(view: &CpuView<'_>, geometry: &Geometry, tag: &Tag) -> Result<()> {
    let fields = fields(geometry, tag);
    view.put(0, UNFINISHED)?;
    ordered();
    view.fill(8, OWNER - 8, 0)?;
    view.fill(OWNER + 8, geometry.pages_at - OWNER - 8, 0)?;
    view.write_at(8, &fields[1..])?;
    view.put(CHECK, hash(&fields))?;
    ordered();
    view.put(0, MAGIC)?;
    Ok(())
}

/// Keeps the writes before before the writes after.
fn ordered() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Counts an attachment. Returns its number.
///
/// # Errors
/// Those of the view.
pub(crate) fn next_generation(view: &CpuView<'_>) -> Result<u64, MemoryError> {
    let generation = view.get::<u64>(GENERATION)?.wrapping_add(1);
    view.put(GENERATION, generation)?;
    Ok(generation)
}
