//! Whether a process of this machine still runs. It is told by `/proc`, so no fd is kept for it.

use std::collections::HashSet;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// A process, not mixed up with a later one of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Process {
    pid: u32,
    /// In ticks since the machine started.
    started: u64,
}

/// What `/proc/PID/task/PID/stat` says. Source: proc_pid_stat(5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    state: char,
    threads: u64,
    started: u64,
}

impl Process {
    /// One of many that are not there.
    #[cfg(test)]
    pub fn without(started: u32) -> Self {
        Self {
            pid: i32::MAX as u32,
            started: started.into(),
        }
    }

    /// The process with that number now; `None` where `/proc` does not show it.
    pub fn of(pid: u32) -> Option<Self> {
        let text = std::fs::read_to_string(path(pid)).ok()?;
        let started = Stat::parse(&text)?.started;
        Some(Self { pid, started })
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it has certainly ended. What cannot be found out is taken to run.
    pub fn has_ended(&self) -> bool {
        match std::fs::read_to_string(path(self.pid)) {
            Ok(text) => Stat::parse(&text).is_some_and(|now| self.has_ended_by(now)),
            // `/proc` may hide others' processes (hidepid), and this one can have changed its user
            // since. A signal that is not sent finds all.
            Err(_) => self.is_unknown(),
        }
    }

    /// Whether no process has its number.
    fn is_unknown(&self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }

    fn has_ended_by(&self, now: Stat) -> bool {
        // The first thread of a process may end before the others, and looks like its corpse then.
        let corpse = matches!(now.state, 'Z' | 'X') && now.threads <= 1;
        corpse || now.started != self.started
    }
}

/// Those of the processes that have ended. The kernel is asked in a thread of its own: with many
/// processes that takes a while.
pub(super) async fn ended(mut processes: HashSet<Process>) -> HashSet<Process> {
    if processes.is_empty() {
        return processes;
    }
    let look = move || {
        processes.retain(Process::has_ended);
        processes
    };
    let looked = tokio::task::spawn_blocking(look).await;
    // Without an answer all are taken to run.
    looked.unwrap_or_default()
}

/// Of its first thread, which is the process's own: for `/proc/PID/stat` QEMU's user mode makes up
/// one, which says since when the thread that reads it runs.
fn path(pid: u32) -> String {
    format!("/proc/{pid}/task/{pid}/stat")
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The name before may hold spaces and parentheses.
        let (_, rest) = text.rsplit_once(')')?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let threads = fields.nth(16)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        Some(Self {
            state,
            threads,
            started,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    const LINE: &str = "42 (a) b (c)) S 1 42 42 0 -1 4194560 9 0 0 0 1 2 3 4 20 0 7 0 123456 8 9";

    #[test]
    fn a_line_is_read_behind_the_name() {
        let stat = Stat::parse(LINE).unwrap();
        let expected = Stat {
            state: 'S',
            threads: 7,
            started: 123_456,
        };
        assert_eq!(stat, expected);
        let process = Process {
            pid: 42,
            started: 123_456,
        };
        for (state, threads, started, ended) in [
            ('S', 7, 123_456, false),
            ('T', 7, 123_456, false),
            ('Z', 7, 123_456, false),
            ('Z', 1, 123_456, true),
            ('S', 7, 123_457, true),
        ] {
            let now = Stat {
                state,
                threads,
                started,
            };
            assert_eq!(process.has_ended_by(now), ended, "{now:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_not(text in "[0-9A-Z() -]{0,80}") {
            let _ = Stat::parse(&text);
        }
    }

    #[test]
    fn a_child_runs_until_it_has_ended() {
        let own = Process::of(std::process::id()).unwrap();
        assert!(!own.has_ended());
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert!(!process.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
    }

    #[test]
    fn a_process_that_proc_hides_is_not_taken_for_ended() {
        // Its own, and the first, which belongs to somebody else: a signal could not be sent.
        for pid in [std::process::id(), 1] {
            let hidden = Process { pid, started: 0 };
            assert!(!hidden.is_unknown(), "{pid}");
        }
        for pid in [0, u32::MAX] {
            let none = Process { pid, started: 0 };
            assert!(!none.is_unknown(), "{pid} is no number of a process");
        }
        // Linux has no more than 2^22.
        let none = Process {
            pid: i32::MAX as u32,
            started: 0,
        };
        assert!(none.is_unknown() && none.has_ended());
    }
}
