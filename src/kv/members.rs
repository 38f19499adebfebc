//! The open tiers of all processes on one memory.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use egmem_core::host::ProcessStat;
use rustix::process::{Pid, test_kill_process};

use crate::geometry::{MAX_MEMBERS, MEMBER, MEMBERS};
use crate::words::Words;
use crate::words::hash;
use crate::{Error, MemoryError, Result};

/// An open tier on one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// The process, by its number in its own PID namespace.
    pub pid: u32,
    /// Whether it is this open tier.
    pub is_self: bool,
}

/// The number of an open tier, and its process's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Own {
    number: u32,
    word: u64,
}

impl Own {
    /// Returns the number as words of the memory have it, where 0 is none.
    pub(crate) const fn name(self) -> u64 {
        self.number as u64 + 1
    }

    /// Returns what the lock's word has while the member holds it.
    pub(crate) const fn mark(self) -> u64 {
        self.name() | (self.word as u32 as u64) << 32
    }

    /// Returns the bit of the member in pins.
    pub(crate) const fn bit(self) -> u64 {
        1 << self.number
    }
}

/// Members that have ended, with their words.
pub(crate) struct Ended(Vec<(u32, u64)>);

impl Ended {
    /// Returns a bit for each.
    pub(crate) fn mask(&self) -> u64 {
        self.0
            .iter()
            .fold(0, |mask, (number, _)| mask | 1 << number)
    }
}

const fn at(number: u32) -> u64 {
    MEMBERS + number as u64 * MEMBER
}

/// The words of all members.
impl Words<'_> {
    /// Iterates over the numbers of the members, with their words.
    fn each_member(&self) -> impl Iterator<Item = (u32, u64)> {
        let words = (0..MAX_MEMBERS).map(|number| (number, self.get(at(number))));
        words.filter(|&(_, word)| word != 0)
    }

    /// Returns a bit for each member.
    pub(crate) fn member_bits(&self) -> u64 {
        self.each_member()
            .fold(0, |mask, (number, _)| mask | 1 << number)
    }

    pub(crate) fn has_other_members(&self, own: Own) -> bool {
        self.member_bits() & !own.bit() != 0
    }

    /// Returns the members that have ended, and those elsewhere if they are said to have. A member that cannot be judged lives.
    pub(crate) fn ended_members(&self, elsewhere_has: bool) -> Ended {
        let has_ended = |&(_, word): &(u32, u64)| match judge(word) {
            Ok(Owner::Ended) => true,
            Ok(Owner::Elsewhere(_)) => elsewhere_has,
            _ => false,
        };
        Ended(self.each_member().filter(has_ended).collect())
    }

    /// Judges the member with a name and this half of a word; `None` if there is none.
    pub(crate) fn judge_member(&self, name: u64, half: u32) -> Owner {
        let number = name.wrapping_sub(1);
        if number >= MAX_MEMBERS.into() {
            return Owner::None;
        }
        let word = self.get(at(number as u32));
        if word as u32 != half {
            return Owner::Ended; // another one has the number
        }
        // Without `/proc` none has ended.
        judge(word).unwrap_or(Owner::Lives(0))
    }

    /// Forgets members that have ended, unless another one has their number by now.
    pub(crate) fn forget_members(&self, ended: &Ended) {
        for &(number, word) in &ended.0 {
            self.swap(at(number), word, 0);
        }
    }

    /// Refuses memory with a member that may live.
    ///
    /// # Errors
    /// [`Error::InUse`]; [`System`](crate::MemoryError::System) without `/proc`.
    pub(crate) fn expect_no_member(&self, elsewhere_has_ended: bool) -> Result<()> {
        let expect = |word| expect_no_other(judge(word)?, elsewhere_has_ended);
        self.each_member().try_for_each(|(_, word)| expect(word))
    }

    /// Takes a number for this process. Returns the word that was there, too, for [`undo_claim`](Self::undo_claim).
    ///
    /// # Errors
    /// [`Error::InUse`] if a member is elsewhere, unless `take_over` says that it has ended; [`Error::TooManyMembers`];
    /// [`System`](crate::MemoryError::System) without `/proc`.
    pub(crate) fn claim_member(&self, take_over: bool) -> Result<(Own, u64)> {
        let word = own()?;
        let (mut free, mut ended) = (None, None);
        for number in 0..MAX_MEMBERS {
            let found = self.get(at(number));
            match judge(found)? {
                Owner::Lives(_) => {}
                Owner::None => free = free.or(Some((number, found))),
                owner => {
                    expect_no_other(owner, take_over)?;
                    ended = ended.or(Some((number, found)));
                }
            }
        }
        // With the number of one that has ended, the pages of that one are this member's until it joins.
        let members = MAX_MEMBERS;
        let (number, found) = free.or(ended).ok_or(Error::TooManyMembers { members })?;
        match self.swap(at(number), found, word) {
            true => Ok((Own { number, word }, found)),
            // Members that end sweep others: only they change a word meanwhile.
            false => self.claim_member(take_over),
        }
    }

    /// Gives a number up before its member has joined: the pages of one that has ended are that one's again.
    pub(crate) fn undo_claim(&self, own: Own, before: u64) {
        self.swap(at(own.number), own.word, before);
    }

    /// Gives a number up.
    pub(crate) fn release_member(&self, own: Own) {
        release(self, at(own.number), own.word);
    }

    /// Fails if another process has taken the tier from this one.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
    pub(crate) fn expect_member(&self, own: Own) -> Result<()> {
        match self.get(at(own.number)) == own.word {
            true => Ok(()),
            false => {
                let why = "another process has taken it over, or has begun a new one there";
                Err(MemoryError::invalid("tier", why).into())
            }
        }
    }

    /// Returns the members that live, or may live.
    pub(crate) fn list_members(&self, own: Own) -> Vec<Member> {
        let member = |(number, word)| {
            let is_self = number == own.number;
            let (Ok(Owner::Lives(pid)) | Ok(Owner::Elsewhere(pid))) = judge(word) else {
                return None;
            };
            Some(Member { pid, is_self })
        };
        self.each_member().filter_map(member).collect()
    }
}

/// The bits of a process's number: Linux has at most 2^22.
const PID_BITS: u32 = 22;
const SPACE_BITS: u32 = 20;
const START_BITS: u32 = 22;

/// The process that the word names, and whether it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    None,
    Ended,
    Lives(u32),
    /// In another PID namespace, or on another boot of the machine.
    Elsewhere(u32),
}

fn text_hash(text: &str) -> u64 {
    let words: Vec<u64> = text.bytes().map(u64::from).collect();
    hash(&words)
}

fn read(path: &str) -> Result<String, MemoryError> {
    fs::read_to_string(path).map_err(|error| MemoryError::system(format!("reading {path}"), &error))
}

/// A hash of the PID namespace and of the boot.
fn space() -> Result<u64, MemoryError> {
    let path = "/proc/self/ns/pid";
    let namespace = fs::read_link(path)
        .map_err(|error| MemoryError::system(format!("reading {path}"), &error))?;
    let boot = read("/proc/sys/kernel/random/boot_id")?;
    // Processes of other time namespaces see other times of a process's start.
    let time = fs::read_link("/proc/self/ns/time").unwrap_or_default();
    Ok(text_hash(&format!(
        "{}{}{boot}",
        namespace.display(),
        time.display()
    )))
}

const fn low(value: u64, bits: u32) -> u64 {
    value & ((1 << bits) - 1)
}

fn word(pid: u32, space: u64, start: u64) -> u64 {
    let pid = low(pid.into(), PID_BITS) << (SPACE_BITS + START_BITS);
    pid | low(space, SPACE_BITS) << START_BITS | low(hash(&[start]), START_BITS)
}

/// Returns this process's word.
pub(crate) fn own() -> Result<u64, MemoryError> {
    let stat = read("/proc/self/stat")?;
    let stat = ProcessStat::parse(&stat);
    let unknown = || MemoryError::failed("reading /proc/self/stat", "it has another form");
    Ok(word(
        std::process::id(),
        space()?,
        stat.ok_or_else(unknown)?.started,
    ))
}

pub(crate) fn judge(found: u64) -> Result<Owner, MemoryError> {
    judge_by(found, Path::new("/proc"))
}

fn judge_by(found: u64, proc: &Path) -> Result<Owner, MemoryError> {
    if found == 0 {
        return Ok(Owner::None);
    }
    let pid = (found >> (SPACE_BITS + START_BITS)) as u32;
    if low(found >> START_BITS, SPACE_BITS) != low(space()?, SPACE_BITS) {
        return Ok(Owner::Elsewhere(pid));
    }
    let stat = |of: &str| fs::read_to_string(proc.join(of).join("stat"));
    // A `/proc` of another PID namespace has other processes under these numbers.
    let own = stat("self").ok();
    let own = own.as_deref().and_then(ProcessStat::parse);
    let is_ours = own.is_some_and(|own| own.pid == std::process::id());
    let text = match is_ours.then(|| stat(&pid.to_string())) {
        Some(Ok(text)) => Some(text),
        // `/proc` may hide the process from this user: the kernel still reports whether it exists.
        Some(Err(error)) if error.kind() == ErrorKind::NotFound => None,
        Some(Err(_)) => return Ok(Owner::Lives(pid)),
        None => None,
    };
    Ok(match text.as_deref().and_then(ProcessStat::parse) {
        Some(stat) if low(hash(&[stat.started]), START_BITS) != low(found, START_BITS) => {
            Owner::Ended
        }
        Some(stat) if stat.has_ended() => Owner::Ended,
        Some(_) => Owner::Lives(pid),
        None => match Pid::from_raw(pid as i32).map(test_kill_process) {
            None | Some(Err(rustix::io::Errno::SRCH)) => Owner::Ended,
            Some(_) => Owner::Lives(pid),
        },
    })
}

/// Claims a place in the memory, which had the word `found`, for this process. Returns this process's word, for [`release`]; `None` if
/// the place has another word by now.
///
/// # Errors
/// [`Error::InUse`] if a process has it that may live, unless it is elsewhere and has ended;
/// [`System`](crate::MemoryError::System) without `/proc`.
pub(crate) fn claim(
    words: &Words<'_>,
    at: u64,
    found: u64,
    elsewhere_has_ended: bool,
) -> Result<Option<u64>> {
    let own = own()?;
    expect_no_other(judge(found)?, elsewhere_has_ended)?;
    Ok(words.swap(at, found, own).then_some(own))
}

/// Refuses a place of a process that may live, unless it is elsewhere and that one is said to have ended.
///
/// # Errors
/// [`Error::InUse`].
pub(crate) fn expect_no_other(owner: Owner, elsewhere_has_ended: bool) -> Result<()> {
    match owner {
        Owner::Elsewhere(pid) if !elsewhere_has_ended => Err(Error::InUse {
            pid,
            is_elsewhere: true,
        }),
        Owner::Lives(pid) => Err(Error::InUse {
            pid,
            is_elsewhere: false,
        }),
        _ => Ok(()),
    }
}

/// Gives a place up, if this process has it.
pub(crate) fn release(words: &Words<'_>, at: u64, own: u64) {
    // Another word is that of a process which was told to take over.
    words.swap(at, own, 0);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn this_process_lives_and_others_have_ended() {
        let own = own().unwrap();
        assert_eq!(judge(own), Ok(Owner::Lives(std::process::id())));
        assert_eq!(judge(0), Ok(Owner::None));
        let other_start = own ^ 1;
        assert_eq!(
            judge(other_start),
            Ok(Owner::Ended),
            "the number was given out again"
        );
        let other_space = own ^ 1 << START_BITS;
        assert_eq!(judge(other_space), Ok(Owner::Elsewhere(std::process::id())));
        let none = word((1 << PID_BITS) - 1, space().unwrap(), 5);
        assert_eq!(judge(none), Ok(Owner::Ended));
    }

    #[test]
    fn a_zombie_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let path = format!("/proc/{}/stat", child.id());
        let started = loop {
            let text = fs::read_to_string(&path).unwrap();
            let stat = ProcessStat::parse(&text).unwrap();
            if stat.state == 'Z' {
                break stat.started;
            }
            std::thread::yield_now();
        };
        let word = word(child.id(), space().unwrap(), started);
        assert_eq!(judge(word), Ok(Owner::Ended));
        child.wait().unwrap();
        assert_eq!(judge(word), Ok(Owner::Ended));
    }

    #[test]
    fn a_process_gives_up_its_own_place_alone() {
        let memory = [AtomicU64::new(0)];
        let words = Words::over(&memory);
        let own = claim(&words, 0, 0, false).unwrap().unwrap();
        // Another process was told to take the place over.
        words.put(0, own ^ 1);
        release(&words, 0, own);
        assert_eq!(words.get(0), own ^ 1);
        release(&words, 0, own ^ 1);
        assert_eq!(words.get(0), 0);
    }

    /// A process of another namespace has this process's number there, and started at another time.
    #[test]
    fn the_proc_of_another_namespace_ends_nobody() {
        let pid = std::process::id();
        let proc = std::env::temp_dir().join(format!("egmem-kv-proc-{pid}"));
        let tail = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 7 0 1 0";
        for (name, number) in [("self", pid + 1), (&pid.to_string(), pid)] {
            fs::create_dir_all(proc.join(name)).unwrap();
            fs::write(proc.join(name).join("stat"), format!("{number} (a) {tail}")).unwrap();
        }
        let none = word((1 << PID_BITS) - 1, space().unwrap(), 5);
        let judged = [own().unwrap(), none].map(|word| judge_by(word, &proc));
        fs::remove_dir_all(&proc).unwrap();
        assert_eq!(judged, [Ok(Owner::Lives(pid)), Ok(Owner::Ended)]);
    }
}
