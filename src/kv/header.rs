//! The header of a tier in its memory.

use std::hash::{BuildHasher, RandomState};

use crate::geometry::{GROUP, GROUPS, Geometry, HEADER, MAX_GROUPS};
use crate::memory::CpuView;
use crate::words::hash;
use crate::{Error, MemoryError, Result};

/// The first word of a tier, and of a tier that was not written completely.
const MAGIC: u64 = u64::from_le_bytes(*b"EGMEM-KV");
const UNFINISHED: u64 = u64::from_le_bytes(*b"egmem-k?");
const VERSION: u64 = 3;

// Where the fields lie. The fields from the magic to the tag do not change; the check is theirs and the groups' sizes'.
const FIELDS: usize = 10;
/// A random word, with which keys are hashed.
pub(crate) const SEED: u64 = 24;
const CHECK: u64 = 8 * FIELDS as u64;
/// How often the tier was attached.
const GENERATION: u64 = 128;
/// The process that opens the tier at this moment. Of earlier versions, the process that has the tier.
pub(crate) const OPENER: u64 = 136;
/// The member that changes the table, and a bit for others that wait.
pub(crate) const LOCK: u64 = 144;
/// The lists, the index and the counts are being rebuilt.
pub(crate) const DIRTY: u64 = 152;
/// The pages whose memory is there: those with smaller numbers.
pub(crate) const USABLE: u64 = 160;
/// The steps that work on many pages has made under the lock, so that members which wait see it go on.
pub(crate) const STEPS: u64 = 176;
/// The stamp of the latest use.
pub(crate) const CLOCK: u64 = 168;

/// The bytes of a table that are cleared in a step.
const FILL: usize = 64 << 20;

/// The meaning of the pages, in the caller's words.
pub(crate) type Tag = [u8; 32];

/// The fields in front of the check, and the sizes of all groups' pages.
fn fields(geometry: &Geometry, tag: &Tag, seed: u64) -> [u64; FIELDS + MAX_GROUPS] {
    let mut fields = [0; FIELDS + MAX_GROUPS];
    let groups = geometry.groups.len() as u64;
    let count = match geometry.has_groups() {
        true => u64::from(geometry.extents),
        false => u64::from(geometry.pages),
    };
    fields[..6].copy_from_slice(&[MAGIC, VERSION, groups, seed, count, geometry.extent_bytes]);
    for (field, bytes) in fields[6..].iter_mut().zip(tag.as_chunks().0) {
        *field = u64::from_le_bytes(*bytes);
    }
    for (field, group) in fields[FIELDS..].iter_mut().zip(&*geometry.groups) {
        *field = group.page_bytes;
    }
    fields
}

/// Reads the header of a tier, whose extents fit into the memory; `None` for zeros, and for a header that was not written completely.
/// Everything in it may be wrong.
///
/// # Errors
/// [`Error::NotATier`]; those of the view.
pub(crate) fn read(view: &CpuView<'_>) -> Result<Option<(Geometry, Tag)>> {
    let mut words = [0_u64; HEADER as usize / 8];
    view.read_at(0, &mut words)?;
    let zeros = words.iter().enumerate();
    let mut zeros = zeros.filter(|&(at, _)| at as u64 * 8 != OPENER);
    if words[0] == UNFINISHED || zeros.all(|(_, word)| *word == 0) {
        return Ok(None);
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
    let mut found = [0; FIELDS + MAX_GROUPS];
    found[..FIELDS].copy_from_slice(&words[..FIELDS]);
    for (at, field) in (GROUPS..).step_by(GROUP as usize).zip(&mut found[FIELDS..]) {
        *field = view.get(at)?;
    }
    if words[CHECK as usize / 8] != hash(&found) {
        return Err(not("its header is damaged".into()));
    }
    // Anyone can compute the check: a header with the right one may still be invalid.
    let [_, _, groups, seed, count, extent_bytes] = found[..6] else {
        return Err(not("its header is too short".into()));
    };
    let sizes = found[FIELDS..].get(..groups as usize).unwrap_or_default();
    let geometry = match *sizes {
        [page_bytes] => Geometry::new(count, page_bytes),
        _ => Geometry::of_extents(count, extent_bytes, sizes),
    };
    let geometry = geometry.map_err(|error| not(error.to_string()))?;
    let mut tag = Tag::default();
    for (bytes, word) in tag.as_chunks_mut().0.iter_mut().zip(&words[6..FIELDS]) {
        *bytes = word.to_le_bytes();
    }
    if fields(&geometry, &tag, seed) != found {
        return Err(not("its pages lie elsewhere".into()));
    }
    if geometry.total > view.len() {
        let (total, len) = (geometry.total, view.len());
        return Err(not(format!("it has {total} bytes, and the memory {len}")));
    }
    Ok(Some((geometry, tag)))
}

/// Returns whether the memory begins as a tier does: its header may be damaged, of another version, or being written,
/// and the words of its opener and its members are such words.
///
/// # Errors
/// Those of the view.
pub(crate) fn is_of_a_tier(view: &CpuView<'_>) -> Result<bool, MemoryError> {
    Ok(matches!(view.get::<u64>(0)?, MAGIC | UNFINISHED))
}

/// Writes the header, and zeros up to the pages of the first extent, where a tier of one group has its slots. The table is to be
/// repaired then. Killed within, it leaves no tier.
///
/// # Errors
/// Those of the view.
pub(crate) fn format(view: &CpuView<'_>, geometry: &Geometry, tag: &Tag) -> Result<()> {
    let seed = RandomState::new().hash_one(OPENER);
    let fields = fields(geometry, tag, seed);
    view.put(0, UNFINISHED)?;
    ordered();
    view.fill(8, OPENER - 8, 0)?;
    // The repair clears the index.
    let index = geometry.index();
    view.fill(OPENER + 8, index.start - OPENER - 8, 0)?;
    for (at, steps) in (index.end..geometry.pages_at).step_by(FILL).zip(1_u64..) {
        view.fill(at, (geometry.pages_at - at).min(FILL as u64), 0)?;
        view.put(STEPS, steps)?;
    }
    view.write_at(8, &fields[1..FIELDS])?;
    for (at, bytes) in (GROUPS..).step_by(GROUP as usize).zip(&fields[FIELDS..]) {
        view.put(at, *bytes)?;
    }
    view.put(CHECK, hash(&fields))?;
    view.put(DIRTY, 1_u64)?;
    ordered();
    view.put(0, MAGIC)?;
    ordered();
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
