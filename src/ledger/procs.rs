//! Processes, as `/proc` has them, and questions to the kernel that it may not answer, because another process holds a lock.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::Duration;

use egmem_core::host::ProcessStat;

use crate::driver::lock;
use crate::fork::PerProcess;

fn path(pid: u32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{file}"))
}

/// Returns the name of a process's program, without a line break.
pub(crate) fn name(pid: u32) -> Option<String> {
    let name = std::fs::read_to_string(path(pid, "comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// Returns a command line, or else the program's name.
pub(crate) const fn title<'a>(command: &'a str, name: &'a str) -> &'a str {
    if command.is_empty() { name } else { command }
}

/// Reads at most `most` bytes.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The most bytes of a command line.
const COMMAND: u64 = 200;

/// Returns a process's program without its folder, and the arguments.
pub(crate) fn command(pid: u32) -> Option<String> {
    command_in(&path(pid, ""))
}

/// As [`command`], of the process whose folder in `/proc` this is.
pub(crate) fn command_in(process: &Path) -> Option<String> {
    // A folder in front of the program is not part of the answer.
    joined(&read(&process.join("cmdline"), COMMAND + 4096).ok()?)
}

/// Joins arguments, each of which ends with a zero byte.
fn joined(arguments: &[u8]) -> Option<String> {
    let end = arguments.strip_suffix(&[0]).unwrap_or(arguments);
    let program = end.split(|&byte| byte == 0).next()?;
    let folder = program.iter().rposition(|&byte| byte == b'/');
    let shown = &end[folder.map_or(0, |slash| slash + 1)..];
    let text = String::from_utf8_lossy(shown).replace('\0', " ");
    let text = crate::texts::cut(text.trim(), COMMAND as usize);
    (!text.is_empty()).then(|| text.to_owned())
}

/// Returns whether there is a process of this id.
pub(crate) fn is_alive(pid: u32) -> bool {
    path(pid, "").exists()
}

/// Returns how many milliseconds ago a process began, or `None` if there is none of this id.
pub(crate) fn age_ms(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(path(pid, "stat")).ok()?;
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    age(&stat, &uptime, rustix::param::clock_ticks_per_second())
}

fn age(stat: &str, uptime: &str, ticks: u64) -> Option<u64> {
    let begun = ProcessStat::parse(stat)?.started;
    let begun = begun.checked_mul(1000)? / ticks.max(1);
    let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    Some(((uptime * 1000.0) as u64).saturating_sub(begun))
}

/// The most threads of one kind whose answer nobody waits for any more.
const MOST: usize = 64;

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// It did not come in time, now or when the same was asked before.
    Late,
    /// It was not asked: there is no thread for it, or as many as may be wait already.
    NotAsked,
}

/// A question, and a mark that lives as long as the thread that waits for its answer.
type Entry<K> = (K, Weak<()>);

/// The questions of one kind whose answers nobody waits for any more. A forked child has none of its parent's threads, and
/// cannot wait for its parent's lock.
pub(crate) struct Late<K>(PerProcess<Mutex<Vec<Entry<K>>>>);

impl<K: PartialEq + Send> Late<K> {
    pub(crate) const fn new() -> Self {
        Self(PerProcess::new())
    }

    /// Returns the answer to a question about `key`, asked on a thread of its own. A thread that waits in the kernel cannot be
    /// ended: it stays until it gets its answer, which nobody reads any more. It owns all that it uses. Until then the same
    /// question is late at once.
    pub(crate) fn within<T: Send + 'static>(
        &self,
        key: K,
        limit: Duration,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        let late = self.waiting();
        if late.iter().any(|(late, _)| *late == key) {
            return Err(Unanswered::Late);
        }
        if late.len() >= MOST {
            return Err(Unanswered::NotAsked);
        }
        drop(late);
        let alive = Arc::new(());
        let waits = Arc::downgrade(&alive);
        let (sender, answer) = channel();
        let ask = move || {
            // Dropped when the thread ends, also by a panic.
            let _alive = alive;
            sender.send(question()).ok();
        };
        let thread = thread::Builder::new().name("egmem-ps".into());
        thread.spawn(ask).map_err(|_| Unanswered::NotAsked)?;
        answer.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                self.waiting().push((key, waits));
                Unanswered::Late
            }
            RecvTimeoutError::Disconnected => Unanswered::NotAsked,
        })
    }

    /// Returns the questions whose threads still wait.
    fn waiting(&self) -> MutexGuard<'_, Vec<Entry<K>>> {
        let mut late = lock(self.0.get(|_| Mutex::default()));
        late.retain(|(_, waits)| waits.strong_count() > 0);
        late
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_and_young() {
        let this = std::process::id();
        assert!(is_alive(this) && name(this).is_some_and(|name| !name.is_empty()));
        assert!(age_ms(this).is_some());
        assert!(!is_alive(u32::MAX) && name(u32::MAX).is_none() && age_ms(u32::MAX).is_none());
    }

    #[test]
    fn commands_are_joined_and_bounded() {
        for (bytes, text) in [
            (
                &b"python\0train.py\0--epochs\x003\0"[..],
                Some("python train.py --epochs 3"),
            ),
            (
                b"/usr/bin/python3\0/home/me/train.py\0",
                Some("python3 /home/me/train.py"),
            ),
            (b"nginx: master process", Some("nginx: master process")),
            (b"a\0\0b\0", Some("a  b")),
            (b"\xff\0", Some("\u{fffd}")),
            (b"/\0", None),
            (b"", None),
        ] {
            assert_eq!(joined(bytes).as_deref(), text, "{bytes:?}");
        }
        let long = joined(format!("/bin/x\0{}", "ä".repeat(5000)).as_bytes()).unwrap();
        assert_eq!(long.len(), 200);
        let this = command(std::process::id()).unwrap();
        assert!(!this.contains(['/', '\0']) || this.contains(' '), "{this}");
    }

    #[test]
    fn ages_are_read_behind_any_name() {
        let behind = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 250 20 21";
        for name in ["sleep", "a) b (c", ") 1 2"] {
            let stat = format!("7 ({name}) {behind}");
            assert_eq!(age(&stat, "10.50 3.2\n", 100), Some(8000), "{name}");
        }
        for (stat, uptime) in [("7 (x) S 1", "1 1"), ("7 x", "1 1"), ("", "")] {
            assert_eq!(age(stat, uptime, 100), None);
        }
    }

    #[test]
    fn late_questions_are_bounded_and_not_asked_again_until_their_answers_come() {
        let late = Late::new();
        let (senders, questions): (Vec<_>, Vec<_>) = (0..MOST).map(|_| channel::<()>()).unzip();
        for (key, question) in questions.into_iter().enumerate() {
            let wait = move || question.recv().unwrap();
            let answer = late.within(key, Duration::ZERO, wait);
            assert_eq!(answer, Err(Unanswered::Late));
        }
        let ask = |key| late.within(key, Duration::from_secs(600), || 1);
        assert_eq!(ask(0), Err(Unanswered::Late));
        assert_eq!(ask(MOST), Err(Unanswered::NotAsked));
        // The threads that wait panic.
        drop(senders);
        while !late.waiting().is_empty() {
            thread::yield_now();
        }
        assert_eq!((ask(0), ask(MOST)), (Ok(1), Ok(1)));
    }

    /// Keeps tests apart that would disturb each other: by many entries, or by a fork, whose child has the sockets that
    /// are open meanwhile.
    pub(crate) fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        lock(&ALONE)
    }

    #[test]
    #[cfg(not(miri))]
    fn a_child_that_is_forked_while_the_list_is_locked_asks_its_own_questions() {
        let _alone = alone();
        let late = Late::new();
        let locked = late.waiting();
        assert!(crate::fork_check::in_a_child(|| {
            let answer = late.within(1, Duration::from_secs(600), || 2);
            answer == Ok(2)
        }));
        drop(locked);
    }
}
