//! The header of a tier in its memory, and the lock in it, for one member at a time.
//!
//! The lock is a word: the member's name, a bit if others wait, and half of the member's word, so that a lock which was
//! taken from a member is never taken for that of the next one with its number. A member that is killed keeps it; one that waits finds that
//! out and takes it over, and repairs the table before anything else.

use std::hash::{BuildHasher, RandomState};
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst, fence};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex;

use crate::geometry::{GROUP, GROUPS, Geometry, HEADER, MAX_GROUPS};
use crate::members::{Own, Owner};
use crate::memory::CpuView;
use crate::words::{Words, hash};
use crate::{Error, MemoryError, Result};

/// The first word of a tier, and of a tier that was not written completely.
const MAGIC: u64 = u64::from_le_bytes(*b"EGMEM-KV");
pub(crate) const UNFINISHED: u64 = u64::from_le_bytes(*b"egmem-k?");
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

/// The most reads of a header that changes meanwhile.
const READS: u32 = 16;

/// The words of a header, and the sizes of all groups' pages where it says that there is a tier.
#[derive(Clone)]
struct Head {
    words: [u64; HEADER as usize / 8],
    sizes: [u64; MAX_GROUPS],
}

impl Head {
    fn read(view: &CpuView<'_>) -> Result<Self, MemoryError> {
        let mut head = Self {
            words: [0; HEADER as usize / 8],
            sizes: [0; MAX_GROUPS],
        };
        view.read_at(0, &mut head.words)?;
        if head.words[0] == MAGIC {
            for (at, size) in (GROUPS..).step_by(GROUP as usize).zip(&mut head.sizes) {
                *size = view.get(at)?;
            }
        }
        Ok(head)
    }

    /// Returns the part that does not change in a tier.
    fn constant(&self) -> (&[u64], &[u64]) {
        (&self.words[..=FIELDS], &self.sizes)
    }

    /// Reads until two reads agree: another process may write the header at this moment, and parts of two states mean nothing.
    fn settled(mut read: impl FnMut() -> Result<Self, MemoryError>) -> Result<Self, MemoryError> {
        let mut head = read()?;
        for _ in 0..READS {
            // The reads before stay before the reads after.
            fence(SeqCst);
            let again = read()?;
            if again.constant() == head.constant() {
                break;
            }
            head = again;
        }
        Ok(head)
    }
}

/// Reads the header of a tier, whose extents fit into the memory; `None` for zeros, and for a header that was not written completely.
/// Everything in it may be wrong.
///
/// # Errors
/// [`Error::NotATier`]; those of the view.
pub(crate) fn read(view: &CpuView<'_>) -> Result<Option<(Geometry, Tag)>> {
    let Head { words, sizes } = Head::settled(|| Head::read(view))?;
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
    found[FIELDS..].copy_from_slice(&sizes);
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

/// Returns whether the memory begins as a tier does that was written completely: its header may be damaged, or of another
/// version, and the words of its members are such words.
///
/// # Errors
/// Those of the view.
pub(crate) fn is_of_a_tier(view: &CpuView<'_>) -> Result<bool, MemoryError> {
    Ok(view.get::<u64>(0)? == MAGIC)
}

/// As [`is_of_a_tier`], also of a tier that is being written, or was not written completely: the word of its opener is such a word.
///
/// # Errors
/// Those of the view.
pub(crate) fn is_begun(view: &CpuView<'_>) -> Result<bool, MemoryError> {
    Ok(is_of_a_tier(view)? || view.get::<u64>(0)? == UNFINISHED)
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
    // The writes before stay before the writes after, here and below.
    fence(SeqCst);
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
    fence(SeqCst);
    view.put(0, MAGIC)?;
    fence(SeqCst);
    Ok(())
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

const NAME: u64 = 0xff;
const WAITERS: u64 = 0x100;
/// Looks at a lock that is held, before a thread sleeps: about a microsecond.
const SPINS: u32 = 60;
/// The time of a sleep, after which the holder is judged.
const NAP: Duration = Duration::from_micros(if cfg!(test) { 1 } else { 20_000 });
/// The time of a sleep where the kernel cannot wait for the word.
const DOZE: Duration = Duration::from_micros(200);

/// The time for which a call waits for a process that has something, lives and does not go on.
pub(crate) const PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 5000 });

/// A thread that waits and has not looked for so long was stopped, and is not only slow.
const STOP: Duration = Duration::from_secs(1);

/// A wait that may take too long. Its time begins again with each step that work on many pages makes, and where this process itself
/// was stopped.
pub(crate) struct Wait {
    patience: Duration,
    since: Instant,
    looked: Instant,
    steps: u64,
}

impl Wait {
    pub(crate) fn new(words: &Words<'_>, patience: Duration) -> Self {
        let now = Instant::now();
        Self {
            patience,
            since: now,
            looked: now,
            steps: words.get(STEPS),
        }
    }

    pub(crate) fn is_over(&mut self, words: &Words<'_>) -> bool {
        self.is_over_at(Instant::now(), words.get(STEPS))
    }

    fn is_over_at(&mut self, now: Instant, steps: u64) -> bool {
        let pause = now.saturating_duration_since(self.looked);
        self.looked = now;
        if steps != self.steps || pause > self.patience.max(STOP) {
            (self.steps, self.since) = (steps, now);
        }
        now.saturating_duration_since(self.since) > self.patience
    }
}

/// The lock, which is given back when dropped.
pub(crate) struct Lock<'a> {
    words: &'a Words<'a>,
    own: Own,
}

impl<'a> Lock<'a> {
    /// Takes the lock if nobody has it; `None` otherwise, and for a member that another process has taken the tier from.
    #[inline(always)]
    pub(crate) fn try_acquire(words: &'a Words<'a>, own: Own) -> Option<Self> {
        if !words.swap(LOCK, 0, own.mark()) {
            return None;
        }
        Self::of_member(words, own).ok()
    }

    /// Waits for the lock, for as long as its holder goes on and `patience` beyond. No other thread of this process waits for it as the
    /// same member. After a holder that has ended the table is dirty. A holder elsewhere has ended if `elsewhere_has` says so.
    ///
    /// # Errors
    /// [`Error::Busy`] if a process has it that does not end; those of [`Words::expect_member`].
    // A result of this size that is returned through memory costs 10 ns more.
    #[inline(always)]
    pub(crate) fn acquire(
        words: &'a Words<'a>,
        own: Own,
        patience: Duration,
        elsewhere_has: bool,
    ) -> Result<Self> {
        if !words.swap(LOCK, 0, own.mark()) {
            Self::wait(words, own, &mut Wait::new(words, patience), elsewhere_has)?;
        }
        Self::of_member(words, own)
    }

    #[inline(always)]
    fn of_member(words: &'a Words<'a>, own: Own) -> Result<Self> {
        let lock = Self { words, own };
        words.expect_member(own)?;
        Ok(lock)
    }

    #[cold]
    fn wait(words: &Words<'_>, own: Own, wait: &mut Wait, elsewhere_has: bool) -> Result<()> {
        // After a sleep others may still sleep.
        let mut mark = own.mark();
        loop {
            for _ in 0..SPINS {
                if words.get(LOCK) == 0 && words.swap(LOCK, 0, mark) {
                    return Ok(());
                }
                spin_loop();
            }
            let found = words.get(LOCK);
            if found == 0 || found & WAITERS == 0 && !words.swap(LOCK, found, found | WAITERS) {
                continue;
            }
            mark = own.mark() | WAITERS;
            // No thread of this process has it as this member: an earlier open tier of the process with its number did.
            let is_own = found & !WAITERS == own.mark();
            if !is_own && !sleep(words.low_half(LOCK), (found | WAITERS) as u32) {
                continue;
            }
            let owner = if is_own {
                Owner::Ended
            } else {
                words.judge_member(found & NAME, (found >> 32) as u32)
            };
            let living = match owner {
                Owner::Elsewhere(_) if elsewhere_has => None,
                Owner::Lives(pid) | Owner::Elsewhere(pid) => Some(pid),
                Owner::Ended | Owner::None => None,
            };
            if let Some(pid) = living {
                if wait.is_over(words) {
                    return Err(Error::Busy { pid });
                }
            } else if words.swap(LOCK, found | WAITERS, mark) {
                // Whoever changes the table next repairs it first, also if that is not this call.
                words.put(DIRTY, 1);
                return Ok(());
            }
        }
    }
}

/// Sleeps until the word changes. Returns whether the holder is to be judged.
fn sleep(word: Option<&AtomicU32>, value: u32) -> bool {
    let nap = futex::Timespec {
        tv_sec: 0,
        tv_nsec: NAP.subsec_nanos().into(),
    };
    let slept = word.map(|word| futex::wait(word, futex::Flags::empty(), value, Some(&nap)));
    match slept {
        Some(Ok(()) | Err(Errno::AGAIN)) => false,
        // Signals may come more often than a sleep ends.
        Some(Err(Errno::TIMEDOUT | Errno::INTR)) => true,
        // The kernel waits for no word in memory that a driver maps (EFAULT): nobody wakes this thread.
        _ => {
            std::thread::sleep(DOZE);
            true
        }
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // Others change one bit, once.
        for _ in 0..3 {
            let found = self.words.get(LOCK);
            // Another member's: one that was told to take over.
            if found & !WAITERS != self.own.mark() {
                return;
            }
            if self.words.swap(LOCK, found, 0) {
                if found & WAITERS != 0
                    && let Some(word) = self.words.low_half(LOCK)
                {
                    // It has nothing to report.
                    let _ = futex::wake(word, futex::Flags::empty(), 1);
                }
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::geometry::MEMBERS;

    #[test]
    fn a_wait_begins_again_with_each_step() {
        let memory: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let words = Words::over(&memory);
        let at = |seconds| Instant::now() + Duration::from_secs(seconds);
        let mut wait = Wait::new(&words, Duration::from_secs(5));
        assert!(!wait.is_over_at(at(4), 0) && !wait.is_over_at(at(8), 1));
        assert!(!wait.is_over_at(at(12), 1) && wait.is_over_at(at(14), 1));
        assert!(!wait.is_over_at(at(14), 2));
    }

    /// This process, and not the other, did not go on: it was stopped, or its machine.
    #[test]
    fn a_wait_begins_again_after_a_stop_of_its_own() {
        let memory: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        let words = Words::over(&memory);
        let at = |seconds| Instant::now() + Duration::from_secs(seconds);
        let mut wait = Wait::new(&words, Duration::from_secs(5));
        assert!(!wait.is_over_at(at(4), 0) && !wait.is_over_at(at(20), 0));
        assert!(!wait.is_over_at(at(24), 0) && wait.is_over_at(at(26), 0));
    }

    #[test]
    fn a_wait_for_the_lock_sees_steps() {
        let memory: Vec<AtomicU64> = (0..1024).map(|_| AtomicU64::new(0)).collect();
        let words = Words::over(&memory);
        let [own, other] = [(); 2].map(|()| words.claim_member(false).unwrap().0);
        let mut wait = Wait::new(&words, Duration::ZERO);
        words.put(STEPS, 3);
        let _held = Lock::acquire(&words, other, PATIENCE, false).unwrap();
        let busy = Lock::wait(&words, own, &mut wait, false);
        let pid = std::process::id();
        assert_eq!((busy, wait.steps), (Err(Error::Busy { pid }), 3));
    }

    /// A process that was told so has taken the number over, and holds the lock.
    #[test]
    fn a_lock_of_the_next_member_with_the_number_stays_its_own() {
        let memory: Vec<AtomicU64> = (0..1024).map(|_| AtomicU64::new(0)).collect();
        let words = Words::over(&memory);
        let (own, _) = words.claim_member(false).unwrap();
        let next = words.get(MEMBERS) ^ 1 << 22; // of another PID namespace
        let held = own.name() | next << 32;
        words.put(MEMBERS, next);
        words.put(LOCK, held);
        assert!(Lock::acquire(&words, own, Duration::ZERO, false).is_err());
        drop(Lock { words: &words, own });
        let found = (words.get(LOCK) & !WAITERS, words.get(DIRTY));
        assert_eq!(found, (held, 0));
    }

    #[test]
    fn a_header_that_changes_while_it_is_read_is_read_again() {
        let head = |first, second| {
            let mut words = [0; HEADER as usize / 8];
            words[..2].copy_from_slice(&[first, second]);
            let sizes = [0; MAX_GROUPS];
            Head { words, sizes }
        };
        // The first word of before, and the others of after.
        let states = [(0, VERSION), (MAGIC, VERSION), (MAGIC, VERSION), (7, 7)];
        let mut reads = states.into_iter();
        let settled = Head::settled(|| {
            let (first, second) = reads.next().unwrap();
            Ok(head(first, second))
        });
        let settled = settled.unwrap();
        assert_eq!(settled.words[..2], [MAGIC, VERSION]);
        assert_eq!(reads.len(), 1);
        // Another process may change it for ever.
        let mut count = 0;
        let restless = Head::settled(|| {
            count += 1;
            Ok(head(count, 0))
        });
        assert_eq!(restless.unwrap().words[0], u64::from(READS) + 1);
    }

    #[test]
    fn a_holder_is_judged_where_the_kernel_does_not_wait() {
        assert!(sleep(None, 0));
        let word = AtomicU32::new(7);
        assert!(!sleep(Some(&word), 6), "it has changed");
        assert!(sleep(Some(&word), 7));
    }
}
